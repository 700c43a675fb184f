"""What is known of a model's sight from its folder: which pictures it can be shown, and how many tokens each
takes.

Decides how large a picture is shown. Knows the configuration that a vision model's folder has, and neither
torch nor exllamav2; Pillow is imported when the first picture is read. Everything may be used from any
thread.

Rules: what is announced for a picture is what the tower makes of it, to the token; no message shows
anything of a picture.

Source: the preprocessors of exllamav2 0.3.2 (`vlm/processor`), which follow those of Pixtral (Mistral 2024),
Qwen2-VL (Wang et al. 2024) and Gemma 3 (2025). Differs: a picture of more than MOST_TOKENS or MOST_PIXELS is
made smaller first.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from engine_service.backends.base import InvalidPicture, ModelError, Picture
from engine_service.backends.exllama.tokenizer import DirectoryTokenizer

MOST_TOKENS: Final = 1280
"""A picture that takes more is made smaller; a megapixel of Qwen2-VL."""

MOST_PIXELS: Final = 2**20
"""So is one of more pixels, whatever it takes: it is held, at three bytes a pixel, until it is encoded."""

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_DECODED: Final = 40_000_000  # pixels; red, green and blue: 120 MB, for one picture at a time
_LONGEST_SIDE: Final = 16_384  # of every tower of the library
_TURNED: Final = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_ORIENTATION: Final = 0x0112


class _Shape(Protocol):
    """How one kind of tower cuts a picture into tokens."""

    @property
    def placeholder(self) -> str:
        """The token that the model knows for a part of a picture."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of a picture of that size; raise InvalidPicture for one that cannot be cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pixtral:
    """Rows of patches, each ended by a token, and one at the end."""

    patch: int
    merge: int
    longest_edge: int
    placeholder: str = "[IMG]"

    def num_tokens(self, width: int, height: int) -> int:
        ratio = max(1.0, width / self.longest_edge, height / self.longest_edge)
        columns, rows = (self._patches(side, ratio) // self.merge for side in (width, height))
        return rows * (columns + 1) + 1

    def _patches(self, side: int, ratio: float) -> int:
        reduced = max(1, math.floor(side / ratio)) if ratio > 1 else side
        step = 2 * self.patch
        return -(-reduced // step) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Qwen:
    """As many cells as the pixels have room for, between a token at the beginning and one at the end."""

    cell: int  #: pixels along an edge
    min_pixels: int
    max_pixels: int
    placeholder: str = "<|image_pad|>"

    def num_tokens(self, width: int, height: int) -> int:
        if min(width, height) < self.cell:
            raise InvalidPicture(
                f"it is {width} x {height} pixels; the model needs {self.cell} along each edge"
            )
        if max(width, height) > 200 * min(width, height):
            raise InvalidPicture(f"it is {width} x {height} pixels: the longer edge is over 200 of the other")
        # The library hands width and height over in the other order, which comes to the same.
        columns, rows = (round(side / self.cell) for side in (width, height))
        if columns * rows * self.cell**2 > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns, rows = (math.floor(side / shrink / self.cell) for side in (width, height))
        elif columns * rows * self.cell**2 < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (width * height))
            columns, rows = (math.ceil(side * stretch / self.cell) for side in (width, height))
        return columns * rows + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gemma:
    """The same for every picture, between a token at the beginning and one at the end."""

    num_cells: int
    placeholder: str = "<image_soft_token>"

    def num_tokens(self, width: int, height: int) -> int:
        return self.num_cells + 2


class DirectoryEye:
    """The sight of a model directory, as `base.Eye`."""

    def __init__(self, shape: _Shape, placeholder_id: int) -> None:
        """Cut pictures like shape."""
        self._shape = shape
        self._placeholder_id = placeholder_id
        self._one_at_a_time = threading.Lock()  # bounds what decoding takes

    @property
    def placeholder_id(self) -> int:
        """The token that stands in a prompt for every token of a picture."""
        return self._placeholder_id

    def look(self, file: bytes) -> Picture:
        """Read a picture's file; raise InvalidPicture for what is none, is damaged or cannot be fitted.

        Of a picture that moves the first frame is taken.
        """
        with self._one_at_a_time:
            image, width, height = self._decoded(file)
            if image.size != (width, height):
                image = image.resize((width, height))
            pixels: bytes = image.tobytes()
        named = hashlib.blake2b(b"%d x %d\n" % (width, height), digest_size=16)
        named.update(pixels)
        return Picture(
            num_tokens=self._shape.num_tokens(width, height),
            width=width,
            height=height,
            pixels=pixels,
            digest=named.digest(),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size at which a picture is shown; raise InvalidPicture for one that cannot be."""
        while True:
            num_tokens = self._shape.num_tokens(width, height)
            excess = max(num_tokens / MOST_TOKENS, width * height / MOST_PIXELS)
            if excess <= 1:
                return width, height
            scale = math.sqrt(1 / excess)
            width, height = max(1, int(width * scale)), max(1, int(height * scale))

    def _decoded(self, file: bytes) -> tuple[Any, int, int]:
        """Return the picture upright, in RGB, and the size at which it is to be shown."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            image: Any = Image.open(io.BytesIO(file), formats=FORMATS)
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
            width, height = image.size[::-1] if is_turned else image.size
            _check_size(width, height)
            width, height = self.fitted(width, height)
            # A JPEG can be read at a half, a quarter or an eighth, which saves most of the work.
            image.draft("RGB", (max(width, height),) * 2)
            return _on_white(ImageOps.exif_transpose(image)), width, height
        except InvalidPicture:
            raise
        except UnidentifiedImageError:
            raise InvalidPicture(f"it is none of {', '.join(FORMATS)}, or damaged") from None
        except Exception as error:  # Pillow raises whatever its decoders stumble over
            raise InvalidPicture(f"it is damaged or cut short ({type(error).__name__})") from None


def eye_of(directory: Path, texts: DirectoryTokenizer) -> DirectoryEye | None:
    """Return the sight of the model in a folder, None for one that sees nothing.

    Raises ModelError that names what is missing of one that would.
    """
    config = _read(directory / "config.json")
    if _kind(config) is None:
        return None
    preparing = _read(directory / "preprocessor_config.json")
    try:
        shape = _shape(config, preparing)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory}: what config.json and preprocessor_config.json say of pictures is not understood "
            f"({type(error).__name__}: {error})"
        ) from error
    ids = texts.encode(shape.placeholder, parse_special=True)
    if len(ids) != 1:
        raise ModelError(f"{directory}: tokenizer.json has no token {shape.placeholder}")
    return DirectoryEye(shape, ids[0])


