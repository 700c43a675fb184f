"""The vision tower, and what it made of the latest pictures.

Decides which encoded pictures are kept: those used last. Must be used from the engine's thread only, since
encoding is a forward pass on the device.

Rules: the same picture gives the same object, and with it the same token ids, as long as it is kept: by
those ids the library's prefix cache tells pictures apart.

Source: `ExLlamaV2VisionTower.get_image_embeddings` and `ExLlamaV2MMEmbedding` of exllamav2 0.3.2.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import torch
from PIL import Image

from engine_service.backends.base import Picture

MAX_KEPT: Final = 24
"""Encoded pictures that are kept, in host memory: up to 9 MiB each for a model of 7 billion weights."""


class Sight:
    """Encodes pictures for one model."""

    def __init__(self, tower: Any, model: Any, tokenizer: Any, *, max_kept: int = MAX_KEPT) -> None:
        """Encode with the library's tower, for the library's model and tokenizer."""
        self._tower, self._model, self._tokenizer = tower, model, tokenizer
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, Any] = OrderedDict()

    @property
    def num_kept(self) -> int:
        """Encoded pictures at hand."""
        return len(self._kept)

    def encoded(self, picture: Picture) -> Any:
        """Return the picture as ExLlamaV2MMEmbedding, encoded now if it is not at hand.

        Raises whatever the tower raises, and ValueError where it makes another number of tokens than was
        announced.
        """
        found = self._kept.get(picture.digest)
        if found is None:
            found = self._encode(picture)
            self._kept[picture.digest] = found
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(picture.digest)
        return found

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _encode(self, picture: Picture) -> Any:
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
        encoded = self._tower.get_image_embeddings(self._model, self._tokenizer, image)
        if encoded.length != picture.num_tokens:
            raise ValueError(
                f"a picture was announced with {picture.num_tokens} tokens, and the model's tower makes "
                f"{encoded.length} of it"
            )
        return encoded

    def close(self) -> None:
        """Free the device."""
        self._kept.clear()
        self._tower.unload()
