"""Chat templates of the kinds that model files bring."""

from __future__ import annotations

from datetime import datetime

import pytest

from engine_service.backends.base import ModelError
from engine_service.chat.template import ChatTemplate
from engine_service.errors import InvalidRequest
from tests.chat.models import SMOLLM2, STRICT, WITH_TOOLS

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_embedded_models_template_reads_as_its_makers_meant() -> None:
    assert ChatTemplate(SMOLLM2).render(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_template_is_spoken_to_in_chatml() -> None:
    assert ChatTemplate("").render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "handles_tools", "takes_system"),
    [(SMOLLM2, False, True), ("", False, True), (WITH_TOOLS, True, True), (STRICT, False, False)],
)
def test_what_a_template_can_do_is_found_out(source: str, handles_tools: bool, takes_system: bool) -> None:
    template = ChatTemplate(source)
    assert template.handles_tools is handles_tools
    assert template.takes_system is takes_system


def test_a_refusal_comes_in_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: System role not supported") as refused:
        ChatTemplate(STRICT).render([{"role": "system", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_file_that_holds_no_template_cannot_be_used() -> None:
    with pytest.raises(ModelError, match="cannot be read: line 2"):
        ChatTemplate("ok\n{% for x %}")


def test_the_date_is_the_one_of_the_call() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2026, 11, 29))
    assert template.render(HELLO) == "29 November 2026"


def test_json_in_prompts_is_plain() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([{"content": "<ö>"}]) == '[{"content": "<ö>"}]'


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert ChatTemplate(source).render(HELLO * 2) == "Hello"


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].update(a=1) }}"],
)
def test_a_template_can_neither_change_messages_nor_reach_out(source: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(messages)
    assert messages == HELLO
