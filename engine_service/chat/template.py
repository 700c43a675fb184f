"""The model's own chat template: messages in, prompt text out.

Decides nothing about roles or tools; it runs the Jinja source a model file brings, in a sandbox (`sandbox`).
Source: the conventions of `apply_chat_template` in the library transformers, for which templates are written
(trimmed blocks, `raise_exception`, `strftime_now`, plain `tojson`, `generation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from engine_service.backends.base import ModelError
from engine_service.chat.parsing import CallStyle
from engine_service.chat.sandbox import BoundedEnvironment, budget, joined
from engine_service.errors import InvalidRequest

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used for models that bring no template."""

_MARKS: Final[tuple[tuple[str, CallStyle | None], ...]] = (
    ("<function=", None),  # Qwen3-Coder's calls are XML within the tag
    ("<tool_call>", CallStyle.TAGGED),
    ("[TOOL_CALLS]", CallStyle.LISTED),
    ("<|python_tag|>", CallStyle.PARAMETERS),
    ('"parameters": ', CallStyle.PARAMETERS),
)
"""What templates write around calls: Hermes and Qwen, Mistral, Llama 3.1 with its tools and without."""

_ITS_OWN: Final = (AttributeError, MemoryError, TypeError, ValueError)

_THINKING: Final = ("enable_thinking", "thinking")
"""What templates call their switch: Qwen's and SmolLM's the one, Granite's and DeepSeek's the other."""

_SYSTEM_PROBE: Final = "fairhearth-system-probe"


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
        environment = BoundedEnvironment()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["bos_token"] = bos_text
        environment.globals["eos_token"] = eos_text
        try:
            names = find_undeclared_variables(environment.parse(source or CHATML))
            self._template = environment.bounded(source or CHATML)
        except RecursionError:
            raise ModelError("the model's chat template cannot be read: it is nested too deeply") from None
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template cannot be read: line {error.lineno}: {error.message}"
            ) from error
        self.call_style = _style_of(source) if "tools" in names else None
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
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text; raise InvalidRequest with the template's own words where it refuses.

        thinking turns the template's switch, where it has one; None leaves it as the template has it.
        """
        switches = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        try:
            return joined(
                self._template.generate(
                    messages=messages,
                    tools=list(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                    **switches,
                    **budget(),
                )
            )
        except (TemplateError, ArithmeticError, LookupError, RecursionError, *_ITS_OWN) as error:
            # Foreign code: a template expects messages of one shape and fails in its own way on others.
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _style_of(source: str) -> CallStyle | None:
    """Return how a model whose template shows it tools writes calls, by what the template writes for it.

    None for a way that nobody here reads (Gemma's, say): such a model is told of tools in our own words, and
    its calls have our own form.
    """
    for mark, style in _MARKS:
        if mark in source:
            return style
    return None


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
