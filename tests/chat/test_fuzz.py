"""Whatever a model writes and a model file brings: told apart or refused, never another exception."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from engine_service.backends.base import ModelError
from engine_service.chat.parsing import Call, CallStyle, OutputParser, Piece, Reasoning, Text
from engine_service.chat.template import ChatTemplate
from engine_service.errors import InvalidRequest

NAMES = ("turn_on", "turn")
_WRITTEN = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
        *(
            "{",
            "}",
            "[",
            "]",
            ";",
            ",",
            " ",
            "\n",
            '"name": ',
            '"arguments": ',
            '"parameters": ',
            '"turn_on"',
        ),
        *("turn", "turn_on", "{}", "null", "[" * 5000, '{"a":' * 5000),
        '{"name": "turn_on", "arguments": {"a": 1}}',
        '{"name": "turn_on", "parameters": {}}',
        'turn_on{"a": [1]}',
    ]
)
WRITTEN = st.lists(_WRITTEN | st.text(max_size=6), max_size=8).map("".join)


def told(pieces: list[Piece]) -> list[tuple[str, ...]]:
    """Return the pieces with neighbours of one kind joined."""
    joined: list[tuple[str, ...]] = []
    for piece in pieces:
        match piece:
            case Call(call=call):
                joined.append(("call", call.name, call.arguments))
            case Text(text=part) | Reasoning(text=part):
                kind = type(piece).__name__
                before = joined.pop()[1] if joined and joined[-1][0] == kind else ""
                joined.append((kind, before + part))
    return joined


def parsed(style: CallStyle, parts: list[str], *, thinks: bool) -> list[tuple[str, ...]]:
    parser = OutputParser(style=style, starts_in_reasoning=thinks, tool_names=NAMES)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    assert parser.num_calls == sum(isinstance(piece, Call) for piece in pieces)
    return told(pieces)


@pytest.mark.parametrize("style", list(CallStyle))
@settings(deadline=None)
@given(text=WRITTEN, cuts=st.lists(st.integers(0, 60), max_size=6), thinks=st.booleans())
def test_whatever_a_model_writes_is_told_apart_the_same_however_it_is_cut(
    style: CallStyle, text: str, cuts: list[int], thinks: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert parsed(style, parts, thinks=thinks) == parsed(style, [text], thinks=thinks)


@settings(deadline=None)
@given(text=WRITTEN.filter(lambda text: "<think>" not in text))
def test_without_tools_nothing_that_a_model_writes_is_lost(text: str) -> None:
    assert "".join(part for _, part in parsed(CallStyle.NONE, [text], thinks=False)) == text


_SOURCE = st.sampled_from(
    [
        *("{% for message in messages %}", "{% endfor %}", "{% if tools %}", "{% else %}", "{% endif %}"),
        *("{{ message.content }}", "{{ messages[9].content }}", "{{ messages }}", "{{ bos_token * 10**9 }}"),
        *("{{ raise_exception('no') }}", "{{ message.role | upper }}", "{{ 1 / 0 }}", "{{ tools | tojson }}"),
        *("{{ ''.__class__ }}", "{{ strftime_now('%Y') }}", "{{ range(10**9) | list }}", "{% set x = 1 %}"),
        *("{% macro m(a) %}", "{% endmacro %}", "{{ m(m) }}", "{#", "#}", "{{", "%}", "<tool_call>", "\n"),
    ]
)
HELLO = [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello"}]


@settings(deadline=None)
@given(source=st.lists(_SOURCE | st.text(max_size=4), max_size=8).map("".join))
def test_any_template_speaks_or_is_refused(source: str) -> None:
    with contextlib.suppress(ModelError):
        template = ChatTemplate(source, bos_text="<s>")
        with contextlib.suppress(InvalidRequest):
            assert isinstance(template.render(HELLO, tools=[{"type": "function"}]), str)
