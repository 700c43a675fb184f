"""The client against an engine on a real socket: what it carries, and how each failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from custom_components.fairhearth.engine_client import (
    Accepted,
    CannotConnect,
    ChatEvent,
    ChatRequest,
    EngineClient,
    Finished,
    GenerationFailed,
    InvalidToken,
    Message,
    NotAllowed,
    PromptTooLong,
    ProtocolError,
    QueueFull,
    ResidentSettings,
    TextDelta,
    ToolSpec,
    UnknownResident,
    Usage,
)
from engine_service import errors as sent
from tests.ha.fake_engine import TOKEN, Answer, FakeEngine, caller_of, golden

HELLO = ChatRequest(
    messages=(Message(role="user", content="Größe? 🙂"),), resident="guest", workload_class="chat"
)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an app on a free port of loopback."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def answer_of(client: EngineClient, request: ChatRequest = HELLO) -> list[ChatEvent]:
    async with aclosing(client.chat(request)) as events:
        return [event async for event in events]


async def test_questions_are_answered(client: EngineClient, engine: FakeEngine) -> None:
    assert (await client.health()).engine_id == engine.engine_id
    assert (await client.engine()).name == engine.name
    assert await client.models() == {engine.model: False, "coder": False}
    assert (await client.fairness()).residents.keys() == {"guest", "house"}
    assert client.url == engine.url


async def test_a_resident_is_put_listed_and_deleted(client: EngineClient, engine: FakeEngine) -> None:
    settings = ResidentSettings(name="Zoë", weight=3, daily_tokens=500)
    assert await client.put_resident("zoe", settings) == settings
    assert (await client.residents())["zoe"] == settings
    await client.delete_resident("zoe")
    assert "zoe" not in engine.residents
    with pytest.raises(UnknownResident, match="zoe"):
        await client.delete_resident("zoe")


async def test_an_answer_is_streamed_from_accepted_to_finished(
    client: EngineClient, engine: FakeEngine
) -> None:
    events = await answer_of(client)
    assert isinstance(events[0], Accepted)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == (
        "Hello from the fake engine."
    )
    assert [type(event) for event in events[-2:]] == [Finished, Usage]
    (chat,) = engine.chats
    assert chat.messages[0].content == "Größe? 🙂"
    assert caller_of(chat).resident_id == "guest"


async def test_text_arrives_while_the_rest_is_not_yet_written(
    client: EngineClient, engine: FakeEngine
) -> None:
    hold = asyncio.Event()
    engine.answers.append(Answer(hold=hold))
    async with aclosing(client.chat(HELLO)) as events:
        assert isinstance(await anext(events), Accepted)
        assert await anext(events) == TextDelta(text="Hello")
        hold.set()
        assert len([event async for event in events]) > 3


async def test_leaving_an_answer_cancels_it_at_the_engine(client: EngineClient, engine: FakeEngine) -> None:
    engine.answers.append(Answer(hold=asyncio.Event()))
    async with aclosing(client.chat(HELLO)) as events:
        await anext(events)
    async with asyncio.timeout(10):
        while not engine.abandoned:
            await asyncio.sleep(0.01)


async def test_a_refusal_is_raised_as_what_it_is(client: EngineClient, engine: FakeEngine) -> None:
    engine.answers.append(Answer(refusal=sent.QueueFull("too much waits", retry_after_s=4.0)))
    with pytest.raises(QueueFull) as raised:
        await answer_of(client)
    assert raised.value.retry_after_s == 4.0
    engine.answers.append(Answer(refusal=sent.PromptTooLong("9000 tokens, 8192 fit")))
    with pytest.raises(PromptTooLong, match="8192"):
        await answer_of(client)


async def test_an_error_in_the_middle_is_raised_after_what_came_before(
    client: EngineClient, engine: FakeEngine
) -> None:
    engine.answers.append(Answer(pieces=("One",), error=sent.GenerationFailed("it broke")))
    events = client.chat(HELLO)
    assert isinstance(await anext(events), Accepted)
    assert await anext(events) == TextDelta(text="One")
    with pytest.raises(GenerationFailed, match="it broke"):
        await anext(events)


async def test_a_lost_connection_is_told_from_the_end(client: EngineClient, engine: FakeEngine) -> None:
    engine.answers.append(Answer(drop=True))
    with pytest.raises(CannotConnect):
        await answer_of(client)


async def test_a_stream_that_ends_early_is_not_taken_for_complete(
    socket_enabled: None, session: aiohttp.ClientSession
) -> None:
    async def half(request: web.Request) -> web.Response:
        return web.Response(body=b": keepalive\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", half)
    async with served(app) as url:
        with pytest.raises(CannotConnect, match="before it was complete"):
            await answer_of(EngineClient(session, url, TOKEN))


async def test_the_fairness_stream_yields_at_once_and_after_each_change(
    client: EngineClient, engine: FakeEngine
) -> None:
    async with aclosing(client.fairness_stream()) as snapshots:
        assert (await anext(snapshots)).engine.requests_waiting == 1
        await engine.publish(lambda snapshot: snapshot["engine"].update(requests_waiting=7))
        assert (await anext(snapshots)).engine.requests_waiting == 7


async def test_keepalives_keep_a_quiet_stream_alive(
    session: aiohttp.ClientSession, engine: FakeEngine
) -> None:
    engine.keepalive_s = 0.05
    client = EngineClient(session, engine.url, TOKEN, silence_timeout_s=2.0)
    async with aclosing(client.fairness_stream()) as snapshots:
        await anext(snapshots)
        await asyncio.sleep(0.5)
        await engine.publish(lambda snapshot: snapshot["engine"].update(requests_waiting=9))
        assert (await anext(snapshots)).engine.requests_waiting == 9


async def test_a_silent_stream_is_lost(session: aiohttp.ClientSession, engine: FakeEngine) -> None:
    client = EngineClient(session, engine.url, TOKEN, silence_timeout_s=0.2)
    async with aclosing(client.fairness_stream()) as snapshots:
        await anext(snapshots)
        with pytest.raises(CannotConnect, match="silent"):
            await anext(snapshots)


async def test_a_prefix_is_pinned_with_its_tools(client: EngineClient, engine: FakeEngine) -> None:
    tool = ToolSpec(**golden("chat_request_tools")["tools"][0]["function"])
    pin = await client.pin_prefix([Message(role="system", content="You are the voice of a home.")], [tool])
    assert pin.prefix_tokens == 180
    assert engine.prefixes[0].as_wire() == golden("prefix_request")


async def test_a_prefix_is_pinned_for_requests_that_do_not_think(
    client: EngineClient, engine: FakeEngine
) -> None:
    system = Message(role="system", content="You are the voice of a home.")
    await client.pin_prefix([system], [], thinking=False)
    assert engine.prefixes[0].as_wire() == golden("prefix_request_no_thinking")


async def test_a_wrong_token_is_told_from_one_that_may_not(
    session: aiohttp.ClientSession, engine: FakeEngine
) -> None:
    with pytest.raises(InvalidToken):
        await EngineClient(session, engine.url, "wrong").engine()
    with pytest.raises(InvalidToken):
        await EngineClient(session, engine.url).engine()
    engine.tokens["reader"] = ("metrics",)
    with pytest.raises(NotAllowed, match="residents"):
        await EngineClient(session, engine.url, "reader").put_resident("a", ResidentSettings(name="A"))
    with pytest.raises(NotAllowed, match="generate"):
        await answer_of(EngineClient(session, engine.url, "reader"))


async def test_no_engine_is_a_failed_connection(client: EngineClient, engine: FakeEngine) -> None:
    await engine.stop()
    with pytest.raises(CannotConnect, match="no engine answers at"):
        await client.health()
    with pytest.raises(CannotConnect, match="no engine answers at"):
        await anext(client.fairness_stream())


async def test_something_else_at_the_address_is_no_engine(
    socket_enabled: None, session: aiohttp.ClientSession
) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>router</html>", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    async with served(app) as url:
        client = EngineClient(session, url, TOKEN)
        with pytest.raises(ProtocolError, match="not JSON"):
            await client.health()
        with pytest.raises(ProtocolError, match="not JSON"):
            await answer_of(client)


async def test_an_endless_line_is_refused(socket_enabled: None, session: aiohttp.ClientSession) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(200):
            await response.write(b"x" * 65536)
        return response

    app = web.Application()
    app.router.add_get("/v1/fairness/stream", flood)
    async with served(app) as url:
        with pytest.raises(ProtocolError, match="a line of more than"):
            await anext(EngineClient(session, url, TOKEN).fairness_stream())
