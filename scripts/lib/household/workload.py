"""The work of an evening: three long summaries, someone chatting, and commands spoken every few seconds.

The same plan is run under each policy: the same sentences at the same moments after the start, whether or
not earlier ones are answered. Everything goes through Home Assistant: the summaries are an automation's AI
tasks at a set time, the chat is an Assist pipeline run of a signed-in user, and the commands are spoken to
the satellites of three rooms.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from household.client import CommandFailed, Subscription
from household.documents import DOCUMENTS
from household.residence import BEDROOM, HALL, KITCHEN, SUMMARIES_AT, Household

AUTOMATION_ID: Final = "nightly_summaries"
SUMMARY_EVENT: Final = "fairhearth_demo_summary"

ANSWER_TIMEOUT_S: Final = 290.0
"""Nothing is waited for longer; first come, first served needs most of it on a slow machine."""

COMMANDS: Final = (
    "How long do I boil pasta?",
    "What rhymes with candle?",
    "Name a fruit that is red.",
    "How many cups are in a litre?",
    "What is a good tea for the evening?",
    "Say good night to the children.",
    "Which day comes after Friday?",
    "How hot should the bath be?",
    "What can I cook with two eggs?",
    "Tell me something about the moon.",
    "How do I get wax off a table?",
    "What is the capital of Norway?",
    "Which vegetable keeps longest?",
    "How often should I water basil?",
    "What is seven times eight?",
    "Give me a word for happy.",
    "How do I fold a paper boat?",
    "What does a hedgehog eat?",
    "When do swallows fly south?",
    "How long does rice take?",
    "Name a song about rain.",
    "What colour is amber?",
    "How do I sharpen a pencil?",
    "Which bird sings at night?",
)

CHATS: Final = (
    "Can you explain how a heat pump works and when it is worth having one?",
    "Tell me a story about a lighthouse keeper who could not sleep.",
    "What should I think of when I plan a vegetable garden for the first time?",
    "Describe a walk through an old town in winter.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Someone says something, at_s seconds after the summaries were started."""

    at_s: float
    text: str
    room: str | None = None  #: the satellite spoken to; None: typed by Bob


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the person noticed. Seconds from the end of the sentence."""

    arrival: Arrival
    first_word_s: float | None
    answered_s: float
    text: str


@dataclass(slots=True)
class Evening:
    """Everything that came back."""

    spoken: list[Answered] = field(default_factory=list)
    typed: list[Answered] = field(default_factory=list)
    summaries: dict[str, str] = field(default_factory=dict)  #: text by title, in the order they came
    faults: list[str] = field(default_factory=list)


def evening(num_commands: int, *, every_s: float, chats_at: Sequence[float]) -> list[Arrival]:
    """Return who says what and when."""
    rooms = (KITCHEN, BEDROOM, HALL)
    spoken = [
        Arrival(at_s=1.0 + every_s * i, text=COMMANDS[i % len(COMMANDS)], room=rooms[i % len(rooms)])
        for i in range(num_commands)
    ]
    typed = [Arrival(at_s=at_s, text=CHATS[i % len(CHATS)]) for i, at_s in enumerate(chats_at)]
    return sorted([*spoken, *typed], key=lambda arrival: arrival.at_s)


async def add_automation(home: Household) -> None:
    """Add the automation that wants the summaries, in the name of nobody."""
    tasks = [_task(document.title, document.instructions, home.task) for document in DOCUMENTS]
    automation = {
        "alias": "Nightly summaries",
        "description": "Three long summaries, started by the clock.",
        "triggers": [{"trigger": "time", "at": SUMMARIES_AT}],
        "conditions": [],
        "actions": [{"parallel": tasks}],
        "mode": "parallel",
    }
    await home.rest.post(f"/api/config/automation/config/{AUTOMATION_ID}", automation)


def _task(title: str, instructions: str, entity_id: str) -> dict[str, Any]:
    """Return the steps that have one document summarised and tell whoever listens."""
    ask = {
        "action": "ai_task.generate_data",
        "data": {"task_name": title, "entity_id": entity_id, "instructions": instructions},
        "response_variable": "summary",
    }
    tell = {"event": SUMMARY_EVENT, "event_data": {"title": title, "text": "{{ summary.data }}"}}
    return {"sequence": [ask, tell]}


async def start_summaries(home: Household) -> float:
    """Set the automation's clock to the next moments; return the loop's time at which it strikes."""
    strikes_at = math.ceil(time.time() + 1.5)
    local = datetime.fromtimestamp(strikes_at, UTC)
    moment = f"{local:%Y-%m-%d %H:%M:%S}"
    await home.socket.act("input_datetime.set_datetime", {"entity_id": SUMMARIES_AT, "datetime": moment})
    return asyncio.get_running_loop().time() + strikes_at - time.time()


async def speak(home: Household, room: str, text: str) -> Answered:
    """Say something to a satellite; raise CommandFailed where no answer came."""
    entity_id = home.satellites[room]
    response = await home.socket.act(
        "demo_satellite.say",
        {"entity_id": entity_id, "text": text},
        timeout_s=ANSWER_TIMEOUT_S,
        returns=True,
    )
    said = response[entity_id]
    return Answered(
        arrival=Arrival(at_s=0, text=text, room=room),
        first_word_s=said["first_word_s"],
        answered_s=said["answered_s"],
        text=said["text"],
    )


async def type_in(home: Household, text: str) -> Answered:
    """Type something as Bob in the Assist dialog; raise CommandFailed where no answer came."""
    loop = asyncio.get_running_loop()
    started_at, first_word_at, words, answer = loop.time(), None, 0, ""
    run = await home.bob.subscribe(
        "assist_pipeline/run",
        start_stage="intent",
        end_stage="intent",
        input={"text": text},
        pipeline=home.pipelines["chat"],
        timeout=ANSWER_TIMEOUT_S,
    )
    while (event := await run.next(ANSWER_TIMEOUT_S))["type"] != "run-end":
        data = event["data"] or {}
        if event["type"] == "error":
            raise CommandFailed("assist_pipeline/run", data["code"], data["message"])
        if event["type"] == "intent-progress" and (data.get("chat_log_delta") or {}).get("content"):
            words += 1
            first_word_at = first_word_at or loop.time()
        if event["type"] == "intent-end":
            answer = _speech(data["intent_output"]["response"])
    await run.close()
    return Answered(
        arrival=Arrival(at_s=0, text=text),
        first_word_s=None if first_word_at is None else first_word_at - started_at,
        answered_s=loop.time() - started_at,
        text=answer,
    )


def _speech(response: dict[str, Any]) -> str:
    text = str(response["speech"].get("plain", {}).get("speech", ""))
    if response["response_type"] == "error":
        raise CommandFailed("assist_pipeline/run", response["data"]["code"], text)
    return text


async def run_evening(
    home: Household, plan: Sequence[Arrival], *, on_answer: Callable[[str], None] = lambda line: None
) -> Evening:
    """Run a plan to its end; what failed is noted, not raised. on_answer is told every answer as it comes."""
    result = Evening()
    async with home.socket.events("subscribe_events", event_type=SUMMARY_EVENT) as told:
        strikes_at = await start_summaries(home)
        async with asyncio.TaskGroup() as group:
            for arrival in plan:
                group.create_task(_take_part(home, arrival, strikes_at, result, on_answer))
            group.create_task(_collect(told, result, on_answer))
    return result


async def _take_part(
    home: Household,
    arrival: Arrival,
    strikes_at: float,
    result: Evening,
    on_answer: Callable[[str], None],
) -> None:
    await asyncio.sleep(strikes_at + arrival.at_s - asyncio.get_running_loop().time())
    try:
        if arrival.room is not None:
            answered = await speak(home, arrival.room, arrival.text)
        else:
            answered = await type_in(home, arrival.text)
    except (CommandFailed, TimeoutError) as error:
        result.faults.append(f"{arrival.text!r} ({arrival.room or 'typed'}): {str(error) or 'no answer'}")
        return
    answers = result.typed if arrival.room is None else result.spoken
    answers.append(answered)
    waited = "no word" if answered.first_word_s is None else f"{answered.first_word_s:.2f} s"
    on_answer(f"{arrival.room or 'Bob types'}: {arrival.text} → {waited}: {' '.join(answered.text.split())}")


async def _collect(told: Subscription, result: Evening, on_answer: Callable[[str], None]) -> None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while len(result.summaries) < len(DOCUMENTS):
                data = (await told.next(ANSWER_TIMEOUT_S))["data"]
                result.summaries[data["title"]] = data["text"]
                on_answer(f"Summary of {data['title'].lower()}: {' '.join(data['text'].split())}")
    except TimeoutError:
        missing = sorted({document.title for document in DOCUMENTS} - result.summaries.keys())
        result.faults.append(f"no summary came of: {', '.join(missing)}")
