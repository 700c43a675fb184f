"""Where a model file's own template may run: it reads what it is given, and cannot reach out or run away.

Decides how much a template may do: loop turns, sizes of texts, lists and numbers. A template is foreign code
from a downloaded file; Jinja's sandbox keeps it away from Python, the bounds here keep it from taking the
machine's time and memory. Limits are far above what templates of real models need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 200_000  #: turns of loops and calls of macros in one rendering
MAX_SIZE: Final = 16 * 2**20  #: characters of a text, entries of a list
MAX_PARTS: Final = 500_000  #: of a list of lists that becomes text, each counted as often as it is written
MAX_NUMBER: Final = 10_000  #: a number given to a filter or method: a width, a count
MAX_BITS: Final = 4096  #: of a whole number

_STEP: Final = "__step__"
_JOIN: Final = "__join__"
_SIZED: Final = "__sized__"
_FORBIDDEN: Final = ("format", "lipsum", "pprint", "random", "urlize", "xmlattr")
_WIDTH: Final = re.compile(r"\d{5,}|\*")

F = TypeVar("F", bound=Callable[..., Any])


class TooMuch(TemplateError):
    """A template wants more than a chat can need."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that cannot run away."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Know what templates of the library transformers may use."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControls, _GenerationBlock],
            finalize=lambda value: value if isinstance(value, str) else weighed(value),
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: _bounded(name, call) for name, call in self.filters.items() if name not in _FORBIDDEN
        }
        self.filters[_SIZED] = weighed
        for name in _FORBIDDEN:
            self.globals.pop(name, None)
        self.globals[_JOIN] = _join

    def bounded(self, source: str) -> Template:
        """Compile source; raise TemplateSyntaxError for one that is no template."""
        tree = _Bounding(self).visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what a template may see of an object."""
        _refuse_format(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return what a template may see inside an object."""
        _refuse_format(obj, argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call for a template, with bounded arguments and answer."""
        if isinstance(function, _Steps):
            return function()
        _check_numbers(args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, getattr(function, "__name__", ""), args)
        return _sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute for a template what stays small."""
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)


class _Steps:
    """Counts down what one rendering may still do."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")
        return ""


def budget() -> Mapping[str, Any]:
    """Return what one rendering must be given besides its own names: a count of its steps."""
    return {_STEP: _Steps()}


def joined(pieces: Any) -> str:
    """Return a rendering's pieces as one text, unless that grows too large."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_SIZE:
            raise _too_large()
        parts.append(piece)
    return "".join(parts)


def weighed(value: Any) -> Any:
    """Return value, unless it would be too large as text, however often its parts are shared."""
    size, parts, left = 0, 0, [value]
    while left:
        one = left.pop()
        parts += 1
        size += len(one) if isinstance(one, str) else 1
        if size > MAX_SIZE or parts > MAX_PARTS:
            raise _too_large()
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
    return value


def _too_large() -> TooMuch:
    return TooMuch(f"it makes a text or list of more than {MAX_SIZE} entries")


def _refuse_format(owner: Any, name: Any) -> None:
    if isinstance(owner, str) and name in ("format", "format_map"):
        raise TooMuch("it formats with a width of its own choice")


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MAX_SIZE:
        raise _too_large()
    return value


def _join(*parts: Any) -> str:
    return joined(str(weighed(part)) for part in parts)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Return plain JSON. Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(weighed(value), indent=indent, ensure_ascii=ensure_ascii)


def _check_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER * 100:
            raise TooMuch(f"it asks for {value} of something")


def _check_text_method(owner: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse methods of texts whose answer could be much larger than what they are given."""
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        if any(isinstance(value, int) and value > MAX_NUMBER for value in args):
            raise TooMuch(f"it fills up a text to more than {MAX_NUMBER} characters")
    elif name in ("replace", "join", "translate"):
        longest = max((_length(weighed(value)) for value in args), default=0)
        # At worst every character of one is answered by all of the other.
        if longest + len(owner) > MAX_NUMBER and (len(owner) + 1) * (longest + 1) > 4 * MAX_SIZE:
            raise _too_large()


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
        raise TooMuch("it formats with a width of its own choice")
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}
        if bits.get(operator, 0) > MAX_BITS:
            raise TooMuch("it computes a number of thousands of digits")
    elif operator == "+":
        if _length(left) + _length(right) > MAX_SIZE:
            raise _too_large()
    elif operator == "*":
        times = next((value for value in (left, right) if isinstance(value, int)), 1)
        if max(_length(left), _length(right)) * times > MAX_SIZE:
            raise _too_large()


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bounded(name: str, function: F) -> F:
    """Return a filter that takes no large numbers and answers nothing too large."""
    place = int(
        hasattr(function, "jinja_pass_arg")
    )  # of what is filtered; Jinja's own context may come first

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, others = args[place], args[place + 1 :]
        if any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in (*others, *kwargs.values())):
            raise TooMuch(f"it gives the filter {name} a number above {MAX_NUMBER}")
        if name in _AS_TEXT and not isinstance(value, str | Undefined):
            weighed(value)
        if name in ("replace", "join"):
            _check_text_method(str(value) if name == "replace" else "", name, (value, *others))
        return _sized(function(*args, **kwargs))

    return call  # type: ignore[return-value]


_AS_TEXT: Final = frozenset(
    {"string", "join", "trim", "upper", "lower", "title", "capitalize", "replace", "indent", "e", "escape"}
)


class _Bounding(NodeTransformer):
    """Counts every turn and keeps an eye on every text that is put together."""

    def __init__(self, environment: Environment):
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._at(node, nodes.Call(nodes.Name(_JOIN, "load"), list(node.nodes), [], None, None))

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _SIZED, [], [], None, None)
        self._at(node, node.filter)
        return node

    def _step(self, node: nodes.Node) -> nodes.Node:
        return self._at(node, nodes.ExprStmt(nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)))

    def _at(self, node: nodes.Node, made: nodes.Node) -> nodes.Node:
        return made.set_lineno(node.lineno).set_environment(self._environment)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
