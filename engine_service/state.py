"""The state folder: what the engine itself wrote and must find again after a restart.

    ledger.0 .1      what was served: counters, quotas, totals (engine_service/engine/ledger.py)
    policy.json      the policies set through the API, the last one in force
    engine_id        who this engine is, for clients that remember it
    token            the bearer token made on the first start (mode 0600)
    tokens.json      hashes of the tokens made later (engine_service/identity)
    jobs.sqlite3     the durable jobs (engine_service/jobs)
    pairing.json     the pairing code that is open (engine_service/identity)
    residents.json   residents set through the API, in the wire's own form
    engine.lock      held by the engine that serves from this folder; says which

Decides nothing. Every file is replaced as a whole, so that a power cut leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from engine_service.errors import InvalidRequest, SettingsError
from engine_service.protocol import ResidentRequest, parse_json, parse_resident_id, parse_resident_request
from engine_service.settings import NamedResident, named

_LOGGER = logging.getLogger(__name__)

_ENGINE_ID: Final = re.compile(r"[0-9a-f]{32}")
_REMEDY: Final = "delete it to have a new one made"


class StateFolder:
    """Reads and writes the engine's own files."""

    def __init__(self, path: Path):
        """Make the folder, readable by its owner only; raise SettingsError if that cannot be."""
        self.path = path
        self.token_path = path / "token"
        self._policies_path = path / "policy.json"
        self._residents_path = path / "residents.json"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{path}: the state folder cannot be made: {error.strerror}") from None

    @contextlib.contextmanager
    def held(self, url: str) -> Iterator[None]:
        """Keep every other engine out of the folder; url says where this one serves.

        Raises SettingsError where another holds it already, naming that one, or where nothing can be written.
        The lock ends with the process, however that ends.
        """
        path = self.path / "engine.lock"
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            self._hold(handle, url)
            yield
        finally:
            os.close(handle)

    def _hold(self, handle: int, url: str) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} at {url}".encode(), 0)
        except BlockingIOError:
            other = os.pread(handle, 200, 0).decode(errors="replace") or "a process that just starts"
            raise SettingsError(
                f"{self.path}: another engine serves from this state folder: {other}; end it, or give this "
                "one a folder of its own with --state-dir"
            ) from None
        except OSError as error:
            raise SettingsError(f"{self.path}: cannot be written: {error.strerror}") from None

    def engine_id(self) -> str:
        """Return the engine's id, made at random on the first start; raise SettingsError for a damaged one.

        With another id this would be another engine to every client that remembers it, so none is made up.
        """
        path = self.path / "engine_id"
        kept = self._kept(path, secrets.token_hex(16), replaces_empty=False)[0]
        if not _ENGINE_ID.fullmatch(kept):
            raise SettingsError(
                f"{path}: is damaged, it must hold 32 hexadecimal digits; put it back from a backup, or "
                f"{_REMEDY}: Home Assistant then takes this for another engine"
            )
        return kept

    def tell_of_lost_jobs(self) -> None:
        """Log that the file of the jobs is empty, which SQLite takes for a new one."""
        path = self.path / "jobs.sqlite3"
        if _is_empty(path):
            _LOGGER.error(
                "%s is empty: the jobs that it held are lost, and none is known now. If there is a backup of "
                "it, end the engine and put it back",
                path,
            )

    def token(self) -> tuple[str, bool]:
        """Return the engine's own bearer token and whether it was made just now."""
        kept = self._kept(self.token_path, secrets.token_urlsafe(32))
        if others_may_read(self.token_path):
            with contextlib.suppress(OSError):
                self.token_path.chmod(0o600)
            _LOGGER.warning(
                "%s could be read by others and was made private; whoever read it can use the engine. For a "
                "new token, delete it and start again",
                self.token_path,
            )
        return kept

    def residents(self) -> tuple[NamedResident, ...]:
        """Return the residents kept from the API; raise SettingsError for a file that was damaged."""
        try:
            body = self._residents_path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SettingsError(f"{self._residents_path}: cannot be read: {error.strerror}") from None
        try:
            kept = parse_json(body, what="it")
            if not isinstance(kept, dict):
                raise InvalidRequest("it must be an object of resident ids")
            return tuple(
                named(parse_resident_id(key), parse_resident_request(value, what=key))
                for key, value in kept.items()
            )
        except InvalidRequest as error:
            raise SettingsError(
                f"{self._residents_path}: {error.message}; delete the file to start without it"
            ) from None

    def keep_residents(self, residents: Iterable[NamedResident]) -> None:
        """Write the residents set through the API; raise OSError if the disk does not take them."""
        kept = {
            entry.resident_id: ResidentRequest.of(entry.resident, name=entry.name).as_wire()
            for entry in residents
        }
        replace_file(self._residents_path, json.dumps(kept, ensure_ascii=False, indent=2) + "\n")

    def policies(self) -> object:
        """Return what `keep_policies` wrote, None if nothing; raise SettingsError for a damaged file."""
        try:
            return parse_json(self._policies_path.read_bytes(), what="it")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"{self._policies_path}: cannot be read: {error.strerror}") from None
        except InvalidRequest as error:
            raise self.damaged_policies(error.message) from None

    def damaged_policies(self, reason: str) -> SettingsError:
        """Return the error that names the file of policies."""
        return SettingsError(
            f"{self._policies_path}: {reason}; delete the file to go back to the settings' policy"
        )

    def keep_policies(self, message: object) -> None:
        """Write the policies set through the API; raise OSError if the disk does not take them."""
        replace_file(self._policies_path, json.dumps(message, ensure_ascii=False, indent=2) + "\n")

    def _kept(self, path: Path, fresh: str, *, replaces_empty: bool = True) -> tuple[str, bool]:
        """Return the file's content, or fresh after writing it, and whether it is fresh."""
        try:
            kept = path.read_text(encoding="ascii").strip()
            if kept or not replaces_empty:
                return kept, False
            replace_file(path, fresh + "\n")
        except FileNotFoundError:
            try:
                replace_file(path, fresh + "\n")
            except OSError as error:
                raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{path}: is damaged; {_REMEDY}") from None
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read or written: {error.strerror}") from None
        return fresh, True


def _is_empty(path: Path) -> bool:
    """Return whether there is a file with nothing in it."""
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def others_may_read(path: Path) -> bool:
    """Return whether anybody but its owner may read or write the file; False where there is none."""
    try:
        return bool(path.stat().st_mode & 0o077)
    except OSError:
        return False


def replace_file(path: Path, content: str) -> None:
    """Write a file that only its owner can read, all of it or nothing."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at path, against other processes too; raise OSError if it cannot be made."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
