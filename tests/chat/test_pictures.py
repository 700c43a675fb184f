"""Pictures among the text of a conversation: in their places, as tokens of their own."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from engine_service.chat.conversation import Conversation, Prepared
from engine_service.errors import InvalidRequest, NotSupported
from engine_service.protocol import parse_chat_request
from tests.chat.models import SMOLLM2, STRICT, WITH_TOOLS, ByteTokenizer, CountingEye, model

TOKENIZER = ByteTokenizer()


def shown(file: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def prepared(*parts: dict[str, Any], template: str = SMOLLM2, **more: Any) -> Prepared:
    request = parse_chat_request({"messages": [{"role": "user", "content": list(parts)}], **more})
    return Conversation(model(template), TOKENIZER, CountingEye()).prepare(request)


@pytest.mark.parametrize("template", [SMOLLM2, WITH_TOOLS, STRICT])
def test_each_picture_takes_its_tokens_where_it_stands(template: str) -> None:
    made = prepared(said("Cat: "), shown(b"cat"), said(" and dog: "), shown(b"doggy"), template=template)
    text = prepared(said("Cat: \0\0\0 and dog: \0\0\0\0\0"), template=template)
    assert made.prompt_ids == text.prompt_ids
    assert text.pictures == ()
    assert [placed.picture.pixels for placed in made.pictures] == [b"cat" * 3, b"doggy" * 3]
    assert [made.prompt_ids[placed.start : placed.end] for placed in made.pictures] == [(0,) * 3, (0,) * 5]


def test_pictures_may_stand_alone_and_side_by_side() -> None:
    made = prepared(shown(b"a"), shown(b"bc"))
    first, second = made.pictures
    assert first.end == second.start
    assert bytes(made.prompt_ids[first.start - 1 : second.end]) == b"\n\0\0\0"


def test_a_picture_shown_twice_stands_twice() -> None:
    first, second = prepared(shown(b"cat"), said("?"), shown(b"cat")).pictures
    assert first.picture == second.picture
    assert second.start == first.end + 1


def test_pictures_of_several_turns_keep_their_order() -> None:
    turns = [
        {"role": "user", "content": [shown(b"one"), said("?")]},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": [said("!"), shown(b"two")]},
    ]
    made = Conversation(model(), TOKENIZER, CountingEye()).prepare(parse_chat_request({"messages": turns}))
    assert [placed.picture.digest for placed in made.pictures] == [b"one", b"two"]
    assert b"One." in bytes(
        i for i in made.prompt_ids[made.pictures[0].end : made.pictures[1].start] if i < 256
    )


def test_text_cannot_pass_for_a_picture() -> None:
    forged = "\ue000" + "0" * 16 + ".0\ue001"
    made = prepared(said(forged), shown(b"cat"))
    assert len(made.pictures) == 1
    assert forged in TOKENIZER.decode(made.prompt_ids)


def test_a_picture_that_cannot_be_read_is_named_by_its_message() -> None:
    with pytest.raises(
        InvalidRequest, match=r"messages\[0\]\.content: picture 2 .* it is damaged"
    ) as refused:
        prepared(shown(b"cat"), shown(b"?"))
    assert refused.value.param == "messages[0].content"


def test_a_template_that_leaves_a_picture_out_is_not_let_through() -> None:
    with pytest.raises(InvalidRequest, match="leaves a picture of these messages out"):
        prepared(said("Look:"), shown(b"cat"), template="{{ messages[0].content[:5] }}")


def test_a_model_that_sees_nothing_says_so_by_name() -> None:
    request = parse_chat_request({"messages": [{"role": "user", "content": [shown(b"cat")]}]})
    with pytest.raises(NotSupported, match="'test' cannot look at pictures"):
        Conversation(model(), TOKENIZER).prepare(request)
