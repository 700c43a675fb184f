"""What every backend must be able to do, in the words of the scheduler.

A backend holds sequences, their KV pages and the sampler. It never decides *who* runs: the engine thread
tells it whom to admit, what the next iteration contains and whom to drop. Everything here is called from
that one thread, except `Backend.abort`, `Tokenizer` and the read-only `info`, which any thread may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from engine_service.scheduling.model import Capacity, PreemptionMode, RequestId


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI wire format."""

    STOP = "stop"  #: end-of-text token, stop string, or the constraint is complete
    LENGTH = "length"  #: max_tokens or the context is full
    PREFIX = "prefix"  #: the prompt was computed and nothing was to be generated


class ConstraintKind(StrEnum):
    """The grammars that can force an output."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class BackendError(Exception):
    """The backend cannot go on: it must be rebuilt and forgot every sequence."""


class ModelError(Exception):
    """A model cannot be loaded; the message says what was wrong and what would be right."""


class InvalidConstraint(ValueError):
    """The caller's schema, regex or grammar cannot be compiled; the message says where."""


class InvalidPicture(ValueError):
    """The caller's picture cannot be looked at; the message says why and shows nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture as one model will look at it."""

    num_tokens: int  #: that it takes in a prompt
    width: int
    height: int
    pixels: bytes = field(repr=False)  #: red, green and blue of every pixel, row by row
    digest: bytes  #: the same for the same pixels and size


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPicture:
    """A picture and where it stands in a prompt."""

    start: int  #: index in prompt_ids of its first token; placeholders stand there, one per token
    picture: Picture

    @property
    def end(self) -> int:
        """Index of the first token behind it."""
        return self.start + self.picture.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar the output must match. `text` is JSON for a schema, else the regex or lark source."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy, whatever else is set."""

    temperature: float = 0.7  #: >= 0
    top_k: int = 0  #: 0 is off
    top_p: float = 1.0  #: (0, 1]
    min_p: float = 0.0  #: [0, 1)
    repetition_penalty: float = 1.0  #: > 0; 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  #: same seed and same logits give the same tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None  #: None: none; n >= 0: the chosen token's and the n best

    def __post_init__(self) -> None:
        """Refuse values no sampler could use (ValueError)."""
        checks = (
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
            ("num_logprobs", self.num_logprobs is None or self.num_logprobs >= 0, ">= 0"),
            ("seed", self.seed is None or self.seed >= 0, ">= 0"),
        )
        for name, is_right, expected in checks:
            if not is_right:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)}")
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise ValueError("logit_bias must have finite numbers only")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOrder:
    """What one request asks of the backend."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]  #: token ids, at least one
    max_tokens: int  #: 0: compute the prompt only
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()  #: never part of the text
    banned: tuple[str, ...] = ()  #: strings that must not come out; ASCII letters in either case alike
    healed: str = ""  #: what the first output token begins with; not shown (token healing)
    constraint: Constraint | None = None
    keep_prefix: bool = False  #: keep the computed prompt as a pinned prefix when done
    wants_embedding: bool = False  #: of the prompt; only with max_tokens 0, where `ModelInfo.can_embed`
    pictures: tuple[PlacedPicture, ...] = ()  #: in their order, where `ModelInfo.can_see`
    ignore_eos: bool = False  #: generate max_tokens whatever the model says (benchmarks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is loaded."""

    name: str  #: the name the API lists
    architecture: str
    max_context_tokens: int  #: prompt plus output of one request on this backend
    vocab_size: int
    chat_template: str  #: Jinja source; empty if the model brings none
    bos_text: str = ""
    eos_text: str = ""
    can_embed: bool = False
    embedding_size: int = 0  #: numbers in an embedding
    can_see: bool = False  #: pictures
    backend: str = ""  #: "llama_cpp", "simulated", ...
    parking_bytes: int = 0  #: most host memory, beside the cache, that idle conversations are kept in


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One output token with its log probability and the best alternatives (natural logarithm)."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOrder:
    """Compute the next num_tokens of a prompt (or of a recomputation)."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What one request got out of a step. A finished one was released before `step` returned."""

    request_id: RequestId
    prefill_tokens: int = 0  #: computed and stored in this step
    token_ids: tuple[int, ...] = ()  #: new output tokens
    text: str = ""  #: whole characters that may be shown (stop strings and half characters are held back)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    embedding: tuple[float, ...] | None = None  #: of length 1; with the finish of an order that wants one
    error: Exception | None = None  #: only this request is at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one iteration."""

    outcomes: tuple[SequenceOutcome, ...]
    seconds: float  #: measured
    aborted: bool = False  #: stopped early; outcomes say what was kept


