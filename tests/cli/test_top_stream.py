"""What `fairhearth top` makes of a stream that the engine ends with an error."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine_service.commands import top
from engine_service.errors import StorageUnavailable
from engine_service.server.replies import error_body


async def test_top_says_what_ended_the_stream_and_does_not_draw_it() -> None:
    async def stream(_: web.Request) -> web.Response:
        messages: list[object] = [{"at": 1.0}, error_body(StorageUnavailable("the disk is gone"))]
        text = "".join(f"event: fairness\ndata: {json.dumps(message)}\n\n" for message in messages)
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/v1/fairness/stream", stream)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as http:
        told = top._snapshots(http)
        assert await anext(told) == {"at": 1.0}
        with pytest.raises(top._Refused, match="the disk is gone"):
            await anext(told)
