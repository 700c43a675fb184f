"""Every scenario file loads and is consistent; a mistake in one is named with file, key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.simulator import scenario as scenarios
from engine_service.simulator.policies import CHOICES
from engine_service.simulator.profiles import PROFILES, profile
from engine_service.simulator.scenario import ScenarioError
from engine_service.simulator.workload import StreamState
from tests.simulator.builders import TWO, parsed

VTC = {
    "overload",
    "proportional",
    "on_off_less",
    "on_off_overload",
    "poisson_short_long",
    "poisson_short_long_2",
    "increase",
    "dist_shift",
}


def test_the_twelve_households_and_the_published_workloads_are_there() -> None:
    assert scenarios.names()[:12] == tuple(f"H{i}" for i in range(1, 13))
    assert set(scenarios.names()) >= VTC


@pytest.mark.parametrize("name", scenarios.names())
def test_a_scenario_is_consistent(name: str) -> None:
    scenario = scenarios.load(name)
    machine = scenario.machine(profile(scenario.profile)).capacity
    assert scenario.criteria
    assert set(scenario.compared_policies) <= set(CHOICES)
    for stream in scenario.streams:
        state = StreamState(stream, 1, scenario.duration_s)
        orders = state.first() if state.is_closed_loop else state.open_loop()
        assert orders, f"{stream.name} never sends"
        assert all(o.prompt_tokens + o.max_tokens <= machine.max_context_tokens for o in orders)
        assert all(o.output_tokens <= o.max_tokens for o in orders)


def test_names_are_found_whatever_their_case() -> None:
    assert scenarios.load("h1").name == "H1"


def test_a_scenario_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TWO)
    assert scenarios.load(str(path)).name == "mine"


def test_an_unknown_scenario_is_refused_with_the_names() -> None:
    with pytest.raises(ScenarioError, match="no scenario 'H13'; there are H1, H2"):
        scenarios.load("H13")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"nowhere\.toml: cannot be read: No such file"):
        scenarios.load("nowhere.toml")


def test_only_leaves_nobody_else() -> None:
    alone = parsed().only("voice")
    assert [s.name for s in alone.streams] == ["anna_voice"]
    assert not alone.criteria


def changed(before: str, after: str) -> str:
    assert before in TWO
    return TWO.replace(before, after)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO + "[[stream]", r"two\.toml: is not valid TOML"),
        (
            changed("duration_s = 20", "duration = 20"),
            "duration is not a known key; did you mean 'duration_s'",
        ),
        (
            changed("duration_s = 20", "duration_s = -1"),
            "duration_s must be a number > 0 and <= 2678400, not -1",
        ),
        (changed('profile = "rtx4090-8b"', 'profile = "abacus"'), "profile must be one of rtx4090-8b"),
        (changed('class = "voice"', 'class = "void"'), r"stream\[0\]\.class must be one of voice"),
        (
            changed('resident = "anna"', 'resident = "nobody"'),
            r"stream\[0\]\.resident must be one of anna, ben",
        ),
        (
            changed("anna = {}", "anna = { weight = -2 }"),
            r"residents\.anna\.weight must be a whole number from 1",
        ),
        (changed("anna = {}", "anna = { wait = 2 }"), "is not a known key; did you mean 'weight'"),
        (changed("anna = {}", "voice = {}"), "is no class, policy or figure"),
        (changed('pattern = "poisson", rate = 0.5', 'pattern = "poisson"'), "rate is needed"),
        (
            changed('pattern = "poisson", rate = 0.5', 'pattern = "poisson", rate = 0'),
            "rate must be a number > 0",
        ),
        (
            changed('pattern = "poisson", rate = 0.5', 'pattern = "poison", rate = 1'),
            "pattern must be one of",
        ),
        (
            changed('pattern = "poisson", rate = 0.5', 'pattern = "together", count = 1, rate = 2'),
            "has no meaning",
        ),
        (changed("uniform = [900, 1400]", "uniform = [1400, 900]"), "from the smaller to the larger"),
        (changed("prompt = { uniform = [900, 1400] }", "prompt = 0"), "must be at least 1 token, not 0"),
        (
            changed("prompt = { uniform = [900, 1400] }", 'prompt = "long"'),
            "must be a whole number, { uniform",
        ),
        (changed("output = { uniform = [12, 40] }\n", ""), r"stream\[0\]\.output is missing"),
        (changed("voice.ttft.p95 <= 1.0", "voice.ttft.p95 <= fast"), r"criterion\[0\]\.check"),
        (TWO + "[policy]\nbackground_reserve = 1.2\n", "background_reserve must be in"),
        (TWO + "[policy]\nmax_skip = 2\n", "policy.max_skip is not a known key; did you mean 'max_skips'"),
        (TWO + "[policy.classes.void]\nmax_wait_s = 2\n", "not a known workload class"),
        (TWO + "[device]\nnum_pages = 0\n", r"device\.num_pages must be a whole number >= 1"),
        (TWO + '[[phase]]\nname = "late"\nfrom_s = 10\nto_s = 99\n', r"phase\[0\]\.to_s must be after"),
        (TWO + "[faults]\ndisconnects = 2\n", r"faults\.disconnects must be a number from 0 to 1"),
        (
            TWO + '[[criterion]]\nname = "x"\ncheck = "1 <= 1"\nover = "some"\n',
            'must be "every seed" or "median"',
        ),
        (
            TWO + '[[stream]]\nname = "ben_agent"\nresident = "ben"\nclass = "chat"\n'
            'arrivals = { pattern = "together", count = 1 }\nprompt = 1\noutput = 1\n',
            "is the name of another stream or resident",
        ),
    ],
)
def test_a_mistake_names_file_key_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message) as caught:
        parsed(text)
    assert str(caught.value).startswith("two.toml: ")


def test_the_device_table_changes_the_machine() -> None:
    scenario = parsed(TWO + "[device]\nnum_pages = 32\ncan_abort = true\n")
    machine = scenario.machine(PROFILES["rtx4090-8b"])
    assert (machine.capacity.num_pages, machine.capacity.can_abort) == (32, True)
