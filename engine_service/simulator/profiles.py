"""Named machines: how fast, how much memory, and how a forward pass is cut.

Decides nothing. A profile is a cost model (`backends.cost_model`) with the capacity and the habits of the
backend that runs there. Every figure is an assumption or a fit named at its source; calibrate before quoting
one: a profile can be fitted from an event log of the real engine (`fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from engine_service.backends.cost_model import CPU_SMOLLM2, H200_8B, RTX4090_8B, CostModel
from engine_service.scheduling.model import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A machine that can be simulated."""

    name: str
    cost: CostModel
    capacity: Capacity  #: `mixes_prefill_and_decode` also says whether prompts share one forward pass
    abort_grain_tokens: int = 0  #: an aborted prefill keeps whole multiples of this; 0 keeps nothing
    has_prefix_cache: bool = False  #: pages of a preempted request stay readable until others need them

    def __post_init__(self) -> None:
        """Refuse what could not be simulated."""
        if self.abort_grain_tokens < 0:
            raise ValueError(f"abort_grain_tokens must be >= 0, not {self.abort_grain_tokens}")

    def seconds(
        self, *, chunks: list[tuple[int, int]], num_decodes: int, decode_context_tokens: int
    ) -> float:
        """Return how long an iteration takes; chunks are (tokens computed, tokens stored before).

        Where prompts and decodes share a pass, the fixed part of a prefill is paid once. Elsewhere every
        prompt is a pass of its own (ExLlamaV2: one batch-1 forward per prefilling job, then one decode).
        """
        if self.capacity.mixes_prefill_and_decode:
            return self.cost.seconds(
                chunk_tokens=sum(size for size, _ in chunks),
                chunk_pairs=sum(size * stored for size, stored in chunks),
                num_decodes=num_decodes,
                decode_context_tokens=decode_context_tokens,
            )
        seconds = self.cost.seconds(num_decodes=num_decodes, decode_context_tokens=decode_context_tokens)
        for size, stored in chunks:
            seconds += self.cost.seconds(chunk_tokens=size, chunk_pairs=size * stored)
        return seconds


A10G_7B: Final = CostModel(
    prefill_s=5e-3,
    prefill_token_s=0.21e-3,
    prefill_pair_s=1e-9,
    decode_s=23e-3,
    decode_sequence_s=0.7e-3,
    decode_pair_s=0.87e-6,
)
"""Llama-2-7B in half precision on an A10G, the machine of VTC's published workloads.

Prefill as in the artifact's cost function (0.21 ms per token). Decode from 14 GB of weights and 512 KiB of
KV per token at 600 GB/s, and a part per sequence such that 25 requests of 256 + 256 tokens need the 49 ms
per iteration which that cost function gives at full batch.
"""

PROFILES: Final[Mapping[str, DeviceProfile]] = MappingProxyType(
    {
        # ExLlamaV2 on one consumer card: 65,536 tokens of cache in pages of 256.
        "rtx4090-8b": DeviceProfile(
            name="rtx4090-8b",
            cost=RTX4090_8B,
            capacity=Capacity(
                num_pages=256,
                page_tokens=256,
                max_sequences=16,
                max_context_tokens=32_768,
                chunk_granularity=256,
                mixes_prefill_and_decode=False,
            ),
            has_prefix_cache=True,
        ),
        # The same on a data-centre card: 64 GiB of cache at 128 KiB per token.
        "h200": DeviceProfile(
            name="h200",
            cost=H200_8B,
            capacity=Capacity(
                num_pages=2048,
                page_tokens=256,
                max_sequences=64,
                max_context_tokens=131_072,
                chunk_granularity=256,
                mixes_prefill_and_decode=False,
            ),
            has_prefix_cache=True,
        ),
        # The embedded default: llama.cpp on two processors, one pass for prompts and decodes.
        "cpu-smollm2": DeviceProfile(
            name="cpu-smollm2",
            cost=CPU_SMOLLM2,
            capacity=Capacity(
                num_pages=256, page_tokens=32, max_sequences=16, max_context_tokens=8192, can_abort=True
            ),
            abort_grain_tokens=128,
        ),
        # VTC's machine: a pool of 10,000 tokens.
        "a10g-7b": DeviceProfile(
            name="a10g-7b",
            cost=A10G_7B,
            capacity=Capacity(
                num_pages=625,
                page_tokens=16,
                max_sequences=64,
                max_context_tokens=4096,
                mixes_prefill_and_decode=False,
            ),
        ),
    }
)


def profile(name: str) -> DeviceProfile:
    """Return a named machine; raise ValueError that lists the names."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}") from None
