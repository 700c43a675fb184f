"""The jobs of one engine in an SQLite file.

Decides what can follow what: each change of state is one statement that only works from the states before it,
so that a job ends once whatever happens around it. Every change is on disk when the call returns (WAL,
synchronous FULL). A file that SQLite finds damaged is set aside under another name, said loudly, and a fresh
one is begun. Knows no engine.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiosqlite

from engine_service.errors import IdempotencyConflict, StorageUnavailable
from engine_service.jobs.model import Job, JobState, Json, Output, TellState
from engine_service.protocol import Extension, Webhook
from engine_service.scheduling.model import ResidentId, WorkloadClass

_LOGGER = logging.getLogger(__name__)

_VERSION: Final = 3
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, key TEXT, title TEXT, state TEXT NOT NULL,
    resident TEXT NOT NULL, class TEXT NOT NULL, program TEXT, request TEXT NOT NULL,
    created_at REAL NOT NULL, started_at REAL, ended_at REAL, deadline_at REAL, keep_s REAL NOT NULL,
    attempts INTEGER NOT NULL, token_ids TEXT NOT NULL, text TEXT NOT NULL,
    result TEXT, result_sha256 TEXT, error TEXT,
    webhook TEXT, webhook_state TEXT NOT NULL DEFAULT 'waiting', webhook_tries INTEGER NOT NULL DEFAULT 0,
    model TEXT
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, created_at);
"""
_STEPS: Final = {
    1: """
ALTER TABLE jobs ADD COLUMN webhook TEXT;
ALTER TABLE jobs ADD COLUMN webhook_state TEXT NOT NULL DEFAULT 'waiting';
ALTER TABLE jobs ADD COLUMN webhook_tries INTEGER NOT NULL DEFAULT 0;
""",
    # Which model wrote an answer stands in the answer; of one that is not whole nobody knows.
    2: """
ALTER TABLE jobs ADD COLUMN model TEXT;
UPDATE jobs SET model = json_extract(result, '$.model') WHERE result IS NOT NULL;
""",
}
"""From each earlier version to the next; each step is taken as a whole or not at all."""
_COLUMNS: Final = (
    "id, owner, key, title, state, resident, class, program, request, created_at, started_at, ended_at, "
    "deadline_at, keep_s, attempts, token_ids, text, result, result_sha256, error, "
    "webhook, webhook_state, webhook_tries, model"
)
_SAME: Final = "CASE WHEN model IS NULL OR model = ?"
_OPEN: Final = "state IN ('submitted', 'running')"
_UNTOLD: Final = f"(NOT {_OPEN} AND webhook IS NOT NULL AND webhook_state = 'waiting')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """What decides when a job is begun."""

    job_id: str
    class_id: WorkloadClass
    created_at: float
    deadline_at: float | None


class JobStore:
    """Reads and writes jobs. All methods raise StorageUnavailable where the disk fails."""

    def __init__(self, connection: aiosqlite.Connection):
        """Use an open database; `JobStore.open` makes one."""
        self._db = connection

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open the file, or a fresh one where it is damaged; raise StorageUnavailable if neither works."""
        try:
            return cls(await _opened(path))
        except OSError as error:
            raise StorageUnavailable(f"{path}: the jobs cannot be opened: {error.strerror}") from None
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise StorageUnavailable(f"{path}: the jobs cannot be opened: {error}") from None
            aside = _set_aside(path)
            _LOGGER.error(
                "The jobs in %s are damaged (%s). They are set aside as %s, and none is known now.",
                path,
                error,
                aside,
            )
        try:
            return cls(await _opened(path))
        except (sqlite3.Error, OSError) as error:
            raise StorageUnavailable(f"{path}: the jobs cannot be opened: {error}") from None

    async def close(self) -> None:
        """Close the file."""
        await self._db.close()

    # --- asking ---

    async def get(self, job_id: str) -> Job | None:
        """Return the job, None if there is none."""
        found = await self._select("WHERE id = ?", (job_id,))
        return found[0] if found else None

    async def newest(
        self, *, state: JobState | None = None, resident_id: ResidentId | None = None, limit: int
    ) -> list[Job]:
        """Return the newest jobs first, all states and residents unless named."""
        return await self._select(
            "WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR resident = ?2) "
            "ORDER BY created_at DESC, id LIMIT ?3",
            (None if state is None else state.value, resident_id, limit),
        )

    async def open_jobs(self) -> list[Open]:
        """Return the jobs that have not ended, oldest first, without what they hold."""
        query = f"SELECT id, class, created_at, deadline_at FROM jobs WHERE {_OPEN} ORDER BY created_at, id"
        async with self._guarded(), self._db.execute(query) as rows:
            return [
                Open(job_id=row[0], class_id=WorkloadClass(row[1]), created_at=row[2], deadline_at=row[3])
                for row in await rows.fetchall()
            ]

    async def untold(self) -> list[str]:
        """Return the ids of the jobs whose end somebody is still to be told of, oldest first."""
        query = f"SELECT id FROM jobs WHERE {_UNTOLD} ORDER BY ended_at, id"
        async with self._guarded(), self._db.execute(query) as rows:
            return [row[0] for row in await rows.fetchall()]

    async def _select(self, where: str, values: tuple[Any, ...]) -> list[Job]:
        async with self._guarded(), self._db.execute(f"SELECT {_COLUMNS} FROM jobs {where}", values) as rows:
            return [_job(row) for row in await rows.fetchall()]

    # --- changing ---

    async def submit(self, job: Job) -> tuple[Job, bool]:
        """Keep a new job; return it and True, or the first one of the same key and False.

        Raises IdempotencyConflict where the key belongs to another order.
        """
        try:
            async with self._guarded():
                await self._db.execute(
                    f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' * 24)})", _row(job)
                )
            return job, True
        except _AlreadyThere:
            found = await self._select("WHERE owner = ? AND key = ?", (job.owner, job.idempotency_key))
        if not found:
            raise StorageUnavailable("the job could not be kept; please send it again", retry_after_s=1)
        if not found[0].is_same_order(job):
            raise IdempotencyConflict(
                f"the key {job.idempotency_key!r} belongs to another job, {found[0].job_id}; "
                "use a new key for a new request",
                param="idempotency_key",
            )
        return found[0], False

    async def begin(self, job_id: str, *, now: float, model: str) -> bool:
        """Note that the job runs on a model; return False if it has ended meanwhile.

        What another model wrote of it is given up: nobody could go on from that.
        """
        return await self._update(
            "state = 'running', attempts = attempts + 1, started_at = coalesce(started_at, ?), model = ?, "
            f"token_ids = {_SAME} THEN token_ids ELSE '[]' END, text = {_SAME} THEN text ELSE '' END",
            (now, model, model, model),
            job_id,
        )

    async def keep(self, job_id: str, output: Output) -> bool:
        """Keep what the job has written so far."""
        return await self._update("token_ids = ?, text = ?", _as_kept(output), job_id)

    async def put_back(self, job_id: str, output: Output) -> bool:
        """Let the job wait again, with what it has written."""
        return await self._update("state = 'submitted', token_ids = ?, text = ?", _as_kept(output), job_id)

    async def end(
        self,
        job_id: str,
        state: JobState,
        *,
        now: float,
        output: Output | None = None,
        result: Json | None = None,
        result_sha256: str | None = None,
        error: Json | None = None,
    ) -> bool:
        """End the job; return False if it had ended before. output None leaves what was kept."""
        kept = (None, None) if output is None else _as_kept(output)
        return await self._update(
            "state = ?, ended_at = ?, result = ?, result_sha256 = ?, error = ?, "
            "token_ids = coalesce(?, token_ids), text = coalesce(?, text)",
            (state.value, now, _json(result), result_sha256, _json(error), *kept),
            job_id,
        )

    async def note_told(self, job_id: str, state: TellState, *, tries: int) -> None:
        """Note how telling the job's webhook went."""
        async with self._guarded():
            await self._db.execute(
                "UPDATE jobs SET webhook_state = ?, webhook_tries = ? WHERE id = ?",
                (state.value, tries, job_id),
            )

    async def put_all_back(self) -> int:
        """Let every job wait again that ran when the engine ended; return how many."""
        async with self._guarded():
            cursor = await self._db.execute("UPDATE jobs SET state = 'submitted' WHERE state = 'running'")
        return cursor.rowcount

    async def forget_old(self, *, now: float) -> int:
        """Delete ended jobs that were kept long enough and are told of; return how many."""
        async with self._guarded():
            cursor = await self._db.execute(
                f"DELETE FROM jobs WHERE NOT {_OPEN} AND NOT {_UNTOLD} AND ended_at + keep_s < ?", (now,)
            )
        return cursor.rowcount

    async def _update(self, changes: str, values: Iterable[Any], job_id: str) -> bool:
        async with self._guarded():
            cursor = await self._db.execute(
                f"UPDATE jobs SET {changes} WHERE id = ? AND {_OPEN}", (*values, job_id)
            )
        return cursor.rowcount == 1

    @asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        """Translate what SQLite complains about."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise _AlreadyThere from None
        except sqlite3.Error as error:
            _LOGGER.error("The jobs cannot be read or written: %s", error)
            raise StorageUnavailable(
                f"the engine cannot read or write its jobs: {error}", retry_after_s=30
            ) from None


class _AlreadyThere(Exception):
    """A row of the same id or key exists."""


# --- the file ---


async def _opened(path: Path) -> aiosqlite.Connection:
    # The state folder is its owner's; the file is too, in case it was moved elsewhere.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    # isolation_level None: every statement is a transaction of its own, on disk when it returns.
    connecting: Any = aiosqlite.connect(path, isolation_level=None)
    # Whoever forgets to close, or fails before, must not keep the process from ending: what is answered is on
    # disk already. The thread is the connection itself before aiosqlite 0.22.
    getattr(connecting, "_thread", connecting).daemon = True
    connection: aiosqlite.Connection = await connecting
    try:
        await connection.execute("PRAGMA journal_mode = WAL")
        await connection.execute("PRAGMA synchronous = FULL")
        async with connection.execute("PRAGMA quick_check") as rows:
            if (verdict := await rows.fetchone()) is None or verdict[0] != "ok":
                raise sqlite3.DatabaseError(f"malformed: {verdict[0] if verdict else 'no verdict'}")
        async with connection.execute("PRAGMA user_version") as rows:
            version = await rows.fetchone()
        if version is not None and version[0] > _VERSION:
            raise sqlite3.OperationalError(f"written by a later version ({version[0]}); update the engine")
        for step in range(version[0] if version and version[0] else _VERSION, _VERSION):
            await connection.executescript(f"BEGIN; {_STEPS[step]} PRAGMA user_version = {step + 1}; COMMIT;")
        await connection.executescript(_SCHEMA)
        await connection.execute(f"PRAGMA user_version = {_VERSION}")
        await connection.execute("SELECT " + _COLUMNS + " FROM jobs LIMIT 1")
    except BaseException:
        await connection.close()
        raise
    return connection


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the content is at fault, not the disk, its rights or another process."""
    return not isinstance(error, sqlite3.OperationalError)


