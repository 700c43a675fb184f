"""How long an iteration takes: a linear model of what it computes, with named profiles.

Decides nothing. Used by the simulated backend and by the simulator; the scheduler fits its own model from
what it measures. An iteration costs a fixed part for its prefill and one for its decode (a pass over the
weights each), a part per token, and a part per pair of a computed token and a token it attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds per thing computed. All coefficients are >= 0."""

    prefill_s: float  #: once per iteration with prompt tokens
    prefill_token_s: float  #: per prompt token
    prefill_pair_s: float  #: per prompt token and token of context before its chunk
    decode_s: float  #: once per iteration with decoding sequences
    decode_sequence_s: float  #: per decoding sequence
    decode_pair_s: float  #: per decoding sequence and token of its context

    def __post_init__(self) -> None:
        """Refuse a model in which work takes negative time."""
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must be >= 0, not {getattr(self, field.name)}")

    def seconds(
        self,
        *,
        chunk_tokens: int = 0,
        chunk_pairs: int = 0,
        num_decodes: int = 0,
        decode_context_tokens: int = 0,
    ) -> float:
        """Return the duration of an iteration.

        chunk_pairs is the sum, over the chunks, of chunk length times context before it;
        decode_context_tokens the sum of the decoding sequences' lengths.
        """
        seconds = 0.0
        if chunk_tokens:
            seconds += (
                self.prefill_s + self.prefill_token_s * chunk_tokens + self.prefill_pair_s * chunk_pairs
            )
        if num_decodes:
            seconds += self.decode_s + self.decode_sequence_s * num_decodes
            seconds += self.decode_pair_s * decode_context_tokens
        return seconds


RTX4090_8B: Final = CostModel(
    prefill_s=3e-3,
    prefill_token_s=0.16e-3,
    prefill_pair_s=1e-9,
    decode_s=8.5e-3,
    decode_sequence_s=0.35e-3,
    decode_pair_s=1.3e-7,
)
"""An 8B model at about 5 bits per weight on a 4090-class card.

An assumption of the team's scheduling notes (section 6.0), not a measurement: prefill 3 + 0.16 n + 1e-6 n ctx
ms, decode 8.5 + 0.35 B + 1.3e-4 KV ms; the last term is 128 KiB of KV per token at about 1 TB/s.
"""

_H200_BANDWIDTH: Final = 4.8 / 1.008  # TB/s of HBM3e over GDDR6X, vendors' data sheets
_H200_COMPUTE: Final = 989 / 165  # dense fp16 TFLOPS with fp32 accumulation, vendors' data sheets

H200_8B: Final = CostModel(
    prefill_s=RTX4090_8B.prefill_s,  # launching kernels, not computing
    prefill_token_s=RTX4090_8B.prefill_token_s / _H200_COMPUTE,
    prefill_pair_s=RTX4090_8B.prefill_pair_s / _H200_COMPUTE,
    decode_s=RTX4090_8B.decode_s / _H200_BANDWIDTH,
    decode_sequence_s=RTX4090_8B.decode_sequence_s,  # sampling on the host
    decode_pair_s=RTX4090_8B.decode_pair_s / _H200_BANDWIDTH,
)
"""The same model on an H200: `RTX4090_8B` scaled by the cards' published bandwidth and compute.

An assumption; nothing of it was measured.
"""

CPU_SMOLLM2: Final = CostModel(
    prefill_s=36e-3,
    prefill_token_s=1.95e-3,
    prefill_pair_s=1e-6,
    decode_s=5.1e-3,
    decode_sequence_s=4.2e-3,
    decode_pair_s=9.6e-6,
)
"""SmolLM2-135M-Instruct Q8_0 by llama.cpp on two processors with AVX2.

Fitted to the team's measurements (llama.cpp notes, table 1): prefill of 512 tokens in chunks of 32, 128, 512
at 310, 446, 492 tokens/s; decode of 1, 2, 4, 8 sequences at 99, 114, 168, 175 tokens/s; decode time by length
of context 128 to 4096 tokens from 7 to 46 ms.
"""

PROFILES: Final[Mapping[str, CostModel]] = MappingProxyType(
    {"rtx4090-8b": RTX4090_8B, "h200": H200_8B, "cpu-smollm2": CPU_SMOLLM2}
)


def profile(name: str) -> CostModel:
    """Return a named cost model; raise ValueError that lists the names."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"there is no cost profile {name!r}; there are {', '.join(PROFILES)}") from None
