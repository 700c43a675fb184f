"""What outlives the process: counters, quotas, windows and totals, as plain JSON values.

`take` and `apply` belong together. Waiting and running requests are not part of it: they are the shell's to
submit again. Times are kept as ages, since the monotonic clock starts anew with the machine. What is learned
again within seconds (the cost model, the programs of agents) is left out.

A snapshot that is not one is refused as a whole by `SnapshotError`, which names the value; nothing is taken
over in part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from engine_service.scheduling.counters import Account
from engine_service.scheduling.flows import FlowId
from engine_service.scheduling.model import THE_MODEL, ModelId, ResidentId, WorkloadClass
from engine_service.scheduling.pace import Pace
from engine_service.scheduling.state import State
from engine_service.scheduling.windows import WindowSum

VERSION: Final = 1
T = TypeVar("T")
_ACCOUNT = (
    *("prefill_tokens", "cached_tokens", "decode_tokens", "service"),
    *("finished", "cancelled", "rejected", "preemptions"),
)
_Slots = list[tuple[float, int]]


class SnapshotError(ValueError):
    """The snapshot cannot be taken over; says which value is wrong and what was expected."""


def take(state: State, *, now: float) -> dict[str, Any]:
    """Return the state that outlives a restart, at monotonic now."""
    waited = {r: state.waited_total(r, now=now) for r in sorted({*state.waited, *state.waiting_since})}
    return {
        "version": VERSION,
        "counters": state.counters.export(),
        "day": state.quota.export(),
        "rolling": state.rolling.export(now=now),
        "spoken": {r: w.export(now=now) for r, w in state.spoken_spent.items()},
        "due": state.due_spent.export(now=now),
        "service": state.all_service.export(now=now),
        "lower": state.lower_service.export(now=now),
        "accounts": {r: _account(account) for r, account in state.accounts.items()},
        "classes": {c.value: _account(account) for c, account in state.class_accounts.items()},
        "waited": waited,
        "lengths": [[flow_id, outputs] for flow_id, outputs in state.lengths.export()],
        "recomputed_tokens": state.recomputed_tokens,
        "switch_micros": state.switch_micros,
        "has_changed_cost": state.has_changed_cost,
    }


def _account(account: Account) -> dict[str, int]:
    return {name: getattr(account, name) for name in _ACCOUNT}


def apply(state: State, snapshot: object, *, now: float, elapsed_s: float = 0.0) -> None:
    """Take a snapshot over into a state that has served nobody yet.

    elapsed_s (>= 0) is the time between `take` and now by the wall clock: windows age by it. Raises
    SnapshotError, and then has changed nothing.
    """
    if state.records or state.num_iterations:
        raise SnapshotError("a snapshot is taken over before the first request, not later")
    if not (math.isfinite(elapsed_s) and elapsed_s >= 0):
        raise SnapshotError(f"elapsed_s must be a number >= 0, not {elapsed_s!r}")
    top = _table(snapshot, "snapshot")
    if _item(top, "version", _whole) != VERSION:
        raise SnapshotError(f"version is {top['version']}; this scheduler reads {VERSION}")
    counters = _item(top, "counters", _table)
    maps = {name: _item(counters, name, _by_resident(_number)) for name in ("weights", "service", "offset")}
    if not maps["weights"].keys() == maps["service"].keys() == maps["offset"].keys():
        raise SnapshotError("counters: weights, service and offset must name the same residents")
    if any(weight < 1 for weight in maps["weights"].values()):
        raise SnapshotError("counters: weights must be >= 1")
    last_left, system = _item(counters, "last_left", _whole), _item(counters, "system", _whole)
    day = _item(top, "day", _table)
    day_name, day_spent = _item(day, "day", _text), _item(day, "spent", _by_resident(_whole))
    aged = _slots_aged(elapsed_s)
    rolling = _item(top, "rolling", _by_resident(lambda value, name: _rolling(value, name, aged)))
    spoken = _item(top, "spoken", _by_resident(aged))
    due, service, lower = (_item(top, name, aged) for name in ("due", "service", "lower"))
    accounts = _item(top, "accounts", _by_resident(_read_account))
    classes = _item(top, "classes", lambda value, name: _classes(value, name))
    waited = _item(top, "waited", _by_resident(_whole))
    lengths = _item(top, "lengths", _lengths)
    recomputed = _item(top, "recomputed_tokens", _whole)
    has_changed_cost = _item(top, "has_changed_cost", _boolean)
    switched = _whole(top.get("switch_micros", 0), "switch_micros")  # engines of one model did not write it

    state.counters.restore(last_left=last_left, system=system, **maps)
    state.quota.restore(day_name, day_spent)
    state.rolling.restore(rolling, now=now)
    state.open_windows()
    for resident_id, slots in spoken.items():
        window = state.spoken_spent[resident_id] = WindowSum(state.policy.voice_window_s)
        window.restore(slots, now=now)
    state.due_spent.restore(due, now=now)
    state.all_service.restore(service, now=now)
    state.lower_service.restore(lower, now=now)
    state.accounts = accounts
    state.class_accounts = classes
    state.waited = waited
    state.lengths.restore(lengths)
    state.recomputed_tokens = recomputed
    state.switch_micros = switched
    state.has_changed_cost = has_changed_cost
    if has_changed_cost:
        state.pace = Pace(classes)  # they add up what cannot be added up


# ---- checks: each takes a value and its name, returns it typed or raises

Check = Callable[[object, str], T]


def _item(table: Mapping[str, object], key: str, check: Check[T]) -> T:
    if key not in table:
        raise SnapshotError(f"{key} is missing")
    return check(table[key], key)


def _wrong(name: str, expected: str, value: object) -> SnapshotError:
    return SnapshotError(f"{name} must be {expected}, not {value!r:.80}")


def _table(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, "a table", value)
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _number(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "a whole number", value)
    return value


def _whole(value: object, name: str) -> int:
    if _number(value, name) < 0:
        raise _wrong(name, "a whole number >= 0", value)
    return _number(value, name)


def _by_resident(check: Check[T]) -> Check[dict[ResidentId, T]]:
    return lambda value, name: {
        ResidentId(key): check(item, f"{name}.{key}") for key, item in _table(value, name).items()
    }


def _slots_aged(elapsed_s: float) -> Check[_Slots]:
    def check(value: object, name: str) -> _Slots:
        if not isinstance(value, list):
            raise _wrong(name, "a list of [age in seconds, amount]", value)
        return [(_age(slot, name) + elapsed_s, _whole(slot[1], name)) for slot in value]

    return check


def _age(slot: object, name: str) -> float:
    if not isinstance(slot, (list, tuple)) or len(slot) != 2:
        raise _wrong(name, "a list of [age in seconds, amount]", slot)
    age = slot[0]
    # A slot's middle may lie ahead of now.
    if isinstance(age, bool) or not isinstance(age, (int, float)) or not math.isfinite(age):
        raise _wrong(f"{name}: an age", "a number of seconds", age)
    return float(age)


def _rolling(value: object, name: str, aged: Check[_Slots]) -> tuple[float, _Slots]:
    table = _table(value, name)
    window_s = table.get("window_s")
    if isinstance(window_s, bool) or not isinstance(window_s, (int, float)) or not 0 < window_s < math.inf:
        raise _wrong(f"{name}.window_s", "a number of seconds > 0", window_s)
    return float(window_s), _item(table, "slots", aged)


def _read_account(value: object, name: str) -> Account:
    table = _table(value, name)
    return Account(**{key: _item(table, key, _whole) for key in _ACCOUNT})


def _classes(value: object, name: str) -> dict[WorkloadClass, Account]:
    table = _table(value, name)
    return {c: _item(table, c.value, _read_account) for c in WorkloadClass}


def _lengths(value: object, name: str) -> list[tuple[FlowId, list[int]]]:
    expected = "a list of [[class, resident, model], [tokens, ...]]"
    if not isinstance(value, list):
        raise _wrong(name, expected, value)
    read = []
    for entry in value:
        try:
            (class_id, resident_id, *named), outputs = entry
            (model_id,) = named or (THE_MODEL,)  # engines of one model did not write it
            flow_id = (
                WorkloadClass(class_id),
                ResidentId(_text(resident_id, name)),
                ModelId(_text(model_id, name)),
            )
            read.append((flow_id, [_whole(output, name) for output in outputs]))
        except (TypeError, ValueError):
            raise _wrong(name, expected, entry) from None
    return read
