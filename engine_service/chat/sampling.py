"""From a request's options to what the backend's sampler takes."""

from __future__ import annotations

from typing import Any

from engine_service.backends.base import Sampling
from engine_service.protocol import Options

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_for(options: Options) -> Sampling:
    """Return the sampler's settings; what the caller left out keeps the backend's default."""
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(options, name)) is not None
    }
    seed = None if options.seed is None else options.seed % 2**64
    return Sampling(
        **given, seed=seed, logit_bias=dict(options.logit_bias), num_logprobs=options.num_logprobs
    )