def _set_aside(path: Path) -> Path:
    """Move the database and what belongs to it away; return the new name. Raises StorageUnavailable."""
    aside = path.with_name(
        f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06d}"
    )
    try:
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise StorageUnavailable(f"{path}: is damaged and cannot be moved: {error.strerror}") from None
    return aside


def _json(message: Json | None) -> str | None:
    return None if message is None else json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def _as_kept(output: Output) -> tuple[str, str]:
    return json.dumps(output.token_ids, separators=(",", ":")), output.text


def _row(job: Job) -> tuple[Any, ...]:
    who = job.who
    return (
        *(job.job_id, job.owner, job.idempotency_key, job.title, job.state.value),
        *(who.resident_id, who.class_id.value, who.program_id, _json(job.request)),
        *(job.created_at, job.started_at, job.ended_at, job.deadline_at, job.keep_s, job.attempts),
        *_as_kept(job.output),
        *(_json(job.result), job.result_sha256, _json(job.error)),
        None if job.webhook is None else _json(job.webhook.as_wire()),
        *(job.webhook_state.value, job.webhook_tries, job.model),
    )


def _job(row: Any) -> Job:
    (job_id, owner, key, title, state, resident, class_id, program, request, *rest) = row
    (created_at, started_at, ended_at, deadline_at, keep_s, attempts, ids, text, *rest) = rest
    (result, digest, error, webhook, webhook_state, webhook_tries, model) = rest
    return Job(
        job_id=job_id,
        owner=owner,
        idempotency_key=key,
        title=title,
        state=JobState(state),
        who=Extension(resident_id=ResidentId(resident), class_id=WorkloadClass(class_id), program_id=program),
        request=json.loads(request),
        created_at=created_at,
        started_at=started_at,
        ended_at=ended_at,
        deadline_at=deadline_at,
        keep_s=keep_s,
        attempts=attempts,
        output=Output(token_ids=tuple(json.loads(ids)), text=text),
        result=None if result is None else json.loads(result),
        result_sha256=digest,
        error=None if error is None else json.loads(error),
        webhook=None if webhook is None else Webhook(**json.loads(webhook)),
        webhook_state=TellState(webhook_state),
        webhook_tries=webhook_tries,
        model=model,
    )
