import pytest
from household import workload
from household.residence import KITCHEN, RESIDENTS, Household
from household.stage import Stage
from household.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


async def test_tokens_per_resident_equal_the_engines_ledger(stage: Stage, home: Household) -> None:
    await workload.speak(home, KITCHEN, "What rhymes with candle?")
    await workload.type_in(home, "Name three birds.")
    snapshot = await stage.engine_api.quiet(timeout_s=60)
    ledger = {name: str(snapshot["residents"][name]["tokens_served"]) for name in RESIDENTS}

    async def shown() -> dict[str, str]:
        return {name: await home.state(home.resident_sensor(name, "tokens_served")) for name in RESIDENTS}

    assert await until(shown, lambda states: states == ledger, f"the sensors show {ledger}", timeout_s=15)


async def test_the_household_is_told_that_its_policy_is_met(stage: Stage, home: Household) -> None:
    assert (await stage.engine_api.fairness())["engine"]["policy_met"]
    assert await home.state(home.engine_entity("binary_sensor", "policy_met")) == "on"
