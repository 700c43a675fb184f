"""Pass criteria: one comparison per criterion, written in the scenario's file, judged per seed.

    voice.ttft.p95 <= alone.voice.ttft.p95 + longest_iteration + ceil(1400 / chunk) * decode_iteration.p95

A name is looked up, from left to right, as
    a policy       `fifo.…`: the same figure of that policy's run with the same seed
    `alone.GROUP`  the run in which that class, resident or stream had the machine to itself
    a phase        `back.alice`: the resident's share of the service in it; `back.alice.ttft.p95`: the figures
                   of the requests that arrived in it
    a group        a class, a resident or a stream: the fields of `summary.GroupSummary`
    anything else  the fields of `summary.RunSummary`
Numbers, + - * /, brackets, min, max, ceil and abs are known. Nothing else is: a scenario is data.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final

from engine_service.simulator.quantiles import Quantiles
from engine_service.simulator.summary import GroupSummary, PhaseSummary, RunSummary

Path = tuple[str, ...]

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Final[Mapping[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]]] = {
    ast.LtE: ("<=", operator.le),
    ast.GtE: (">=", operator.ge),
    ast.Lt: ("<", operator.lt),
    ast.Gt: (">", operator.gt),
    ast.Eq: ("==", operator.eq),
}
_FUNCTIONS: Final[Mapping[str, Callable[..., float]]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "abs": abs,
}
_QUANTILES: Final = tuple(f.name for f in fields(Quantiles))
_NOT_NUMBERS: Final = frozenset(
    {"groups", "cells", "phases", "preempted", "timeline", "scenario", "policy", "profile", "only", "seed"}
)
_RUN_FIELDS: Final = {f.name: f.type == "Quantiles" for f in fields(RunSummary) if f.name not in _NOT_NUMBERS}
_GROUP_FIELDS: Final = {
    f.name: f.type == "Quantiles" for f in fields(GroupSummary) if f.name not in ("name", "kind")
}


class CriterionError(ValueError):
    """The comparison cannot be understood; the message says what would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a scenario's criteria may name."""

    policies: Collection[str]
    groups: Collection[str]
    phases: Collection[str]
    residents: Collection[str]


@dataclass(frozen=True, slots=True)
class Needs:
    """Which further runs a criterion compares with."""

    policies: frozenset[str]
    alone: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A criterion and one run."""

    holds: bool
    left: float | None  #: None: there is no such figure (nobody asked, nothing finished)
    right: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """A promise of a scenario. Build with `parse`."""

    name: str
    text: str
    left: ast.expr
    right: ast.expr
    sign: str
    holds: Callable[[float, float], bool]
    over: str  #: "every seed", or "median": at least half of the seeds
    note: str = ""

    @property
    def needs(self) -> Needs:
        """The runs this criterion looks at besides the one it judges."""
        paths = [*_paths(self.left), *_paths(self.right)]
        return Needs(
            policies=frozenset(p[0] for p in paths if len(p) > 1 and p[0] in _policy_names(paths)),
            alone=frozenset(p[1] for p in paths if p[0] == "alone"),
        )

    def judge(self, find: Callable[[Path], float | None]) -> Judgement:
        """Return whether it holds, given how names are looked up."""
        left, right = _value(self.left, find), _value(self.right, find)
        holds = left is not None and right is not None and self.holds(left, right)
        return Judgement(holds=holds, left=left, right=right)


def _policy_names(paths: list[Path]) -> frozenset[str]:
    return frozenset(p[0] for p in paths if p[0] in POLICY_NAMES)


POLICY_NAMES: Final = frozenset({"default", "fifo", "fifo_chunked", "class_only", "vtc", "vllm_priority"})
"""Names of policies inside criteria: those of the command with underscores."""


def parse(name: str, text: str, *, names: Names, over: str = "every seed", note: str = "") -> Criterion:
    """Return the criterion; raise CriterionError for what is not a comparison of known names."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CriterionError(f"{text!r} is not a comparison: {error.msg}") from None
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _COMPARISONS:
        raise CriterionError(f"{text!r} must be one comparison with <=, >=, <, > or ==")
    sign, holds = _COMPARISONS[type(tree.ops[0])]
    for side in (tree.left, tree.comparators[0]):
        _check(side, names)
    return Criterion(
        name=name,
        text=text,
        left=tree.left,
        right=tree.comparators[0],
        sign=sign,
        holds=holds,
        over=over,
        note=note,
    )


# ---- checking


