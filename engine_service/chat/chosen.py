"""A model that is to answer: what it says of itself, and its way of talking. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.backends.base import Language, ModelError, ModelInfo
from engine_service.chat.conversation import Conversation
from engine_service.errors import ModelUnavailable
from engine_service.scheduling.model import ModelId


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The model that is to answer a request."""

    model_id: ModelId
    language: Language
    conversation: Conversation

    @property
    def info(self) -> ModelInfo:
        """Return what it is."""
        return self.language.info


def prepared(model_id: ModelId, language: Language) -> Chosen:
    """Return a model ready to be asked; raise ModelError if its chat template cannot be read."""
    conversation = Conversation(language.info, language.tokenizer, language.eye)
    return Chosen(model_id=model_id, language=language, conversation=conversation)


def prepared_if_usable(model_id: ModelId, language: Language) -> Chosen:
    """Return the same of a model beside the first: it raises ModelUnavailable, since the others go on."""
    try:
        return prepared(model_id, language)
    except ModelError as error:
        raise ModelUnavailable(f"the model {model_id!r} cannot be used: {error}") from error
