"""From a model's text to reasoning, text and calls, however the text is cut."""

from __future__ import annotations

import json

import pytest

from engine_service.chat.parsing import Call, CallStyle, OutputParser, Reasoning, Text
from engine_service.protocol import ToolCall

NAMES = ("Hass", "HassTurnOn")
CALL = '{"name": "HassTurnOn", "arguments": {"name": "Küche 🙂"}}'


def parse(text: str, style: CallStyle, *, size: int | None = None, thinks: bool = False) -> list[object]:
    """Return (kind, content) with neighbours of one kind joined; size cuts the text into such pieces."""
    parser = OutputParser(
        style=style, starts_in_reasoning=thinks, tool_names=NAMES, new_call_id=lambda: "call_1"
    )
    pieces = []
    for start in range(0, len(text), size or max(1, len(text))):
        pieces += parser.feed(text[start : start + (size or len(text))])
    pieces += parser.finish()
    joined: list[object] = []
    for piece in pieces:
        match piece:
            case Call(call=ToolCall(name=name, arguments=arguments)):
                joined.append(("call", name, json.loads(arguments)))
            case Text(text=part) | Reasoning(text=part):
                kind = type(piece).__name__.lower()
                if joined and joined[-1][0] == kind:  # type: ignore[index]
                    joined[-1] = (kind, joined[-1][1] + part)  # type: ignore[index]
                else:
                    joined.append((kind, part))
    return joined


LLAMA = CALL.replace("arguments", "parameters")
NAMED = 'HassTurnOn{"name": "Küche 🙂"}'
WANTED_CALL = ("call", "HassTurnOn", {"name": "Küche 🙂"})
CASES = [
    pytest.param("It is on.", CallStyle.NONE, [("text", "It is on.")], id="plain text"),
    pytest.param(" \n It is on. ", CallStyle.BARE, [("text", " \n It is on. ")], id="white space is kept"),
    pytest.param('{"a": 1}', CallStyle.NONE, [("text", '{"a": 1}')], id="JSON without tools is text"),
    pytest.param(CALL, CallStyle.BARE, [WANTED_CALL], id="bare call"),
    pytest.param(
        '{"sky": "clear"}', CallStyle.BARE, [("text", '{"sky": "clear"}')], id="JSON answer beside tools"
    ),
    pytest.param("{", CallStyle.BARE, [], id="bare call cut after the brace"),
    pytest.param(CALL[:12], CallStyle.BARE, [], id="bare call cut in the name"),
    pytest.param(CALL[:-4], CallStyle.BARE, [], id="bare call cut in the arguments"),
    pytest.param("", CallStyle.BARE, [], id="nothing"),
    pytest.param("a < b <think", CallStyle.TAGGED, [("text", "a < b <think")], id="a tag that is none"),
    pytest.param(
        f"Sure.\n<tool_call>\n{CALL}\n</tool_call>",
        CallStyle.TAGGED,
        [("text", "Sure.\n"), WANTED_CALL],
        id="text, then a tagged call",
    ),
    pytest.param(
        f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
        CallStyle.TAGGED,
        [WANTED_CALL, WANTED_CALL],
        id="two tagged calls",
    ),
    pytest.param(f"<tool_call>{CALL}", CallStyle.TAGGED, [WANTED_CALL], id="tagged call never closed"),
    pytest.param(f"<tool_call>{CALL[:-4]}", CallStyle.TAGGED, [], id="tagged call cut off"),
    pytest.param(
        "<tool_call>turn it on</tool_call>",
        CallStyle.TAGGED,
        [("text", "turn it on")],
        id="tagged nonsense is shown",
    ),
    pytest.param(
        "<think>It is dark.</think>\n\nDone.",
        CallStyle.NONE,
        [("reasoning", "It is dark."), ("text", "Done.")],
        id="reasoning, then text",
    ),
    pytest.param(
        f"<think>\n</think>\n{CALL}",
        CallStyle.BARE,
        [("reasoning", "\n"), WANTED_CALL],
        id="reasoning, then a call",
    ),
    pytest.param(LLAMA, CallStyle.PARAMETERS, [WANTED_CALL], id="Llama's call"),
    pytest.param(f"<|python_tag|>{LLAMA}", CallStyle.PARAMETERS, [WANTED_CALL], id="Llama's with its tag"),
    pytest.param(f"{LLAMA}; {LLAMA}", CallStyle.PARAMETERS, [WANTED_CALL] * 2, id="two of Llama's calls"),
    pytest.param(CALL, CallStyle.PARAMETERS, [WANTED_CALL], id="Llama's call with the usual word"),
    pytest.param(LLAMA[:-4], CallStyle.PARAMETERS, [], id="Llama's call cut off"),
    pytest.param("It < is", CallStyle.PARAMETERS, [("text", "It < is")], id="Llama's text"),
    pytest.param("<|python", CallStyle.PARAMETERS, [("text", "<|python")], id="half of Llama's tag"),
    pytest.param(
        '{"sky": "clear"}', CallStyle.PARAMETERS, [("text", '{"sky": "clear"}')], id="Llama's JSON answer"
    ),
    pytest.param(f"[{CALL}]", CallStyle.LISTED, [WANTED_CALL], id="Mistral's call"),
    pytest.param(
        f'[TOOL_CALLS] [{CALL}, {CALL[:-1]}, "id": "abcdefghi"}}]',
        CallStyle.LISTED,
        [WANTED_CALL] * 2,
        id="Mistral's calls with their token and an id",
    ),
    pytest.param(NAMED, CallStyle.LISTED, [WANTED_CALL], id="Mistral's newer call"),
    pytest.param(
        f"[TOOL_CALLS]{NAMED}[TOOL_CALLS]{NAMED}".replace("On{", "On[ARGS]{"),
        CallStyle.LISTED,
        [WANTED_CALL] * 2,
        id="Mistral's newer calls with their tokens",
    ),
    pytest.param(f"[{CALL[:-4]}", CallStyle.LISTED, [], id="Mistral's call cut off"),
    pytest.param(NAMED[:-4], CallStyle.LISTED, [], id="Mistral's newer call cut off"),
    pytest.param("[1] says so", CallStyle.LISTED, [("text", "[1] says so")], id="Mistral's text in brackets"),
    pytest.param("HassTurnOn it", CallStyle.LISTED, [("text", "HassTurnOn it")], id="a tool's name as text"),
    pytest.param("Hass", CallStyle.LISTED, [("text", "Hass")], id="a tool's name and no more"),
    pytest.param('[{"a": 1}]', CallStyle.LISTED, [("text", '[{"a": 1}]')], id="a list that is no call"),
    pytest.param("<think>It is", CallStyle.NONE, [("reasoning", "It is")], id="reasoning cut off"),
    pytest.param("<thin", CallStyle.NONE, [("text", "<thin")], id="half a tag at the end"),
]


