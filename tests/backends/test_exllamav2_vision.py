"""Pictures through the library's own vision tower, on a processor, into the real generator.

The text depends on the embedding of every token of a picture, read back out of the paged cache.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exllamav2.vlm.processor import pixtral, qwen2, siglip
from PIL import Image

from engine_service.backends.base import InvalidPicture, ModelError, PlacedPicture
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer
from engine_service.backends.exllamav2.eye import MOST_PIXELS, MOST_TOKENS, DirectoryEye, eye_of
from engine_service.backends.exllamav2.provision import ExLlamaV2Source, Options
from engine_service.backends.exllamav2.vision import Sight
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.driver import Driver
from tests.backends.echo import PAGE, make_model_directory
from tests.backends.exllamav2_cpu import ExLlamaV2Backend
from tests.backends.exllamav2_eye import (
    PATCH,
    drawing,
    gists,
    lend_a_processor,
    make_seeing_backend,
    make_seeing_directory,
    with_pictures,
)

CAT, DOG = drawing(seed=1), drawing(seed=2)
LARGE = drawing(640, 320, seed=3)  # 821 tokens: several pages
BEFORE, AFTER = tuple(range(1, 41)), tuple(range(60, 90))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model that sees."""
    return make_seeing_directory(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_a_processor(monkeypatch)


class Bench:
    """A backend and a driver; compares every output with the model's own over the embeddings it was given."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.backend: ExLlamaV2Backend = make_seeing_backend(directory, **options)
        self.driver = Driver(self.backend)
        self.orders: dict[str, Any] = {}

    @property
    def tower(self) -> Any:
        return self.backend._loaded.tower

    def admit(self, name: str, *parts: tuple[int, ...] | bytes, max_tokens: int = 12, **options: Any) -> int:
        ids, placed = with_pictures(self.backend, *parts)
        order = self.driver.order(name, ids, max_tokens, pictures=placed, ignore_eos=True, **options)
        self.orders[name] = order
        return self.driver.admit(order)

    def run(self, name: str, *parts: tuple[int, ...] | bytes, **options: Any) -> int:
        cached = self.admit(name, *parts, **options)
        self.driver.finish(name)
        return cached

    def begin(self, name: str, *parts: tuple[int, ...] | bytes, num_tokens: int, **options: Any) -> None:
        """Run a request until it has so many tokens of output."""
        self.admit(name, *parts, **options)
        self.driver.prefill(name)
        for _ in range(num_tokens - 1):
            self.driver.step(decodes=[name])
        assert len(self.output(name)) == num_tokens

    def output(self, name: str) -> list[int]:
        return self.driver.outputs[RequestId(name)].token_ids

    def is_exact(self, *names: str) -> bool:
        self.backend.check()
        for name in names:
            order = self.orders[name]
            ids = list(order.prompt_ids)
            for placed in order.pictures:
                ids[placed.start : placed.end] = gists(self._encoded(placed)).tolist()
            model: Any = self.backend._loaded.model
            if self.output(name) != model.continuation(ids, len(self.output(name))):
                return False
        return True

    def _encoded(self, placed: PlacedPicture) -> Any:
        """Encode anew, apart from what the backend keeps."""
        loaded = self.backend._loaded
        return Sight(loaded.tower, loaded.model, loaded.tokenizer).encoded(placed.picture)


@pytest.fixture
def bench(directory: Path) -> Iterator[Bench]:
    made = Bench(directory)
    yield made
    made.backend.check()
    made.backend.close()


# -- what the model reads ----------------------------------------------------------------------------------


def test_the_text_comes_from_what_the_tower_made_of_the_picture(bench: Bench) -> None:
    assert bench.backend.info.can_see
    bench.run("cat", BEFORE, CAT, AFTER)
    bench.run("dog", BEFORE, DOG, AFTER)
    assert bench.is_exact("cat", "dog")
    assert bench.output("cat") != bench.output("dog")


@pytest.mark.parametrize("chunk", [100, 256, 1024])
def test_a_picture_may_be_cut_by_chunks_and_pages(bench: Bench, chunk: int) -> None:
    bench.admit("large", BEFORE, LARGE, CAT, AFTER, LARGE)
    bench.driver.finish("large", chunk=chunk)
    assert bench.tower.num_encoded == 2, "one of them stands there twice"
    assert bench.is_exact("large")


def test_requests_with_and_without_pictures_share_an_iteration(bench: Bench) -> None:
    bench.admit("cat", CAT, AFTER)
    bench.admit("dog", BEFORE, DOG)
    bench.admit("blind", BEFORE, AFTER)
    bench.driver.finish("cat", "dog", "blind")
    assert bench.is_exact("cat", "dog", "blind")


def test_a_prompt_may_be_a_picture_alone(bench: Bench) -> None:
    bench.run("cat", CAT)
    assert bench.is_exact("cat")


@pytest.mark.parametrize("options", [{"num_draft_tokens": 3}, {"paged": False}])
def test_pictures_go_with_n_gram_drafts_and_without_pages(directory: Path, options: dict[str, Any]) -> None:
    bench = Bench(directory, **options)
    for name, picture in (("cat", CAT), ("dog", DOG), ("again", CAT)):
        bench.run(name, BEFORE, picture, AFTER, max_tokens=30)
    assert bench.is_exact("cat", "dog", "again")
    bench.backend.close()


def test_a_model_that_sees_takes_no_draft_model(bench: Bench) -> None:
    loaded = bench.backend._loaded
    drafting = type(loaded)(
        name="both",
        model=loaded.model,
        cache=loaded.cache,
        tokenizer=loaded.tokenizer,
        texts=loaded.texts,
        tower=loaded.tower,
        eye=loaded.eye,
        draft_model=loaded.model,
    )
    with pytest.raises(ValueError, match="cannot have another one draft"):
        ExLlamaV2Backend(drafting, max_sequences=2)


# -- what is kept ------------------------------------------------------------------------------------------


def test_the_same_picture_is_encoded_once_and_found_in_the_cache(bench: Bench) -> None:
    assert bench.run("first", BEFORE, LARGE, AFTER) == 0
    num_encoded = bench.tower.num_encoded
    cached = bench.run("again", BEFORE, LARGE, AFTER)
    assert bench.tower.num_encoded == num_encoded
    assert cached == len(bench.orders["again"].prompt_ids) - 1
    assert bench.output("again") == bench.output("first")


def test_another_picture_of_the_same_size_is_found_up_to_where_it_stands(bench: Bench) -> None:
    other = drawing(640, 320, seed=4)
    bench.run("first", BEFORE, LARGE, AFTER)
    assert bench.run("other", BEFORE, other, AFTER) == len(BEFORE)
    assert bench.is_exact("first", "other")


def test_the_same_pixels_in_another_format_are_the_same_picture(bench: Bench) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(CAT)).save(file, "WEBP", lossless=True)
    eye = bench.backend.eye
    assert eye is not None
    assert eye.look(file.getvalue()) == eye.look(CAT)
    assert eye.look(DOG).digest != eye.look(CAT).digest


def test_pictures_that_were_used_last_are_kept(bench: Bench) -> None:
    loaded, eye = bench.backend._loaded, bench.backend.eye
    assert eye is not None
    sight = Sight(loaded.tower, loaded.model, loaded.tokenizer, max_kept=2)
    cat, dog, bird = (eye.look(drawing(seed=seed)) for seed in (1, 2, 3))
    first, second = sight.encoded(cat), sight.encoded(dog)
    assert sight.encoded(cat) is first
    sight.encoded(bird)  # the dog is used least lately
    assert sight.num_kept == 2
    assert sight.encoded(cat) is first
    again = sight.encoded(dog)
    assert again is not second
    assert again.first_index != second.first_index, "another picture's cache cannot be taken for it"


def test_a_request_goes_on_after_its_picture_was_given_up(directory: Path) -> None:
    bench = Bench(directory)
    bench.backend._sight._max_kept = 1  # type: ignore[union-attr]
    bench.admit("cat", BEFORE, CAT, AFTER, max_tokens=20)
    bench.driver.prefill("cat", chunk=60)
    bench.run("dog", BEFORE, DOG, AFTER)
    bench.driver.finish("cat")
    assert bench.is_exact("cat", "dog")


# -- put back, broken off, handed over ---------------------------------------------------------------------


def test_a_request_that_was_put_back_resumes_exactly(bench: Bench) -> None:
    bench.begin("large", BEFORE, LARGE, AFTER, max_tokens=40, num_tokens=10)
    bench.backend.preempt(RequestId("large"), PreemptionMode.RELEASE)
    bench.backend.drop_cache()
    bench.driver.resume(RequestId("large"))
    bench.driver.finish("large")
    assert len(bench.output("large")) == 40
    assert bench.is_exact("large")


def test_everything_is_computed_again_after_repeated_failures(bench: Bench) -> None:
    bench.begin("cat", BEFORE, LARGE, AFTER, max_tokens=20, num_tokens=3)
    bench.backend._loaded.model.fail_next = [("decode", RuntimeError("broken"))] * 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            bench.driver.step(decodes=["cat"])
    bench.driver.finish("cat")
    assert bench.is_exact("cat")


def test_the_next_backend_encodes_what_was_handed_over(directory: Path) -> None:
    bench, later = Bench(directory), Bench(directory)
    bench.begin("cat", BEFORE, CAT, AFTER, max_tokens=20, num_tokens=5)
    bench.backend.preempt(RequestId("cat"), PreemptionMode.RELEASE)
    later.backend.adopt(bench.backend.hand_over())
    bench.backend.close()
    bench.driver.backend = bench.backend = later.backend
    bench.driver.resume(RequestId("cat"))
    bench.driver.finish("cat")
    assert bench.is_exact("cat")


def test_a_tower_that_fails_costs_its_own_request_only(bench: Bench) -> None:
    bench.admit("blind", BEFORE, AFTER)
    bench.tower.fail_next = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.admit("cat", BEFORE, CAT)
    assert RequestId("cat") not in bench.backend.request_ids
    bench.driver.finish("blind")
    bench.run("again", BEFORE, CAT)
    assert bench.is_exact("blind", "again")


def test_another_number_of_tokens_than_announced_is_refused(bench: Bench) -> None:
    loaded, eye = bench.backend._loaded, bench.backend.eye
    assert eye is not None
    picture = eye.look(CAT)
    wrong = type(picture)(
        num_tokens=54, width=picture.width, height=picture.height, pixels=picture.pixels, digest=b"x"
    )
    with pytest.raises(ValueError, match=r"announced with 54 tokens, .* makes 55"):
        Sight(loaded.tower, loaded.model, loaded.tokenizer).encoded(wrong)


def test_pictures_must_lie_within_the_prompt_one_behind_the_other(bench: Bench) -> None:
    ids, [placed] = with_pictures(bench.backend, BEFORE, CAT)
    for pictures in ((placed, placed), (PlacedPicture(start=placed.start + 1, picture=placed.picture),)):
        with pytest.raises(ValueError, match="one behind the other"):
            bench.driver.admit(bench.driver.order("x", ids, 5, pictures=pictures))
    with pytest.raises(ValueError, match="kept as a prefix"):
        bench.driver.admit(bench.driver.order("x", ids, 0, pictures=(placed,), keep_prefix=True))


def test_a_model_that_places_pictures_in_rows_places_everything_behind_them(directory: Path) -> None:
    bench = Bench(directory)
    model: Any = bench.backend._loaded.model
    model.config.arch.lm.mrope, model.config.mrope_section = True, [1]
    model.config.vision_spatial_merge_size = 1
    bench.begin(
        "large", BEFORE, LARGE, AFTER, max_tokens=2 * PAGE, num_tokens=PAGE + 50
    )  # so much output that it fills a page
    # All tokens of a picture take as many places as its longer edge has patches.
    behind = len(BEFORE) + 640 // PATCH + len(AFTER)
    assert model.positions[-1] == behind + PAGE + 50 - 2
    bench.backend.preempt(RequestId("large"), PreemptionMode.RELEASE)
    bench.backend.drop_cache()
    bench.driver.resume(RequestId("large"))  # fails within the model where the output has no place
    model.positions.clear()
    bench.driver.finish("large")
    assert model.positions[0] == behind + PAGE + 50 - 1
    assert bench.is_exact("large")
    bench.backend.close()


# -- which pictures ----------------------------------------------------------------------------------------

QWEN = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {"spatial_patch_size": 14, "spatial_merge_size": 2},
}
QWEN_PREPARING = {"min_pixels": 3136, "max_pixels": 12845056}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model"},
}
MISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral"},
}
MISTRAL_PREPARING = {"patch_size": 14, "size": {"longest_edge": 1540}}


def seeing(directory: Path, target: Path, config: Any, preparing: Any) -> DirectoryEye | None:
    """Return the sight of a folder with this configuration."""
    (target / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (target / "config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
    if preparing is not None:
        (target / "preprocessor_config.json").write_text(json.dumps(preparing))
    return eye_of(target, DirectoryTokenizer(target))


def tokens_by_the_library(kind: str, size: tuple[int, int], config: Any, preparing: Any) -> int:
    """Return the tokens that the library's own preprocessing comes to."""
    common = {"vision_resample": 3, "vision_image_mean": [0.5] * 3, "vision_image_std": [0.5] * 3}
    given = SimpleNamespace(**common, vision_rescale_factor=1 / 255)
    image = Image.new("RGB", size)
    if kind == "qwen":
        given.vision_spatial_patch_size, given.vision_spatial_merge_size = 14, 2
        given.vision_temporal_patch_size = 2
        given.vision_min_pixels, given.vision_max_pixels = preparing["min_pixels"], preparing["max_pixels"]
        _, _, (times, rows, columns), _ = qwen2.preprocess(given, image)
        return int(times * rows * columns // 4 + 2)
    if kind == "gemma":
        given.vision_patch_size, given.vision_size = (
            {"height": 14, "width": 14},
            {"height": 896, "width": 896},
        )
        siglip.preprocess(given, image)
        return int(config["mm_tokens_per_image"]) + 2
    given.vision_patch_size, given.vision_size = {"height": 14, "width": 14}, preparing["size"]
    _, (width, height), _, _ = pixtral.preprocess(given, image)
    columns, rows = width // 14 // 2, height // 14 // 2
    return rows * (columns + 1) + 1


@pytest.mark.parametrize(
    ("kind", "config", "preparing"),
    [
        ("qwen", QWEN, QWEN_PREPARING),
        ("qwen", QWEN, {"min_pixels": 3136, "max_pixels": 200_000}),
        ("gemma", GEMMA, {}),
        ("pixtral", MISTRAL, MISTRAL_PREPARING),
    ],
)
@pytest.mark.parametrize(
    "size",
    [(28, 28), (30, 31), (100, 70), (70, 100), (41, 999), (1000, 42), (897, 1301), (1540, 1540), (2000, 90)],
)
def test_the_tokens_announced_are_those_that_the_library_comes_to(
    directory: Path, tmp_path: Path, kind: str, config: Any, preparing: Any, size: tuple[int, int]
) -> None:
    eye = seeing(directory, tmp_path, config, preparing)
    assert eye is not None
    fitted = eye.fitted(*size)
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    seen = eye.look(file.getvalue())
    assert (seen.width, seen.height) == fitted
    assert len(seen.pixels) == fitted[0] * fitted[1] * 3
    assert seen.num_tokens == tokens_by_the_library(kind, fitted, config, preparing) <= MOST_TOKENS


def test_a_small_picture_keeps_its_size_and_a_large_one_its_proportions(
    directory: Path, tmp_path: Path
) -> None:
    eye = seeing(directory, tmp_path, QWEN, QWEN_PREPARING)
    assert eye is not None
    assert eye.fitted(640, 480) == (640, 480)
    width, height = eye.fitted(4032, 3024)
    assert width / height == pytest.approx(4 / 3, rel=0.01)
    assert 0.7 * MOST_TOKENS < eye.look(drawing(4032, 3024, kind="JPEG")).num_tokens <= MOST_TOKENS


@pytest.mark.parametrize(
    ("config", "preparing"),
    [(GEMMA, {}), (QWEN, {"min_pixels": 3136, "max_pixels": 200_000}), (MISTRAL, MISTRAL_PREPARING)],
)
def test_what_is_held_of_a_large_picture_is_bounded_however_few_tokens_it_takes(
    directory: Path, tmp_path: Path, config: Any, preparing: Any
) -> None:
    eye = seeing(directory, tmp_path, config, preparing)
    assert eye is not None
    seen = eye.look(drawing(4032, 3024, kind="JPEG"))
    assert len(seen.pixels) == seen.width * seen.height * 3 <= 3 * MOST_PIXELS
    assert seen.width / seen.height == pytest.approx(4 / 3, rel=0.01)


def eye_for(directory: Path) -> DirectoryEye:
    eye = eye_of(directory, DirectoryTokenizer(directory))
    assert eye is not None
    return eye


def huge(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"not a picture", "none of PNG, JPEG, WEBP, GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (drawing(kind="BMP"), "none of PNG"),
        (drawing(kind="PPM"), "none of PNG"),
        (CAT[: len(CAT) // 2], "damaged or cut short"),
        (CAT[:20], "none of PNG|damaged"),
        (drawing(kind="JPEG")[:1500], "damaged or cut short"),
        (huge(8000, 6000), "8000 x 6000 pixels; at most 40 million in all"),
        (huge(16400, 10), "at most 16384 along an edge"),
    ],
)
def test_a_file_that_cannot_be_looked_at_is_refused_with_the_reason(
    directory: Path, file: bytes, message: str
) -> None:
    with pytest.raises(InvalidPicture, match=message):
        eye_for(directory).look(file)


@pytest.mark.parametrize(
    ("size", "message"), [((20, 300), "needs 28 along each edge"), ((28, 6000), "over 200")]
)
def test_a_shape_that_the_tower_cannot_cut_is_refused(
    directory: Path, tmp_path: Path, size: tuple[int, int], message: str
) -> None:
    eye = seeing(directory, tmp_path, QWEN, QWEN_PREPARING)
    assert eye is not None
    with pytest.raises(InvalidPicture, match=message):
        eye.look(drawing(*size))


def test_what_can_be_seen_through_is_white(directory: Path) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (64, 64), (200, 0, 0, 0)).save(file, "PNG")
    assert set(eye_for(directory).look(file.getvalue()).pixels) == {255}


def test_a_photo_is_looked_at_upright(directory: Path) -> None:
    image = Image.new("RGB", (96, 64), "black")
    image.paste("white", (0, 0, 96, 32))  # the upper half
    turned, file = Image.Exif(), io.BytesIO()
    turned[0x0112] = 6  # to be turned by a quarter
    image.save(file, "PNG", exif=turned)
    seen = eye_for(directory).look(file.getvalue())
    assert (seen.width, seen.height) == (64, 96)
    pixels = np.frombuffer(seen.pixels, np.uint8).reshape(96, 64, 3)
    assert (pixels[:, :32].max(), pixels[:, 32:].min()) == (0, 255), "its upper half lies on the right"


def test_of_a_picture_that_moves_the_first_frame_is_taken(directory: Path) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("white", "black")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert set(eye_for(directory).look(file.getvalue()).pixels) == {255}


# -- from a folder -----------------------------------------------------------------------------------------


def described(directory: Path, **options: Any) -> Any:
    source = ExLlamaV2Source(
        directory,
        options=Options(**options),
        cache_dir=directory,
        context_tokens=4096,
        max_sequences=4,
        threads=None,
        progress=lambda _: None,
    )
    return source.describe()


def test_a_folder_says_whether_its_model_sees(directory: Path, tmp_path: Path) -> None:
    language = described(directory)
    assert language.info.can_see
    assert language.eye.look(CAT).num_tokens == 55
    assert language.eye.placeholder_id == DirectoryTokenizer(directory).encode("[IMG]", parse_special=True)[0]
    blind = make_model_directory(tmp_path)
    assert eye_of(blind, DirectoryTokenizer(blind)) is None


@pytest.mark.parametrize("options", [{"draft_tokens": 4, "draft_path": Path("x")}, {"tensor_parallel": True}])
def test_a_model_that_is_loaded_so_that_it_cannot_see_says_so(
    directory: Path, options: dict[str, Any]
) -> None:
    language = described(directory, **options)
    assert (language.info.can_see, language.eye) == (False, None)


@pytest.mark.parametrize(
    ("config", "preparing", "message"),
    [
        (QWEN, None, r"preprocessor_config\.json: there is no such file"),
        (QWEN, {"min_pixels": 1}, "not understood .*max_pixels"),
        (QWEN, [], "must be a JSON object"),
        ({**QWEN, "vision_config": {}}, QWEN_PREPARING, "not understood .*spatial_patch_size"),
        ({**GEMMA, "mm_tokens_per_image": "many"}, {}, "not understood"),
    ],
)
def test_what_is_missing_of_a_model_that_would_see_is_named(
    directory: Path, tmp_path: Path, config: Any, preparing: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        seeing(directory, tmp_path, config, preparing)


def test_a_tokenizer_without_the_token_of_pictures_is_named(tmp_path: Path) -> None:
    plain = make_model_directory(tmp_path)
    (plain / "config.json").write_text(json.dumps({"eos_token_id": 1, **GEMMA}))
    (plain / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no token <image_soft_token>"):
        eye_of(plain, DirectoryTokenizer(plain))
