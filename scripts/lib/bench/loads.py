"""The two loads: short answers to several clients at once, and a household's mix.

Decides what is asked and when; reads nothing but the answers. Prompts are token ids, so that both servers
compute the same; every run has prompts of its own, so that neither finds a document of an earlier run in its
cache.

The mix: two documents of 1,500 tokens and two chats (256 tokens out each) at the start, and from 0.5 s on a
spoken request every 3.5 s (a prompt of about 200 tokens whose first 170 are the house's, 24 tokens out).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.client import call
from bench.servers import Answer, Order, Server

DOCUMENT_TOKENS: Final = 1500
LONG_ANSWER: Final = 256
SHORT_ANSWER: Final = 64
SPOKEN_ANSWER: Final = 24
NUM_SPOKEN: Final = 6
FIRST_SPOKEN_S: Final = 0.5
SPOKEN_EVERY_S: Final = 3.5

_HOUSE: Final = (
    "You are the voice assistant of a smart home. "
    + "The kitchen has a light and a fan. The living room has a lamp, a television and a thermostat. " * 7
)
_STORY: Final = (
    "The keeper climbed the stairs, trimmed the wick and wrote the weather into the log. "
    "In winter the ferry came once a week. "
)
_COMMANDS: Final = (
    "Turn on the kitchen light please.",
    "Turn off the lamp in the living room.",
    "Is the kitchen fan still running?",
    "Set the thermostat to twenty degrees.",
    "Turn the television off, we are going to bed.",
    "What is the temperature in the living room?",
    "Switch the fan on for ten minutes.",
    "Dim the living room lamp a little.",
)

Encode = Callable[[str], Sequence[int]]


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _asked(text: str) -> str:
    return f"{_turn('user', text)}<|im_start|>assistant\n"


class Prompts:
    """Every prompt of every run, as token ids of the model under test."""

    def __init__(self, encode: Encode, *, classed: bool = True) -> None:
        """Use the model's tokenizer (control tokens parsed, nothing added); classed False: all is chat."""
        self._encode = encode
        self._classed = classed

    def all_chat(self) -> Prompts:
        """Return the same prompts, all ordered as chat by one resident."""
        return Prompts(self._encode, classed=False)

    def _order(
        self, text: str, num_tokens: int, class_id: str, resident: str, *, cut: int | None = None
    ) -> Order:
        ids = tuple(self._encode(text))[:cut]
        if not self._classed:
            return Order(prompt_ids=ids, num_tokens=num_tokens)
        return Order(prompt_ids=ids, num_tokens=num_tokens, class_id=class_id, resident=resident)

    def short(self, run: int, client: int) -> Order:
        """Return a short question."""
        text = _asked(f"{run}.{client}: write about the sea and the wind.")
        return self._order(text, SHORT_ANSWER, "chat", "guest")

    def chat(self, run: int, client: int) -> Order:
        """Return a short question with a long answer."""
        text = _asked(f"{run}.{client}: tell a long story about the sea and the wind.")
        return self._order(text, LONG_ANSWER, "chat", "guest")

    def document(self, run: int, number: int) -> Order:
        """Return a document to go on with."""
        text = f"{run}.{number} is the number of this log book. " + _STORY * (DOCUMENT_TOKENS // 20)
        return self._order(text, LONG_ANSWER, "background", "house", cut=DOCUMENT_TOKENS)

    def spoken(self, run: int, number: int) -> Order:
        """Return a spoken command behind the house's own instructions."""
        command = f"{_COMMANDS[number % len(_COMMANDS)]} This is request {run}.{number}."
        return self._order(_turn("system", _HOUSE) + _asked(command), SPOKEN_ANSWER, "voice", "guest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What one run of the mix showed."""

    makespan_s: float  #: first sending to last text
    tokens_per_s: float
    spoken_ttft_s: tuple[float, ...]  #: in order of sending
    spoken_done_s: tuple[float, ...]  #: sending to last text
    chat_gap_s: float  #: longest silence in a chat
    documents_done_s: float  #: start to the last document's last text
    spoken_cached_tokens: int  #: least of all spoken requests


async def warm_prefix(server: Server, prompts: Prompts, run: int, *, pins: bool) -> None:
    """Let a server know the house's instructions: pinned if it can, else by a request that uses them."""
    if pins:
        message = {"messages": [{"role": "system", "content": _HOUSE}]}
        await call(server.address, "POST", "/v1/prefix", message)
    await server.ask(prompts.spoken(run, NUM_SPOKEN))


async def several_streams(server: Server, prompts: Prompts, run: int, num_clients: int) -> float:
    """Return generated tokens per second over num_clients clients that start together."""
    answers = await asyncio.gather(*(server.ask(prompts.short(run, i)) for i in range(num_clients)))
    return _tokens_per_s(answers)


async def mixed(server: Server, prompts: Prompts, run: int) -> Mixed:
    """Run the mix once."""

    async def later(delay_s: float, order: Order) -> Answer:
        await asyncio.sleep(delay_s)
        return await server.ask(order)

    documents = [later(0, prompts.document(run, i)) for i in range(2)]
    chats = [later(0, prompts.chat(run, i)) for i in range(2)]
    spoken = [later(FIRST_SPOKEN_S + i * SPOKEN_EVERY_S, prompts.spoken(run, i)) for i in range(NUM_SPOKEN)]
    answers = await asyncio.gather(*documents, *chats, *spoken)
    started_at = min(answer.sent_at for answer in answers)
    return Mixed(
        makespan_s=max(answer.ended_at for answer in answers) - started_at,
        tokens_per_s=_tokens_per_s(answers),
        spoken_ttft_s=tuple(answer.ttft_s for answer in answers[4:]),
        spoken_done_s=tuple(answer.ended_at - answer.sent_at for answer in answers[4:]),
        chat_gap_s=max(answer.longest_gap_s for answer in answers[2:4]),
        documents_done_s=max(answer.ended_at for answer in answers[:2]) - started_at,
        spoken_cached_tokens=min(answer.cached_tokens for answer in answers[4:]),
    )


def _tokens_per_s(answers: Sequence[Answer]) -> float:
    elapsed_s = max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)
    return sum(answer.output_tokens for answer in answers) / elapsed_s
