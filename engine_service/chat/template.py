"""The model's own chat template: messages in, prompt text out.

Decides nothing about roles or tools; it runs the Jinja source a model file brings, in a sandbox that cannot
change what it is given. Source: the conventions of `apply_chat_template` in the library transformers, for
which templates are written (trimmed blocks, `raise_exception`, `strftime_now`, plain `tojson`, `generation`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols as LoopControls
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_service.backends.base import ModelError
from engine_service.errors import InvalidRequest

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used for models that bring no template."""

_SYSTEM_PROBE: Final = "fairhearth-system-probe"


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled."""

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        now: Callable[[], datetime] = datetime.now,
    ):
        """Compile source (empty: ChatML); raise ModelError if it is no template."""
        self._now = now
        environment = _environment()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["bos_token"] = bos_text
        environment.globals["eos_token"] = eos_text
        try:
            names = find_undeclared_variables(environment.parse(source or CHATML))
            self._template = environment.from_string(source or CHATML)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template cannot be read: line {error.lineno}: {error.message}"
            ) from error
        self.handles_tools = "tools" in names
        self.takes_system = self._takes_system()

    def _takes_system(self) -> bool:
        messages = [{"role": "system", "content": _SYSTEM_PROBE}, {"role": "user", "content": "?"}]
        try:
            return _SYSTEM_PROBE in self.render(messages)
        except InvalidRequest:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text; raise InvalidRequest with the template's own words where it refuses."""
        try:
            return self._template.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            # Foreign code: a template expects messages of one shape and fails in its own way on others.
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControls, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Return plain JSON. Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
