"""The comparison with llama.cpp's own server counts what really came, and misses no missed bar."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LIB = str(Path(__file__).parents[2] / "scripts" / "lib")
sys.path.insert(0, LIB)
try:
    from bench import client, loads, machine, measure, servers, verdict
finally:
    sys.path.remove(LIB)


def pieces_of(body: bytes, headers: dict[bytes, bytes], *, cut: int) -> list[bytes]:
    """Read a body that arrives cut bytes at a time."""

    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        for start in range(0, len(body), cut):
            reader.feed_data(body[start : start + cut])
        reader.feed_eof()
        return [piece async for piece in client.body_pieces(reader, headers)]

    return asyncio.run(read())


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_chunks_are_put_together_however_they_arrive(cut: int) -> None:
    parts = (b'data: {"a":1}\n', b"\ndata: [DO", b"NE]\n\n")
    assert b"".join(pieces_of(chunked(*parts), {b"transfer-encoding": b"chunked"}, cut=cut)) == b"".join(
        parts
    )


@pytest.mark.parametrize("headers", [{b"content-length": b"5"}, {}])
def test_a_body_without_chunks_is_read_whole(headers: dict[bytes, bytes]) -> None:
    assert b"".join(pieces_of(b"hello", headers, cut=2)) == b"hello"


class FakeServer:
    """Answers every request with the same head and events, over a real connection."""

    def __init__(self, events: list[dict[str, Any]], *, status: str = "200 OK", is_cut: bool = False) -> None:
        self.requests: list[dict[str, Any]] = []
        self._events = events
        self._status = status
        self._is_cut = is_cut

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("Content-Length"))
        self.requests.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {self._status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        body = chunked(*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in self._events))
        writer.write(body[:-5] if self._is_cut else body)
        await writer.drain()
        writer.close()

    def ask(self, dialect: servers.Dialect, order: servers.Order, tmp_path: Path) -> servers.Answer:
        async def run() -> servers.Answer:
            server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                address = client.Address(host="127.0.0.1", port=port, token="t" * 16)
                log = tmp_path / "log"
                log.write_text("last words\n")
                return await servers.Server("a server", dialect, [], address, log=log).ask(order)

        return asyncio.run(run())


ORDER = servers.Order(prompt_ids=(5, 6, 7), num_tokens=2, class_id="voice", resident="house")
OURS = [
    {"choices": [{"text": ""}]},
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "b"}]},
    {"choices": [{"text": ""}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    },
]
PEER = [
    {"content": "a", "stop": False},
    {"content": "b", "stop": False},
    {"content": "", "stop": True, "tokens_evaluated": 3, "tokens_predicted": 2, "timings": {"cache_n": 1}},
]


@pytest.mark.parametrize(
    ("dialect", "events"),
    [(servers.OurDialect(), OURS), (servers.PeerDialect(), PEER)],
    ids=["fairhearth", "llama-server"],
)
def test_only_text_counts_as_a_token_and_the_servers_own_count_is_read(
    dialect: servers.Dialect, events: list[dict[str, Any]], tmp_path: Path, socket_enabled: None
) -> None:
    answer = FakeServer(events).ask(dialect, ORDER, tmp_path)
    assert len(answer.token_times) == 2
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (3, 1, 2)
    assert answer.sent_at <= answer.token_times[0] <= answer.ended_at


@pytest.mark.parametrize("dialect", [servers.OurDialect(), servers.PeerDialect()])
def test_both_are_asked_for_the_same_tokens(
    dialect: servers.Dialect, tmp_path: Path, socket_enabled: None
) -> None:
    fake = FakeServer(OURS if isinstance(dialect, servers.OurDialect) else PEER)
    fake.ask(dialect, ORDER, tmp_path)
    (asked,) = fake.requests
    assert asked["prompt"] == [5, 6, 7]
    assert asked.get("max_tokens", asked.get("n_predict")) == 2
    assert (asked["temperature"], asked["ignore_eos"], asked["stream"]) == (0, True, True)


def test_an_answer_with_too_few_tokens_is_no_measurement(tmp_path: Path, socket_enabled: None) -> None:
    order = servers.Order(prompt_ids=(5, 6, 7), num_tokens=9)
    with pytest.raises(client.ServerFailed, match=r"3 \+ 2 tokens instead of 3 \+ 9"):
        FakeServer(PEER).ask(servers.PeerDialect(), order, tmp_path)


def test_an_answer_that_breaks_off_says_whose_and_the_end_of_its_log(
    tmp_path: Path, socket_enabled: None
) -> None:
    with pytest.raises(client.ServerFailed, match="a server broke an answer off: last words"):
        FakeServer(PEER[:1]).ask(servers.PeerDialect(), ORDER, tmp_path)
    with pytest.raises(client.ServerFailed, match="a server broke an answer off: last words"):
        FakeServer(PEER[:1], is_cut=True).ask(servers.PeerDialect(), ORDER, tmp_path)


def test_a_refusal_says_what_the_server_said(tmp_path: Path, socket_enabled: None) -> None:
    fake = FakeServer([{"error": "no room"}], status="503 Service Unavailable")
    with pytest.raises(client.ServerFailed, match=r"status 503.*no room"):
        fake.ask(servers.PeerDialect(), ORDER, tmp_path)


def result(*pairs: tuple[float, float], bar: verdict.Bar | None = None) -> verdict.Result:
    made = tuple(verdict.Pair(peer=peer, ours=ours) for peer, ours in pairs)
    return verdict.Result(name="speed", unit="", setting="-np 4", pairs=made, bar=bar)


def test_the_verdict_is_the_median_of_the_pairs_ratios() -> None:
    drifting = result((100, 97), (50, 48), (10, 2))  # 0.97, 0.96, 0.2
    assert drifting.ratio == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("bar", "ratio", "is_met"),
    [
        (verdict.Bar(at_least=0.95), 0.95, True),
        (verdict.Bar(at_least=0.95), 0.9499, False),
        (verdict.Bar(at_most=1.1), 1.1, True),
        (verdict.Bar(at_most=1.1), 1.1001, False),
    ],
)
def test_a_bar_is_met_exactly_at_its_value(bar: verdict.Bar, ratio: float, is_met: bool) -> None:
    assert bar.is_met(ratio) is is_met
    assert result((1.0, ratio), bar=bar).passed is is_met


def test_the_table_marks_what_was_missed_and_nothing_without_a_bar() -> None:
    bar = verdict.Bar(at_least=0.95)
    lines = verdict.table([result((10, 5), bar=bar), result((10, 10), bar=bar), result((10, 5))]).splitlines()
    assert ["MISSED" in line for line in lines] == [False, True, False, False]
    assert ["ok" in line for line in lines] == [False, False, True, False]


@pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (0.5, 2.5), (0.95, 3.85), (1, 4.0)])
def test_quantiles_are_interpolated(share: float, expected: float) -> None:
    assert verdict.quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)
    assert verdict.quantile([7.0], share) == 7.0


def tried(title: str, makespan_s: float, ttft_s: float) -> measure.Tried:
    slots = {"slow": 1, "fast": 2, "good": 3}[title]
    run = loads.Mixed(
        makespan_s=makespan_s, tokens_per_s=1, spoken_ttft_s=(ttft_s,), spoken_done_s=(ttft_s,),
        chat_gap_s=0, documents_done_s=0, spoken_cached_tokens=0,
    )  # fmt: skip
    return measure.Tried(setting=servers.PeerSetting(slots=slots, unified=True), mixed=run)


def test_the_peer_gets_its_best_setting_for_each_figure() -> None:
    found = [tried("slow", 40, 1), tried("fast", 20, 19), tried("good", 21.9, 12)]
    assert measure.fastest(found).slots == 2
    assert measure.promptest(found).slots == 3, "the one that is far slower is no choice"


def test_prompts_have_the_promised_lengths_and_never_repeat() -> None:
    prompts = loads.Prompts(lambda text: [ord(c) for c in text])
    documents = [prompts.document(run, i).prompt_ids for run in range(3) for i in range(2)]
    assert {len(ids) for ids in documents} == {loads.DOCUMENT_TOKENS}
    assert len({ids[:8] for ids in documents}) == len(documents), "a document must not begin like another"
    assert prompts.spoken(1, 0).class_id == "voice"
    assert prompts.all_chat().spoken(1, 0).class_id == "chat"
    assert prompts.all_chat().spoken(1, 0).prompt_ids == prompts.spoken(1, 0).prompt_ids


def test_processor_times_are_read_past_a_hostile_name() -> None:
    hz = machine._TICKS_PER_S
    line = f"42 (a) b ( c) S 1 2 3 4 5 6 7 8 9 10 {3 * hz} {2 * hz} 0 0 20 0 1 0 99"
    assert machine.process_seconds(line) == 5
    assert machine.busy_seconds(f"cpu  {hz} {hz} {hz} {9 * hz} {9 * hz} 0 0 {hz} 0 0\ncpu0 1 2 3\n") == 4


def test_a_standstill_of_this_process_is_noticed() -> None:
    async def run() -> machine.Disturbance:
        async with machine.Watch() as watch:
            await asyncio.sleep(0.1)
            time.sleep(0.3)  # noqa: ASYNC251  (this is the standstill)
            await asyncio.sleep(0.1)
        return watch.disturbance

    found = asyncio.run(run())
    assert found.standstill_s >= 0.2
    assert not machine.Disturbance(foreign_share=0, standstill_s=5).is_slight
    assert machine.Disturbance(foreign_share=0, standstill_s=5).is_void
