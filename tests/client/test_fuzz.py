"""A stream of events cut anywhere, and chunks of it gone wrong: read the same, or refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any, cast

import aiohttp
from hypothesis import given, settings, strategies as st

from custom_components.fairhearth.engine_client.client import _data_lines
from custom_components.fairhearth.engine_client.errors import EngineError
from custom_components.fairhearth.engine_client.protocol import chat_events

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
CHUNKS = [
    chunk
    for path in sorted(GOLDEN.glob("chat_stream*.json"))
    for chunk in json.loads(path.read_text("utf-8"))
]
LINES = st.sampled_from(
    [b"data: {}", b"data:[DONE]", b": keepalive", b"event: job", b"", b"data", b"id: 1", "data: ö🙂".encode()]
)


class Response:
    """A body that comes in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.content = self
        self._pieces = pieces

    async def iter_any(self) -> Any:
        for piece in self._pieces:
            yield piece


def read(pieces: list[bytes]) -> list[bytes]:
    async def all_lines() -> list[bytes]:
        response = cast("aiohttp.ClientResponse", Response(pieces))
        return [line async for line in _data_lines(response)]

    return asyncio.run(all_lines())


@settings(deadline=None)
@given(
    lines=st.lists(LINES | st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=8),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_events_are_the_same_however_the_stream_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    body = b"".join(line + b"\n" for line in lines)
    edges = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(edges)]
    wanted = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
    assert read(pieces) == read([body]) == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every part below the whole."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in ((*path, key), *places(value[key], (*path, key)))]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_chunk_gone_wrong_is_read_or_refused_by_name(data: st.DataObject) -> None:
    chunk = copy.deepcopy(data.draw(st.sampled_from([one for one in CHUNKS if isinstance(one, dict)])))
    *parents, last = data.draw(st.sampled_from(places(chunk)))
    node = chunk
    for key in parents:
        node = node[key]
    if data.draw(st.booleans()):
        node[last] = data.draw(JSON)
    else:
        del node[last]
    with contextlib.suppress(EngineError):
        assert isinstance(chat_events(chunk), list)