def _kind(config: Mapping[str, Any]) -> str | None:
    """Return which kind of tower the library would make of a model's configuration."""
    names = {
        "Qwen2VLForConditionalGeneration": "qwen",
        "Qwen2_5_VLForConditionalGeneration": "qwen",
        "LlavaForConditionalGeneration": "pixtral",
        "Mistral3ForConditionalGeneration": "pixtral",
        "Gemma3ForConditionalGeneration": "siglip_vision_model",
    }
    kind = names.get(next(iter(config.get("architectures") or ()), ""))
    tower = config.get("vision_config") or {}
    return kind if kind == "qwen" or tower.get("model_type") == kind else None


def _shape(config: Mapping[str, Any], preparing: Mapping[str, Any]) -> _Shape:
    tower = config["vision_config"]
    match _kind(config):
        case "qwen":
            return _Qwen(
                cell=int(tower["spatial_patch_size"]) * int(tower["spatial_merge_size"]),
                min_pixels=int(preparing["min_pixels"]),
                max_pixels=int(preparing["max_pixels"]),
            )
        case "pixtral":
            patch = preparing["patch_size"]
            return _Pixtral(
                patch=int(patch["width"] if isinstance(patch, dict) else patch),
                merge=int(config.get("spatial_merge_size") or 1),
                longest_edge=int(preparing["size"]["longest_edge"]),
            )
        case _:
            return _Gemma(num_cells=int(config["mm_tokens_per_image"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file, which a model that sees needs") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: the file cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return content


def _check_size(width: int, height: int) -> None:
    if max(width, height) > _LONGEST_SIDE:
        raise InvalidPicture(f"it is {width} x {height} pixels; at most {_LONGEST_SIDE} along an edge")
    if width * height > _MOST_DECODED:
        raise InvalidPicture(
            f"it is {width} x {height} pixels; at most {_MOST_DECODED // 1_000_000} million in all"
        )


def _on_white(image: Any) -> Any:
    """Return the picture in RGB; what can be seen through is white, as the towers have it."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image

    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "WHITE")
    white.alpha_composite(layer)
    return white.convert("RGB")
