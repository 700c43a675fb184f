"""TLS: a certificate of one's own making is served, renewed while serving, refused by name where it is wrong.

The certificates in `tls/` are for localhost and 127.0.0.1, good from 2020 for a hundred years, and
are of no use anywhere else.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine_service.errors import SettingsError
from engine_service.server.tls import own_client_context, server_context
from engine_service.settings import load
from tests.cli.process import TOKEN, command, run

FILES = Path(__file__).parent / "tls"
SETTINGS = '[server]\nport = 0\ntls_certificate = "engine.pem"\ntls_key = "engine.key"\n'
SIMULATED = ("serve", "--backend", "simulated")
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with certificates and settings that use the first of them."""
    for path in FILES.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "fairhearth.toml").write_text(SETTINGS, encoding="utf-8")
    return tmp_path


def trusting(certificate: Path) -> aiohttp.ClientSession:
    """Return a client that trusts this certificate, for the names in it, and no other."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificate), force_close=True)
    return aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {TOKEN}"})


async def health(home: Path, name: str, url: str) -> dict[str, Any]:
    async with trusting(home / name) as http, http.get(f"{url}/health") as response:
        body: dict[str, Any] = await response.json()
        return body


async def test_an_engine_with_a_certificate_answers_whom_trusts_it_and_only_by_https(home: Path) -> None:
    async with command(home, *SIMULATED) as process:
        url = await process.ready()
        assert url.startswith("https://127.0.0.1:")
        async with trusting(home / "engine.pem") as http:
            async with http.post(f"{url}/v1/chat/completions", json=HELLO) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 4
            async with http.post(f"{url}/v1/chat/completions", json=HELLO | {"stream": True}) as response:
                assert (await response.text()).rstrip().endswith("data: [DONE]")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await health(home, "other.pem", url)
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(url.replace("https:", "http:") + "/health")
        assert (await health(home, "engine.pem", url))["status"] == "ok"


async def test_programs_on_the_machine_itself_trust_the_engines_own_certificate(home: Path) -> None:
    async with command(home, *SIMULATED) as process:
        port = (await process.ready()).rpartition(":")[2]
        settings = home / "fairhearth.toml"
        settings.write_text(SETTINGS.replace("port = 0", f"port = {port}"), encoding="utf-8")
        code, out, err = await run(home, "top", "--once")
        assert (code, err) == (0, "")
        assert "guest" in out.lower()
        _, out, _ = await run(home, "doctor", "--json")
    found = {finding["about"]: finding for finding in json.loads(out)["findings"]}
    assert "is served by fairhearth" in found["port"]["what"]
    assert found["encryption"]["grade"] == "good"


async def test_a_renewed_certificate_is_taken_over_on_a_hangup_and_a_wrong_one_is_not(home: Path) -> None:
    async with command(home, *SIMULATED) as process:
        url = await process.ready()
        shutil.copy(home / "other.pem", home / "engine.pem")  # its key is not there yet
        process.signal(signal.SIGHUP)
        line = b""
        async with asyncio.timeout(30):
            while b"stay as they were" not in line:
                line = await process.error_line()
        assert b"is not the key of the certificate" in line
        assert await health(FILES, "engine.pem", url)
        shutil.copy(home / "other.key", home / "engine.key")
        process.signal(signal.SIGHUP)
        async with asyncio.timeout(30):
            while b"read anew" not in line:
                line = await process.error_line()
        assert await health(FILES, "other.pem", url)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await health(FILES, "engine.pem", url)
        process.signal(signal.SIGTERM)
        assert (await process.end())[0] == 0


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("missing.pem", "engine.key", ["tls_certificate", "missing.pem", "No such file"]),
        (".", "engine.key", ["tls_certificate", "Is a directory"]),
        ("engine.key", "engine.key", ["tls_certificate", "holds no certificate"]),
        ("engine.pem", "missing.key", ["tls_key", "missing.key", "No such file"]),
        ("engine.pem", "engine.pem", ["tls_key", "holds no private key"]),
        ("engine.pem", None, ["tls_key", "engine.pem", "holds no private key"]),
        ("engine.pem", "other.key", ["tls_key", "other.key", "is not the key of the certificate"]),
        ("damaged.pem", "engine.key", ["tls_certificate", "damaged.pem", "cannot be used"]),
        ("engine.pem", "encrypted.key", ["tls_key", "encrypted.key", "is encrypted"]),
    ],
)
async def test_a_certificate_that_cannot_be_used_stops_the_start_and_is_named(
    home: Path, certificate: str, key: str | None, words: list[str]
) -> None:
    middle = (home / "engine.pem").read_text(encoding="ascii").replace("\nM", "\n!", 40)
    (home / "damaged.pem").write_text(middle, encoding="ascii")
    lines = [f'tls_certificate = "{certificate}"'] + ([f'tls_key = "{key}"'] if key else [])
    (home / "fairhearth.toml").write_text("[server]\n" + "\n".join(lines), encoding="utf-8")
    with pytest.raises(SettingsError) as raised:
        server_context(load(home / "fairhearth.toml", environment={}).server)
    for word in words:
        assert word in raised.value.message
    if certificate == "missing.pem":
        code, out, err = await run(home, *SIMULATED)
        assert (code, out) == (2, "")
        assert (
            err
            == "fairhearth: server.tls_certificate: missing.pem cannot be read: No such file or directory\n"
        )


def test_a_key_without_a_certificate_is_refused(home: Path) -> None:
    (home / "fairhearth.toml").write_text('[server]\ntls_key = "engine.key"\n', encoding="utf-8")
    with pytest.raises(SettingsError, match=r"tls_key is of no use without server\.tls_certificate"):
        load(home / "fairhearth.toml", environment={})


def test_one_file_may_hold_certificate_and_key(home: Path) -> None:
    both = (home / "engine.pem").read_bytes() + (home / "engine.key").read_bytes()
    (home / "both.pem").write_bytes(both)
    (home / "fairhearth.toml").write_text('[server]\ntls_certificate = "both.pem"\n', encoding="utf-8")
    settings = load(home / "fairhearth.toml", environment={}).server
    assert settings.scheme == "https"
    assert server_context(settings) is not None
    assert own_client_context(settings) is not None


def test_without_a_certificate_there_is_no_tls(tmp_path: Path) -> None:
    (tmp_path / "fairhearth.toml").write_text("", encoding="utf-8")
    settings = load(tmp_path / "fairhearth.toml", environment={}).server
    assert (settings.scheme, server_context(settings), own_client_context(settings)) == ("http", None, None)
