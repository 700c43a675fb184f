"""Rows that decode are divided over passes by what passes were measured to take."""

from __future__ import annotations

import pytest

from engine_service.backends.llama_cpp.backend import DividedLlamaCppBackend, LlamaCppBackend
from engine_service.backends.llama_cpp.passes import PassSizes
from tests.backends.driver import Driver

# Milliseconds, SmolLM2-135M Q8_0 on two cores of an AMD EPYC: one thread, and two.
ONE_THREAD = (11.6, 31.3, 43.3, 39.9)
TWO_THREADS = (8.5, 16.9, 22.7, 21.6)


@pytest.mark.parametrize(
    ("measured", "num_rows", "expected"),
    [
        (ONE_THREAD, 1, (1,)),
        (ONE_THREAD, 2, (1, 1)),
        (ONE_THREAD, 3, (1, 1, 1)),
        (ONE_THREAD, 4, (4,)),
        (TWO_THREADS, 2, (2,)),  # a hundredth is no reason
        (TWO_THREADS, 3, (3,)),
        ((1.0, 5.0, 2.0, 9.0), 4, (1, 3)),
        ((), 3, (3,)),
        (ONE_THREAD, 7, (7,)),
    ],
)
def test_passes_are_as_cheap_as_they_were_measured(
    measured: tuple[float, ...], num_rows: int, expected: tuple[int, ...]
) -> None:
    assert PassSizes(measured).of(num_rows) == expected


def test_what_is_computed_row_by_row_is_what_each_request_is_alone(
    llama_cpp_divided: DividedLlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of one row have the shape of a request alone, so even the rounding is the same."""
    driver = Driver(llama_cpp_divided)
    texts = {"a": "Name a colour.", "b": "Count to ten, please.", "c": "Where is the lamp?"}
    alone = {name: driver.run(driver.order(name, text, 12)).token_ids for name, text in texts.items()}
    llama_cpp_divided.drop_cache()
    monkeypatch.setattr(llama_cpp_divided, "_pass_sizes", PassSizes((1.0, 3.0, 5.0)))
    for name, text in texts.items():
        driver.admit(driver.order(f"{name}2", text, 12))
        driver.prefill(f"{name}2")
    driver.finish("a2", "b2", "c2")
    assert {name: driver.outputs[f"{name}2"].token_ids for name in texts} == alone


def test_warming_up_measures_and_leaves_nothing_behind(
    llama_cpp: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others share this backend and compare texts to the token: what was measured must not outlast this test.
    monkeypatch.setattr(llama_cpp, "_pass_sizes", PassSizes())
    llama_cpp.warm_up()
    llama_cpp.check()
    assert sum(llama_cpp._pass_sizes.of(4)) == 4
    driver = Driver(llama_cpp)
    assert driver.run(driver.order("after", "Say hello.", 4)).text