@pytest.mark.parametrize(("text", "style", "wanted"), CASES)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, style: CallStyle, wanted: list[object]
) -> None:
    for size in range(1, len(text) + 2):
        assert parse(text, style, size=size) == wanted


def test_a_prompt_that_opened_the_reasoning_is_continued_in_it() -> None:
    text = "It is dark.</think>\nDone."
    for size in range(1, len(text)):
        assert parse(text, CallStyle.NONE, size=size, thinks=True) == [
            ("reasoning", "It is dark."),
            ("text", "Done."),
        ]


@pytest.mark.parametrize("style", list(CallStyle))
def test_text_is_given_out_as_it_comes(style: CallStyle) -> None:
    parser = OutputParser(style=style)
    assert [parser.feed(part) for part in ("It", " is", " on")] == [
        [Text(text="It")],
        [Text(text=" is")],
        [Text(text=" on")],
    ]


def test_only_what_may_become_a_tag_is_held_back() -> None:
    parser = OutputParser(style=CallStyle.TAGGED)
    assert parser.feed("a <tool") == [Text(text="a ")]
    assert parser.feed("box") == [Text(text="<toolbox")]


def test_calls_get_ids_of_their_own() -> None:
    parser = OutputParser(style=CallStyle.TAGGED)
    calls = parser.feed(f"<tool_call>{CALL}</tool_call>" * 2)
    ids = {piece.call.call_id for piece in calls if isinstance(piece, Call)}
    assert len(ids) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
