"""Turns a question with alternatives into one word to predict, and the model's odds for it into an answer.

Each alternative gets a letter. The model is not asked to reason but for the next letter; how likely it finds
each is the answer. What it would rather have said than a letter is left out, and the letters' odds are made
to add up to 1. Pure.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from typing import Final, assert_never

from homeassistant.components.ai_task.evaluation import (
    ChoiceAnswer,
    EvaluationAnswer,
    EvaluationQuestion,
    NoulAnswer,
    ScoreAnswer,
)
from homeassistant.helpers.json import json_dumps
from homeassistant.util.json import JsonValueType

from .engine_client import Message

MOST_ALTERNATIVES: Final = 20
"""The engine tells the odds of no more words."""

_AROUND_A_LETTER: Final = " \n\"'().:*"

_INSTRUCTIONS: Final = (
    "You judge a state of a home. Answer the question with the letter of the one alternative that fits best, "
    "and with nothing else."
)


def alternatives_of(question: EvaluationQuestion) -> list[str]:
    """Return what there is to choose from, in order."""
    match question["type"]:
        case "noul":
            return ["Yes", "No"]
        case "choice":
            return [f"{key}: {text}" for key, text in question["criteria"].items()]
        case "score":
            return list(question["criteria"])
        case _ as unknown:
            assert_never(unknown)


def messages_for(question: EvaluationQuestion, state: JsonValueType) -> tuple[Message, ...]:
    """Return the prompt whose next word is the letter of an alternative; the state is first, to be cached."""
    letters = zip(string.ascii_uppercase, alternatives_of(question), strict=False)
    listed = "\n".join(f"{letter}) {text}" for letter, text in letters)
    asked = f"State: {json_dumps(state)}\n\nQuestion: {question['instructions']}\n{listed}\n\nLetter:"
    return Message(role="system", content=_INSTRUCTIONS), Message(role="user", content=asked)


def odds_of(num_alternatives: int, words: Iterable[tuple[str, float]]) -> list[float] | None:
    """Return the probability of each alternative from words' log probabilities; None without any letter."""
    odds = [0.0] * num_alternatives
    for word, logprob in words:
        letter = word.strip(_AROUND_A_LETTER).upper()
        index = string.ascii_uppercase.find(letter) if len(letter) == 1 else -1
        if 0 <= index < num_alternatives:
            odds[index] += math.exp(logprob)
    total = sum(odds)
    return [chance / total for chance in odds] if total > 0 else None


def answer_to(question: EvaluationQuestion, odds: Sequence[float]) -> EvaluationAnswer:
    """Return the answer that the odds of the alternatives make."""
    match question["type"]:
        case "noul":
            return NoulAnswer(noul=odds[0])
        case "choice":
            probabilities = dict(zip(question["criteria"], odds, strict=True))
            return ChoiceAnswer(
                choice=max(probabilities, key=lambda key: probabilities[key]), probabilities=probabilities
            )
        case "score":
            expected = sum(level * chance for level, chance in enumerate(odds))
            return ScoreAnswer(score=expected, probabilities=list(odds))
        case _ as unknown:
            assert_never(unknown)
