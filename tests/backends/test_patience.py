"""Speech waits a moment for a micro-batch that is nearly over, and never longer."""

from __future__ import annotations

import pytest

from engine_service.backends.llama_cpp import context as context_module
from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.binding import Batch
from engine_service.backends.llama_cpp.context import PATIENCE_S, Context


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(context_module, "time", clock)
    return clock


def stopped_after(
    context: Context,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    expected_s: float,
    asked_after_s: float,
) -> float | None:
    """Let speech come so long after a run began and ask every 0.02 s; return how long it waits for the stop.

    None: the run was never told to stop in twice the time that it should have taken.
    """
    asked: list[float] = []

    def decode(handle: int, batch: Batch) -> int:
        clock.now += asked_after_s
        began = clock.now
        while clock.now < began + 2 * expected_s:
            context.abort()
            if context._abort_flag.value:
                asked.append(clock.now - began)
                return 2
            clock.now += 0.02
        return 0

    monkeypatch.setattr(context._library, "decode", decode)
    with context.step():
        context.run(expected_s=expected_s)
    return asked[0] if asked else None


@pytest.mark.parametrize(
    ("expected_s", "asked_after_s", "waits_s"),
    [
        pytest.param(0.4, 0.0, 0.0, id="just begun"),
        pytest.param(0.4, 0.29, 0.0, id="not yet nearly over"),
        pytest.param(0.4, 0.31, PATIENCE_S, id="should be over in time and is not"),
        pytest.param(0.4, 0.45, PATIENCE_S / 2, id="should just have been over"),
        pytest.param(0.4, 0.55, 0.0, id="should have been over long ago"),
    ],
)
def test_speech_waits_for_what_is_nearly_over_and_no_longer(
    llama_cpp: LlamaCppBackend,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    expected_s: float,
    asked_after_s: float,
    waits_s: float,
) -> None:
    waited = stopped_after(
        llama_cpp._context, clock, monkeypatch, expected_s=expected_s, asked_after_s=asked_after_s
    )
    assert waited == pytest.approx(waits_s, abs=0.021)


def test_patience_begins_anew_with_every_run(
    llama_cpp: LlamaCppBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        waited = stopped_after(llama_cpp._context, clock, monkeypatch, expected_s=0.4, asked_after_s=0.35)
        assert waited == pytest.approx(PATIENCE_S, abs=0.021)
        clock.now += 5.0
