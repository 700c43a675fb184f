"""Who lives in the demonstration's household, and how it is set up: by the dialogs a person would use.

Two residents and whoever visits. Alice is known by the satellite in the kitchen, Bob by everything in the
bedroom, and who speaks in the hall is a guest. Work that nobody asked for by name belongs to the house.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp

from household import flows
from household.client import Rest, WebSocket
from household.homeassistant import HomeAssistantProcess, Login, onboard, sign_in, until_running

ALICE: Final = Login(name="Alice", username="alice", password="hearth-and-home")
BOB: Final = Login(name="Bob", username="bob", password="fair-is-fair")

KITCHEN, BEDROOM, HALL = "Kitchen", "Bedroom", "Hall"
ROOMS: Final = (KITCHEN, BEDROOM, HALL)

VOICE_PROMPT: Final = "You are the voice of this home. Answer in one short sentence."
CHAT_PROMPT: Final = "You are a friendly assistant. Explain at length, with examples."


def _examples() -> str:
    lines = ["Answer every command with a tool call."]
    for lamp in ("Porch lamp", "Kitchen lamp"):
        for way in ("On", "Off"):
            call = {"name": f"intent__HassTurn{way}", "arguments": {"name": lamp}}
            lines += [f"Turn {way.lower()} the {lamp.lower()}.", json.dumps(call)]
    return "\n".join(lines)


CONTROL_PROMPT: Final = _examples()

VOICE_TOKENS: Final = 16
CHAT_TOKENS: Final = 160
SUMMARY_TOKENS: Final = 256

SUMMARIES_AT: Final = "input_datetime.nightly_summaries"
HELPERS: Final[dict[str, dict[str, Any]]] = {
    "input_booleans": {
        "kitchen_lamp": {"name": "Kitchen lamp", "icon": "mdi:ceiling-light"},
        "porch_lamp": {"name": "Porch lamp", "icon": "mdi:outdoor-lamp"},
    },
    "input_datetimes": {
        "nightly_summaries": {"name": "Nightly summaries", "has_date": True, "has_time": True}
    },
}
"""What configuration.yaml includes, by file."""

RESIDENTS: Final = ("alice", "bob", "guest", "house")


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """A household that is set up: how to reach it and what its things are called."""

    rest: Rest  #: as Alice, who administrates
    socket: WebSocket  #: as Alice
    bob_rest: Rest  #: as Bob
    bob: WebSocket  #: as Bob
    entry_id: str
    subentry_ids: dict[str, str]  #: by title: the agents, the task, the residents
    entity_ids: dict[tuple[str, str], str]  #: Fairhearth's, by (platform, unique id)
    satellites: dict[str, str]  #: entity id by room
    pipelines: dict[str, str]  #: id by name: voice, chat

    def agent(self, title: str) -> str:
        """Return the entity id of a conversation agent."""
        return self.entity_ids["conversation", self.subentry_ids[title]]

    @property
    def task(self) -> str:
        """Return the entity id of the AI task."""
        return self.entity_ids["ai_task", self.subentry_ids["Summaries"]]

    def resident_sensor(self, resident: str, key: str) -> str:
        """Return the entity id of a resident's sensor."""
        return self.entity_ids["sensor", f"{self._resident_key(resident)}_{key}"]

    def engine_entity(self, platform: str, key: str) -> str:
        """Return the entity id of one of the engine's own entities."""
        return self.entity_ids[platform, f"{self.entry_id}_{key}"]

    def _resident_key(self, resident: str) -> str:
        if resident in ("guest", "house"):
            return f"{self.entry_id}_{resident}"
        return self.subentry_ids[resident.capitalize()]

    async def state(self, entity_id: str) -> str:
        """Return the state of an entity."""
        return str((await self.rest.get(f"/api/states/{entity_id}"))["state"])

    async def reconnected(self) -> Household:
        """Return the household with new connections, once a restarted Home Assistant is up."""
        socket = await WebSocket.connect(self.rest)
        await until_running(socket)
        return replace(self, socket=socket, bob=await WebSocket.connect(self.bob_rest))

    async def close(self) -> None:
        """Close the connections."""
        await self.socket.close()
        await self.bob.close()


async def set_up(
    session: aiohttp.ClientSession, home: HomeAssistantProcess, engine_url: str, engine_token: str
) -> Household:
    """Turn a Home Assistant that was never used into the household."""
    rest = await onboard(session, home.url, ALICE)
    socket = await WebSocket.connect(rest)
    await until_running(socket)
    await _add_person(socket, BOB)
    areas = {room: (await _area(socket, room))["area_id"] for room in ROOMS}
    satellites = await _add_satellites(rest, socket, areas)
    entry_id = await _add_engine(rest, socket, engine_url, engine_token, satellites, areas)
    subentry_ids = {item["title"]: item["subentry_id"] for item in await flows.subentries(socket, entry_id)}
    wanted = {("conversation", subentry_ids[title]) for title in ("Voice", "Chat")}
    wanted |= {("ai_task", subentry_ids["Summaries"])}
    wanted |= {("sensor", f"{subentry_ids[name]}_tokens_served") for name in ("Alice", "Bob")}
    await flows.until_entry(rest, "fairhearth")
    entity_ids = await flows.until_entities(socket, "fairhearth", wanted)
    pipelines = {
        title.lower(): await _add_pipeline(socket, title, entity_ids["conversation", subentry_ids[title]])
        for title in ("Voice", "Chat")
    }
    await socket.call("assist_pipeline/pipeline/set_preferred", pipeline_id=pipelines["voice"])
    bob_rest = await sign_in(session, home.url, BOB)
    return Household(
        rest=rest,
        socket=socket,
        bob_rest=bob_rest,
        bob=await WebSocket.connect(bob_rest),
        entry_id=entry_id,
        subentry_ids=subentry_ids,
        entity_ids=entity_ids,
        satellites=satellites,
        pipelines=pipelines,
    )


