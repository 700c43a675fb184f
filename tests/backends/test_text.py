"""What a stream may show: whole characters, and nothing of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from engine_service.backends.text import BannedStrings, TextAssembler


def stream(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], TextAssembler]:
    assembler = TextAssembler(stops)
    shown = [assembler.push(piece) for piece in pieces]
    return [*shown, assembler.finish()], assembler


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def first_complete_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Return where to cut if characters came one by one; None without a stop."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(text=st.text(max_size=30), places=st.lists(st.integers(0, 200), max_size=12))
def test_any_cutting_into_tokens_streams_the_same_text(text: str, places: list[int]) -> None:
    shown, _ = stream(cut(text.encode(), places))
    assert "".join(shown) == text
    assert not any("\ufffd" in part for part in shown if "\ufffd" not in text)


@given(
    text=st.text(alphabet="abc💡", max_size=25),
    stops=st.lists(st.text(alphabet="abc💡", min_size=1, max_size=4), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 100), max_size=20),
)
def test_the_text_ends_before_the_first_stop_however_it_was_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    shown, assembler = stream(cut(text.encode(), places), tuple(stops))
    end = first_complete_stop(text, tuple(stops))
    assert "".join(shown) == (text if end is None else text[:end])
    assert assembler.is_stopped == (end is not None)


def test_half_a_character_is_held_back_and_dropped_at_the_end() -> None:
    lamp = "💡".encode()
    shown, _ = stream([b"a", lamp[:2], lamp[2:], lamp[:3]])
    assert shown == ["a", "", "💡", "", ""]


def test_bytes_that_can_never_be_text_are_replaced() -> None:
    shown, _ = stream([b"a\xff", b"\xc3", b"b"])
    assert "".join(shown) == "a\ufffd\ufffdb"


def test_nothing_is_shown_after_a_stop() -> None:
    shown, _ = stream([b"one STOP", b" two"], ("STOP",))
    assert "".join(shown) == "one "


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextAssembler(("", "x"))


def test_a_banned_string_is_seen_across_pieces_and_in_either_case() -> None:
    banned = BannedStrings(["As an AI", "ärger"])
    for piece in (b" as", b" AN", b" a"):
        assert not banned.completes(piece)
        banned.push(piece)
    assert banned.completes(b"i model")
    assert banned.completes(b"I")
    assert not banned.completes(b"nchor")
    banned.push(b"nchor")
    assert banned.completes("so ärger".encode())
    assert not banned.completes(b"")


def test_an_empty_banned_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        BannedStrings(["x", ""])
