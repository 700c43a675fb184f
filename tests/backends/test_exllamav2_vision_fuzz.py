"""Random lives of requests with pictures on ExLlamaV2's own generator, in a cache that is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_service.backends.base import GenerationOrder, PlacedPicture
from engine_service.backends.exllamav2.backend import Loaded
from engine_service.backends.exllamav2.vision import Sight
from tests.backends import exllamav2_cpu
from tests.backends.conftest import Library
from tests.backends.echo import PAGE
from tests.backends.exllamav2_eye import (
    drawing,
    gists,
    lend_a_processor,
    make_seeing_directory,
    make_seeing_loaded,
    with_pictures,
)
from tests.backends.test_exllama_fuzz import NUM_PAGES, Life


class SeeingLife(Life):
    """One with pictures: the same few over and over, more than are kept encoded."""

    def load(self, library: Library, directory: Path, *, drafts: bool) -> Loaded:
        self.files = [drawing(30 + 60 * n, 40, seed=n) for n in range(6)]
        return make_seeing_loaded(directory, cache_tokens=NUM_PAGES * PAGE, context_tokens=2560)

    def shown(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
        sight = self.backend._sight
        assert sight is not None
        sight._max_kept = 4
        parts: list[tuple[int, ...] | bytes] = [prompt]
        while self.random.random() < 0.6 and len(parts) < 6:
            last = parts.pop()
            cut = self.random.choice([0, min(100, len(last)), self.random.randrange(len(last) + 1)])
            parts += [last[:cut], self.random.choice(self.files), last[cut:]]
            self.count("pictures")
        return with_pictures(self.backend, *parts)

    def read(self, order: GenerationOrder) -> list[int]:
        ids = list(order.prompt_ids)
        for placed in order.pictures:
            encoded = self.encoded(placed)
            ids[placed.start : placed.end] = gists(encoded).tolist()
        return ids

    def encoded(self, placed: PlacedPicture) -> Any:
        """Encode anew, apart from what the backend keeps."""
        loaded = self.backend._loaded
        return Sight(loaded.tower, loaded.model, loaded.tokenizer).encoded(placed.picture)


def live_with_pictures(directory: Path, seed: int, num_steps: int) -> None:
    life = SeeingLife(exllamav2_cpu, make_seeing_directory(directory), seed=seed)
    life.run(num_steps)
    life.end()
    assert {"pictures", "outputs", "preempted", "resumed"} <= life.counts.keys(), life.counts


@pytest.mark.parametrize("seed", range(2))
def test_no_random_life_with_pictures_loses_a_token_or_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lend_a_processor(monkeypatch)
    live_with_pictures(tmp_path, seed, 700)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(300, 310))
def test_no_random_life_with_pictures_loses_a_token_or_a_page_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    lend_a_processor(monkeypatch)
    live_with_pictures(tmp_path, seed, 2000)