class Tokenizer(Protocol):
    """Text <-> token ids. Thread-safe."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return token ids; parse_special maps control tokens in the text (templates) to their ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        ...


class Eye(Protocol):
    """What is known of a model's sight without its weights. Thread-safe."""

    @property
    def placeholder_id(self) -> int:
        """The token that stands in a prompt for every token of a picture."""
        ...

    def look(self, file: bytes) -> Picture:
        """Read a picture's file; raise InvalidPicture for what is none, is damaged or cannot be fitted."""
        ...


class Backend(Protocol):
    """One model on one device, driven iteration by iteration."""

    @property
    def info(self) -> ModelInfo:
        """What is loaded (any thread)."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (any thread)."""
        ...

    @property
    def eye(self) -> Eye | None:
        """What reads pictures for the model (any thread); None where `info.can_see` is False."""
        ...

    @property
    def capacity(self) -> Capacity:
        """What requests may hold in all."""
        ...

    def validate(self, order: GenerationOrder) -> None:
        """Raise InvalidConstraint for a grammar that cannot be compiled (any thread)."""
        ...

    def shared_prefix_tokens(self, prompt_ids: Sequence[int]) -> int:
        """Return how many leading tokens a *pinned* prefix holds; always < len(prompt_ids) (any thread)."""
        ...

    def admit(self, order: GenerationOrder, *, reserved_tokens: int) -> int:
        """Give the request a sequence; return how many leading tokens need not be computed.

        reserved_tokens is the total of token slots it may fill until `grow` (pinned prefix included). At
        least one prompt token is always left to compute. Pictures that the device does not know yet are
        encoded here, which may take longer than an iteration.
        """
        ...

    def resume(self, request_id: RequestId, *, reserved_tokens: int) -> int:
        """Give a preempted request a sequence again; like `admit`, its output so far becomes prompt."""
        ...

    def grow(self, request_id: RequestId, *, reserved_tokens: int) -> None:
        """Let the request fill up to reserved_tokens slots."""
        ...

    def preempt(self, request_id: RequestId, mode: PreemptionMode) -> None:
        """Take the sequence away; tokens, sampler and constraint state stay for an exact resume."""
        ...

    def release(self, request_id: RequestId) -> None:
        """Forget the request in whatever state it is; unknown ids are ignored."""
        ...

    def drop_prefix(self, request_id: RequestId) -> None:
        """Give up the prefix pinned by that request; sequences that share it keep their copy."""
        ...

    def hand_over(self) -> Mapping[RequestId, Any]:
        """Give away what is kept of preempted requests, for `adopt` of the same model's next backend."""
        ...

    def adopt(self, handed: Mapping[RequestId, Any]) -> None:
        """Take over preempted requests that an earlier backend of the same model handed over."""
        ...

    def step(self, decode_ids: Sequence[RequestId], prefills: Sequence[ChunkOrder]) -> StepOutcome:
        """Run one iteration over exactly these.

        A prefill that computes the last prompt token also samples the first output token. Faults of one
        request come back in its outcome; there is one for every request named, also where nothing was kept.
        Raises BackendError when everything is lost; any other exception means that nothing of this step was
        kept.
        """
        ...

    def abort(self) -> None:
        """Make the step under way return early with what it has (any thread); no-op when idle or unable."""
        ...

    def close(self) -> None:
        """Free the device; again: nothing. Later uses (tokenizer, validate) raise BackendError."""
        ...


Tell = Callable[[float], None]
"""Hears how much of a load is done, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """What of a model is known without its weights, so that it can be asked while it is not in memory.

    It outlives the model's backends; any thread may use it.
    """

    info: ModelInfo
    tokenizer: Tokenizer
    capacity: Capacity  #: what the model will offer once it is loaded
    validate: Callable[[GenerationOrder], None]  #: as `Backend.validate`
    eye: Eye | None = None  #: as `Backend.eye`


class ModelSource(Protocol):
    """Where a model comes from. Methods are called from one thread at a time, any."""

    def describe(self) -> Language:
        """Read everything but the weights, once; raise ModelError for what is no model."""
        ...

    def open(self, tell: Tell) -> Backend:
        """Load the model, after `describe`; raise ModelError or BackendError."""
        ...