async def _add_person(socket: WebSocket, login: Login) -> None:
    """Add a second user who may live here but not administrate."""
    user = (await socket.call("config/auth/create", name=login.name, group_ids=["system-users"]))["user"]
    await socket.call(
        "config/auth_provider/homeassistant/create",
        user_id=user["id"],
        username=login.username,
        password=login.password,
    )
    await socket.call("person/create", name=login.name, user_id=user["id"])


async def _area(socket: WebSocket, name: str) -> dict[str, Any]:
    """Return an area; onboarding has created some."""
    for area in await socket.call("config/area_registry/list"):
        if area["name"] == name:
            return dict(area)
    return dict(await socket.call("config/area_registry/create", name=name))


async def _add_satellites(rest: Rest, socket: WebSocket, areas: dict[str, str]) -> dict[str, str]:
    """Put one satellite into each room; return their entity ids."""
    found = {}
    for room in ROOMS:
        entry_id = (await flows.add_entry(rest, "demo_satellite", {"name": f"{room} satellite"}))["entry_id"]
        key = ("assist_satellite", entry_id)
        found[room] = (await flows.until_entities(socket, "demo_satellite", {key}))[key]
        registered = await socket.call("config/entity_registry/get", entity_id=found[room])
        await socket.call(
            "config/device_registry/update", device_id=registered["device_id"], area_id=areas[room]
        )
    return found


async def _add_engine(
    rest: Rest,
    socket: WebSocket,
    url: str,
    token: str,
    satellites: dict[str, str],
    areas: dict[str, str],
) -> str:
    """Connect the engine, shape what came with it, and add the residents."""
    entry_id = str((await flows.add_entry(rest, "fairhearth", {"url": url, "token": token}))["entry_id"])
    voice: dict[str, Any] = {
        "name": "Voice",
        "prompt": VOICE_PROMPT,
        "max_tokens": VOICE_TOKENS,
        "temperature": 0,
    }
    chat: dict[str, Any] = {
        "name": "Chat",
        "prompt": CHAT_PROMPT,
        "max_tokens": CHAT_TOKENS,
        "temperature": 0,
    }
    task: dict[str, Any] = {"name": "Summaries", "max_tokens": SUMMARY_TOKENS, "temperature": 0}
    alice = {"name": "Alice", "person": "person.alice", "satellites": [satellites[KITCHEN]]}
    bob = {"name": "Bob", "person": "person.bob", "areas": [areas[BEDROOM]]}
    defaults = {
        item["subentry_type"]: item["subentry_id"] for item in await flows.subentries(socket, entry_id)
    }
    await flows.until_entry(rest, "fairhearth")
    for kind, answers in (("conversation", voice), ("ai_task_data", task)):
        await flows.change_subentry(rest, entry_id, kind, defaults[kind], answers)
        await _settled(rest)
    for kind, answers in (("conversation", chat), ("resident", alice), ("resident", bob)):
        await flows.add_subentry(rest, entry_id, kind, answers)
        await _settled(rest)
    return entry_id


async def _settled(rest: Rest) -> None:
    """Wait for the reload that a changed subentry sets off."""
    await asyncio.sleep(0.3)
    await flows.until_entry(rest, "fairhearth")


async def _add_pipeline(socket: WebSocket, name: str, agent: str) -> str:
    """Add an Assist pipeline that leaves everything to an agent; return its id."""
    nothing: dict[str, Any] = dict.fromkeys(
        [
            *("stt_engine", "stt_language", "tts_engine", "tts_language", "tts_voice"),
            *("wake_word_entity", "wake_word_id"),
        ]
    )
    created = await socket.call(
        "assist_pipeline/pipeline/create",
        name=name,
        conversation_engine=agent,
        conversation_language="en",
        language="en",
        **nothing,
    )
    return str(created["id"])


async def add_control_agent(home: Household) -> str:
    """Add an agent that may switch the lamps, unless it is there; return its entity id.

    A small model does as the examples in its prompt do, so each command it should understand is there once.
    """
    await home.socket.call(
        "homeassistant/expose_entity",
        assistants=["conversation"],
        entity_ids=[f"input_boolean.{name}" for name in HELPERS["input_booleans"]],
        should_expose=True,
    )
    answers = {
        "name": "Control",
        "prompt": CONTROL_PROMPT,
        "llm_hass_api": ["assist"],
        "max_tokens": 64,
        "temperature": 0,
    }

    async def found() -> list[str]:
        subentries = await flows.subentries(home.socket, home.entry_id)
        return [item["subentry_id"] for item in subentries if item["title"] == answers["name"]]

    if not await found():
        await flows.add_subentry(home.rest, home.entry_id, "conversation", answers)
        await _settled(home.rest)
    (subentry_id,) = await found()
    key = ("conversation", subentry_id)
    return (await flows.until_entities(home.socket, "fairhearth", {key}))[key]
