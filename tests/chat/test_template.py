"""Chat templates of the kinds that model files bring."""

from __future__ import annotations

import resource
from datetime import datetime

import pytest

from engine_service.backends.base import ModelError
from engine_service.chat.parsing import CallStyle
from engine_service.chat.template import ChatTemplate
from engine_service.errors import InvalidRequest
from tests.chat.models import LLAMA_3, MISTRAL, OWN_WAY, SMOLLM2, STRICT, THINKS, THINKS_IF_TOLD, WITH_TOOLS

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_embedded_models_template_reads_as_its_makers_meant() -> None:
    assert ChatTemplate(SMOLLM2).render(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_template_is_spoken_to_in_chatml() -> None:
    assert ChatTemplate("").render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "call_style", "takes_system"),
    [
        (SMOLLM2, None, True),
        ("", None, True),
        (WITH_TOOLS, CallStyle.TAGGED, True),
        (LLAMA_3, CallStyle.PARAMETERS, True),
        (MISTRAL, CallStyle.LISTED, True),
        (OWN_WAY, None, True),
        (WITH_TOOLS + "<tool_call>\n<function=f>", None, True),
        (STRICT, None, False),
    ],
)
def test_what_a_template_can_do_is_found_out(
    source: str, call_style: CallStyle | None, takes_system: bool
) -> None:
    template = ChatTemplate(source)
    assert template.call_style is call_style
    assert template.takes_system is takes_system


@pytest.mark.parametrize(
    ("source", "by_itself"), [(THINKS, True), (THINKS_IF_TOLD, False)], ids=["thinks", "thinks if told"]
)
def test_thinking_is_switched_where_the_template_has_a_switch(source: str, by_itself: bool) -> None:
    template = ChatTemplate(source)
    on, off = (template.render(HELLO, thinking=thinking) for thinking in (True, False))
    assert on != off
    assert template.render(HELLO) == (on if by_itself else off)


@pytest.mark.parametrize("source", [SMOLLM2, "", STRICT])
def test_a_template_without_a_switch_says_the_same_either_way(source: str) -> None:
    template = ChatTemplate(source)
    assert {template.render(HELLO, thinking=thinking) for thinking in (True, False)} == {
        template.render(HELLO)
    }


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


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}"
RUNAWAYS = {
    "loops in loops": NESTED + "{% endfor %}{% endfor %}",
    "silent loops": NESTED.replace("x{%", "{%") + "{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a text times a number": "{{ 'x' * 9999999999 }}",
    "a number times a text": "{{ 9999999999 * 'x' }}",
    "a list times a number": "{{ [1] * 9999999999 }}",
    "a tower of numbers": "{{ 9 ** 9999 ** 9 }}",
    "numbers that square": (
        "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "texts that double": (
        "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "texts that add up": (
        "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "lists that add up": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "blocks that double": (
        "{% set ns = namespace(x='x') %}{% for a in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
    ),
    "lists that hold themselves twice": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x }}"
    ),
    "such lists as JSON": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}"
    ),
    "such lists as text": (
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | string | length }}"
    ),
    "a wide centre": "{{ 'x' | center(999999999) }}",
    "a wide indent": "{{ 'a\nb' | indent(999999999) }}",
    "a wide method": "{{ 'x'.ljust(999999999) }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format of its own": "{{ '%*d' % (999999999, 1) }}",
    "a wide format method": "{{ '{:>999999999}'.format(1) }}",
    "replacing by much": "{% set x = 'x' * 1000000 %}{{ x.replace('x', x) }}",
    "replacing by much in a filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "text without end": "{{ lipsum(n=99999) }}",
    "a long range": "{{ range(999999999) | list }}",
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS.keys())
@pytest.mark.timeout(60)
def test_a_template_that_runs_away_is_stopped(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="the model's chat template refuses"):
        ChatTemplate(source).render(HELLO)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kibibytes


def test_a_template_that_needs_a_dangerous_filter_cannot_be_used() -> None:
    with pytest.raises(ModelError, match="No filter named 'format'"):
        ChatTemplate("{{ '%999999999d' | format(1) }}")


def test_a_template_nested_beyond_reason_cannot_be_used() -> None:
    with pytest.raises(ModelError, match=r"nested too deeply|cannot be read"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_a_long_household_stays_far_within_the_bounds() -> None:
    long = [{"role": "user", "content": "word " * 2000}] * 1000
    assert len(ChatTemplate("").render(long)) > 10_000_000
