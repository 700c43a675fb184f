"""Home Assistant as a process on loopback: its folder, its start, its first user, its end.

The configuration loads what the demonstration needs and nothing that looks for devices in the network.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp

from household.client import Rest, WebSocket
from household.places import HASS_COMMAND, INTEGRATION, LOOPBACK, SATELLITE
from household.process import Process
from household.waiting import until

START_TIMEOUT_S: Final = 180.0
SIGN_IN_TIMEOUT_S: Final = 60.0

_CONFIGURATION: Final = """\
# Written by the demonstration; made anew at each start.
homeassistant:
  name: Fairhearth demo
api:
assist_pipeline:
automation: !include automations.yaml
config:
conversation:
diagnostics:
frontend:
history:
input_boolean: !include input_booleans.yaml
input_datetime: !include input_datetimes.yaml
logbook:
logger:
  default: warning
  logs:
    custom_components.fairhearth: info
mobile_app:
person:
recorder:
  commit_interval: 1
script: !include scripts.yaml
system_health:
websocket_api:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user that can sign in."""

    name: str
    username: str
    password: str


class HomeAssistantProcess:
    """One Home Assistant with a folder of its own; may be stopped and started again."""

    def __init__(self, folder: Path, port: int) -> None:
        """Run in a folder, which `prepare` makes."""
        self.folder = folder
        self.port = port
        self.log = (
            folder / "stderr.log"
        )  #: all starts, one after the other; home-assistant.log is the last one
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Return where the frontend is."""
        return f"http://{LOOPBACK}:{self.port}"

    def prepare(self, *, helpers: dict[str, dict[str, Any]]) -> None:
        """Make the folder anew. helpers: the content of input_booleans.yaml and so on, by file."""
        shutil.rmtree(self.folder, ignore_errors=True)
        storage = self.folder / ".storage"
        storage.mkdir(parents=True)
        (storage / "http").write_text(json.dumps(self._listening()))
        # This page of the welcome would set up integrations that go out to the internet.
        welcomed = {"version": 4, "key": "onboarding", "data": {"done": ["core_config"]}}
        (storage / "onboarding").write_text(json.dumps(welcomed))
        (self.folder / "configuration.yaml").write_text(_CONFIGURATION)
        (self.folder / "automations.yaml").write_text("[]\n")
        (self.folder / "scripts.yaml").write_text("{}\n")
        for name, content in helpers.items():
            (self.folder / f"{name}.yaml").write_text(json.dumps(content, indent=1))  # JSON is YAML
        components = self.folder / "custom_components"
        components.mkdir()
        # A package, so that no other one of that name on Python's path can take its place.
        (components / "__init__.py").write_text("")
        (components / "fairhearth").symlink_to(INTEGRATION)
        (components / "demo_satellite").symlink_to(SATELLITE)

    def _listening(self) -> dict[str, Any]:
        """Return the stored setting that keeps the web server on loopback.

        In YAML it would be a trial that ends after five minutes with a restart on all interfaces.
        """
        stable = {
            "server_port": self.port,
            "server_host": [LOOPBACK],
            "cors_allowed_origins": [],
            "login_attempts_threshold": -1,
            "ip_ban_enabled": True,
            "ssl_profile": "intermediate_v6",
            "use_x_frame_options": True,
            "created_at": datetime.now(UTC).isoformat(),
            "error": None,
            "error_message": None,
        }
        data = {"stable": stable, "pending": None, "yaml_migration_done": True}
        return {"version": 3, "minor_version": 1, "key": "http", "data": data}

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Start and wait until the web server answers; raise ProcessDied or TimeoutError."""
        self._process = await Process.start(
            "Home Assistant",
            [HASS_COMMAND, "-c", self.folder, "--log-no-color", "--skip-pip"],
            log=self.log,
        )
        await until(
            lambda: self._answers(session), bool, "Home Assistant's web server", timeout_s=START_TIMEOUT_S
        )

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        self.check()
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with session.get(f"{self.url}/manifest.json", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.stop(grace_s=30.0)
            self._process = None

    def check(self) -> None:
        """Raise ProcessDied if it ended by itself."""
        if self._process is not None:
            self._process.check()


async def onboard(session: aiohttp.ClientSession, url: str, owner: Login) -> Rest:
    """Create the first user of a new Home Assistant and finish its welcome pages; return its access."""
    client_id = f"{url}/"
    body = {
        "client_id": client_id,
        "name": owner.name,
        "username": owner.username,
        "password": owner.password,
    }
    async with session.post(f"{url}/api/onboarding/users", json={**body, "language": "en"}) as response:
        response.raise_for_status()
        code = (await response.json())["auth_code"]
    tokens = await _tokens(session, url, code)
    rest = Rest(session, url, tokens["access_token"])
    await rest.post("/api/onboarding/analytics", {})
    redirect = {"client_id": client_id, "redirect_uri": f"{client_id}?auth_callback=1"}
    await rest.post("/api/onboarding/integration", redirect)
    return await _lasting(rest)


async def sign_in(session: aiohttp.ClientSession, url: str, login: Login) -> Rest:
    """Sign a user in; return its access."""
    return await _lasting(Rest(session, url, (await sign_in_tokens(session, url, login))["access_token"]))


async def sign_in_tokens(session: aiohttp.ClientSession, url: str, login: Login) -> dict[str, Any]:
    """Sign a user in; return the tokens as a browser gets them."""
    client_id = f"{url}/"
    start = {"client_id": client_id, "handler": ["homeassistant", None], "redirect_uri": client_id}
    async with session.post(f"{url}/auth/login_flow", json=start) as response:
        response.raise_for_status()
        flow_id = (await response.json())["flow_id"]
    answer = {"client_id": client_id, "username": login.username, "password": login.password}
    async with session.post(f"{url}/auth/login_flow/{flow_id}", json=answer) as response:
        response.raise_for_status()
        result = await response.json()
    if result["type"] != "create_entry":
        raise PermissionError(f"{login.username} could not sign in: {result.get('errors')}")
    return await _tokens(session, url, result["result"])


async def _tokens(session: aiohttp.ClientSession, url: str, code: str) -> dict[str, Any]:
    form = {"client_id": f"{url}/", "grant_type": "authorization_code", "code": code}
    async with session.post(f"{url}/auth/token", data=form) as response:
        response.raise_for_status()
        return dict(await response.json())


async def _lasting(rest: Rest) -> Rest:
    """Exchange a token of half an hour for one that outlasts any demonstration."""
    connection = await WebSocket.connect(rest)
    try:
        token = await connection.call("auth/long_lived_access_token", client_name="demo", lifespan=30)
    finally:
        await connection.close()
    return Rest(rest.session, rest.url, token)


async def until_running(connection: WebSocket) -> None:
    """Wait until Home Assistant has started everything."""
    await until(
        lambda: connection.call("get_config"),
        lambda config: config["state"] == "RUNNING",
        "Home Assistant has started",
        timeout_s=START_TIMEOUT_S,
    )
