"""The cost profiles reproduce what they claim to be fitted to."""

from __future__ import annotations

import dataclasses

import pytest

from engine_service.backends.cost_model import CPU_SMOLLM2, H200_8B, PROFILES, RTX4090_8B, profile


def test_an_iteration_with_nothing_costs_nothing() -> None:
    assert all(model.seconds() == 0 for model in PROFILES.values())


def test_more_work_never_takes_less_time() -> None:
    for model in PROFILES.values():
        base = model.seconds(chunk_tokens=64, chunk_pairs=64, num_decodes=2, decode_context_tokens=100)
        assert model.seconds(chunk_tokens=65, chunk_pairs=64, num_decodes=2, decode_context_tokens=100) > base
        assert (
            model.seconds(chunk_tokens=64, chunk_pairs=10**6, num_decodes=2, decode_context_tokens=100) > base
        )
        assert model.seconds(chunk_tokens=64, chunk_pairs=64, num_decodes=3, decode_context_tokens=100) > base
        assert model.seconds(chunk_tokens=64, chunk_pairs=64, num_decodes=2, decode_context_tokens=999) > base


def test_the_processor_profile_fits_the_measured_speeds() -> None:
    for size, measured in {32: 310, 128: 446, 512: 492}.items():
        chunks = range(0, 512, size)
        seconds = sum(CPU_SMOLLM2.seconds(chunk_tokens=size, chunk_pairs=size * at) for at in chunks)
        assert 512 / seconds == pytest.approx(measured, rel=0.1)
    for num, measured in {1: 99, 2: 114, 4: 168, 8: 175}.items():
        seconds = CPU_SMOLLM2.seconds(num_decodes=num, decode_context_tokens=80 * num)
        assert num / seconds == pytest.approx(measured, rel=0.25)


def test_the_card_profile_is_the_formula_of_its_source() -> None:
    seconds = RTX4090_8B.seconds(
        chunk_tokens=512, chunk_pairs=512 * 1000, num_decodes=4, decode_context_tokens=8000
    )
    prefill_ms = 3 + 0.16 * 512 + 1e-6 * 512 * 1000
    decode_ms = 8.5 + 0.35 * 4 + 1.3e-4 * 8000
    assert seconds * 1000 == pytest.approx(prefill_ms + decode_ms)
    assert H200_8B.seconds(num_decodes=8) < RTX4090_8B.seconds(num_decodes=8)


def test_unknown_profiles_and_negative_costs_are_refused() -> None:
    assert profile("h200") is H200_8B
    with pytest.raises(ValueError, match="no cost profile 'tpu'; there are rtx4090-8b, h200, cpu-smollm2"):
        profile("tpu")
    with pytest.raises(ValueError, match="decode_s must be >= 0, not -1"):
        dataclasses.replace(RTX4090_8B, decode_s=-1.0)