def _check(node: ast.expr, names: Names) -> None:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check(left, names)
            _check(right, names)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, names)
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            pass
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _FUNCTIONS:
            for argument in arguments:
                _check(argument, names)
        case ast.Name() | ast.Attribute():
            _check_path(_path(node), names)
        case _:
            known = f"numbers, names, + - * /, {', '.join(_FUNCTIONS)}"
            raise CriterionError(f"{ast.unparse(node)!r} is not understood; known are {known}")


def _check_path(path: Path, names: Names) -> None:
    written = ".".join(path)
    if path[0] in names.policies:
        path = path[1:]
    if path and path[0] == "alone":
        if len(path) < 2 or path[1] not in names.groups:
            raise CriterionError(f"{written!r}: alone must be followed by {_one_of(names.groups)}")
        path = path[1:]
        if path[1:] and path[1] in _RUN_FIELDS and path[1] not in _GROUP_FIELDS:
            path = path[1:]
    if not path:
        raise CriterionError(f"{written!r} names a policy and no figure")
    if path[0] in names.phases:
        if len(path) < 2 or path[1] not in names.groups:
            raise CriterionError(f"{written!r}: a phase must be followed by {_one_of(names.groups)}")
        if len(path) > 2:
            _check_figure(path[2:], _GROUP_FIELDS, written, names)
        elif path[1] not in names.residents:
            raise CriterionError(f"{written!r}: only residents have a share of a phase")
        return
    known = _RUN_FIELDS
    if path[0] in names.groups:
        path, known = path[1:], _GROUP_FIELDS
    _check_figure(path, known, written, names)


def _check_figure(path: Path, known: Mapping[str, bool], written: str, names: Names) -> None:
    if not path or path[0] not in known:
        tried = path[0] if path else ""
        near = difflib.get_close_matches(tried, [*known, *names.groups], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {_one_of(known)}"
        raise CriterionError(f"{written!r} is not known; {hint}")
    if not known[path[0]] and len(path) > 1:
        raise CriterionError(f"{written!r}: {path[0]} is a number")
    if known[path[0]] and (len(path) != 2 or path[1] not in _QUANTILES):
        raise CriterionError(f"{written!r}: {path[0]} must be followed by {_one_of(_QUANTILES)}")


def _one_of(names: Collection[str]) -> str:
    return "one of " + ", ".join(sorted(names))


def _path(node: ast.expr) -> Path:
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=value, attr=name):
            return (*_path(value), name)
        case _:
            raise CriterionError(f"{ast.unparse(node)!r} is not a name")


def _paths(node: ast.expr) -> Iterator[Path]:
    match node:
        case ast.Name() | ast.Attribute():
            yield _path(node)
        case ast.BinOp(left=left, right=right):
            yield from _paths(left)
            yield from _paths(right)
        case ast.UnaryOp(operand=operand):
            yield from _paths(operand)
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from _paths(argument)
        case _:
            pass


# ---- judging


def _value(node: ast.expr, find: Callable[[Path], float | None]) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(operand=operand):
            inner = _value(operand, find)
            return None if inner is None else -inner
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, find), _value(right, find)
            if a is None or b is None or (isinstance(op, ast.Div) and not b):
                return None
            return _OPERATORS[type(op)](a, b)
        case ast.Call(func=ast.Name(id=function), args=arguments):
            values = [_value(argument, find) for argument in arguments]
            numbers = [value for value in values if value is not None]
            return _FUNCTIONS[function](*numbers) if len(numbers) == len(values) else None
        case _:
            return find(_path(node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs with one seed among which names are looked up."""

    judged: RunSummary
    policies: Mapping[str, RunSummary]  #: by the name used in criteria
    alone: Mapping[str, RunSummary]  #: by group

    def find(self, path: Path) -> float | None:
        """Return the figure, None where the run has none."""
        run = self.judged
        if path[0] in self.policies and path[0] in POLICY_NAMES:
            run, path = self.policies[path[0]], path[1:]
        if path[0] == "alone":
            run, path = self.alone[path[1]], path[1:]
            if path[1] in _RUN_FIELDS and path[1] not in _GROUP_FIELDS:
                path = path[1:]
        if path[0] in run.phases:
            return _in_phase(run.phases[path[0]], path[1:])
        if path[0] in run.groups:
            return _figure(run.groups[path[0]], path[1:])
        if path[0] in _RUN_FIELDS:
            return _figure(run, path)
        return None


def _in_phase(phase: PhaseSummary, path: Path) -> float | None:
    if len(path) == 1:
        return phase.shares.get(path[0])
    group = phase.groups.get(path[0])
    return None if group is None else _figure(group, path[1:])


def _figure(of: GroupSummary | RunSummary, path: Path) -> float | None:
    value = getattr(of, path[0])
    if isinstance(value, Quantiles):
        value = getattr(value, path[1])
    return None if value is None else float(value)
