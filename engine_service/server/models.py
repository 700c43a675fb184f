"""The models that can be asked: which one a request means, how it talks, and what is shown of each.

Decides which model answers a request that names none. Where a model is, and when it serves, is the engine's.
"""

from __future__ import annotations

from typing import Any

from engine_service.chat.chosen import Chosen, prepared, prepared_if_usable
from engine_service.engine.loop import Engine
from engine_service.engine.residence import ModelStatus
from engine_service.errors import ModelUnavailable
from engine_service.scheduling.model import ModelId


class ModelDesk:
    """Finds the model of a request."""

    def __init__(self, engine: Engine, *, for_embeddings: str | None = None):
        """Prepare the engine's first model; raise ModelError if its chat template cannot be read.

        for_embeddings is the model for embeddings of which none is named; None: the first.
        """
        self._engine = engine
        self._for_embeddings = for_embeddings
        first = engine.default_model
        self._known: dict[ModelId, Chosen] = {first: prepared(first, engine.language(first))}

    def choose(self, name: str | None) -> Chosen:
        """Return the model that a request means; raise UnknownModel, ModelUnavailable."""
        model_id = self._engine.model_named(name)
        chosen = self._known.get(model_id)
        if chosen is None:
            language = self._engine.language(model_id)
            chosen = self._known[model_id] = prepared_if_usable(model_id, language)
        return chosen

    def choose_for_embeddings(self, name: str | None) -> Chosen:
        """Return the model that is to make embeddings; raise as `choose`."""
        return self.choose(name or self._for_embeddings)

    @property
    def can_embed(self) -> bool:
        """Whether embeddings are made where no model is named."""
        try:
            return self.choose_for_embeddings(None).info.can_embed
        except ModelUnavailable:
            return False

    # ---- shown

    def states(self) -> list[dict[str, Any]]:
        """Return where every model is, in few words."""
        return [
            {"id": name_of(status), "state": status.place.value, "progress": _rounded(status.progress)}
            for status in self._engine.models()
        ]

    def rows(self, created: int) -> list[dict[str, Any]]:
        """Return OpenAI's list of models, with what is known of each."""
        return [self._row(status, created) for status in self._engine.models()]

    def row(self, name: str, created: int) -> dict[str, Any]:
        """Return the line of `rows` about one model; raise UnknownModel."""
        model_id = self._engine.model_named(name)
        [found] = [status for status in self._engine.models() if status.model_id == model_id]
        return self._row(found, created)

    def _row(self, status: ModelStatus, created: int) -> dict[str, Any]:
        return {
            "id": name_of(status),
            "object": "model",
            "created": created,
            "owned_by": "fairhearth",
            "fairhearth": {
                "state": status.place.value,
                "progress": _rounded(status.progress),
                "is_default": status.model_id == self._engine.default_model,
                "is_pinned": status.is_pinned,
                "requests_waiting": status.num_waiting,
                "backend": status.info.backend if status.info else None,
                "max_context_tokens": status.info.max_context_tokens if status.info else None,
                "can_embed": status.info.can_embed if status.info else False,
                "can_see": status.info.can_see if status.info else False,
                "error": status.trouble,
            },
        }


def name_of(status: ModelStatus) -> str:
    """Return what the API calls a model."""
    return status.info.name if status.info else status.model_id


def _rounded(progress: float | None) -> float | None:
    return None if progress is None else round(progress, 3)
