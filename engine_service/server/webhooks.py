"""Posts what became of a job to its webhook: one message, no redirects, only to hosts of the settings.

Decides what such a message holds, and how the receiver can know that it is ours and not an old one: a
signature over the time and the body, where the settings have a secret. Sources: docs/wire.md; RFC 2104.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Collection
from typing import Any, Final

import aiohttp

from engine_service import __version__
from engine_service.jobs.model import Job
from engine_service.jobs.teller import MayNotTellError, NotToldError, Tell
from engine_service.server.replies import job_body
from engine_service.server.streaming import dumps

ANSWER_S: Final = 10.0
"""Longest time the receiver may take (seconds)."""
TIMESTAMP: Final = "X-Fairhearth-Timestamp"
SIGNATURE: Final = "X-Fairhearth-Signature"


def message_of(job: Job) -> dict[str, Any]:
    """Return what is told of a job: as in a list, with what it wrote only if that was asked for."""
    is_whole = job.webhook is not None and job.webhook.with_result
    return {"event": "job", "job": job_body(job, eta_s=None, is_whole=is_whole)}


def signature_of(secret: str, timestamp: str, body: bytes) -> str:
    """Return what proves that whoever knows the secret sent the body at that time (seconds since 1970)."""
    signed = timestamp.encode("ascii") + b"." + body
    return "sha256=" + hmac.new(secret.encode("ascii"), signed, hashlib.sha256).hexdigest()


def teller_for(hosts: Collection[str], *, secret: str | None = None) -> Tell:
    """Return how jobs are told: only to these hosts, signed where there is a secret (ASCII)."""

    async def tell(job: Job) -> None:
        webhook = job.webhook
        if webhook is None or not webhook.goes_to(hosts):
            raise MayNotTellError("the host is not among server.webhook_hosts any more")
        headers = {"Content-Type": "application/json", "User-Agent": f"fairhearth/{__version__}"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        body = dumps(message_of(job)).encode()
        if secret is not None:
            headers[TIMESTAMP] = str(int(time.time()))
            headers[SIGNATURE] = signature_of(secret, headers[TIMESTAMP], body)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
                http.post(webhook.url, data=body, allow_redirects=False) as response,
            ):
                if not 200 <= response.status < 300:
                    raise NotToldError(f"it answered with status {response.status}")
        except TimeoutError:
            raise NotToldError(f"it did not answer within {ANSWER_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NotToldError(f"it cannot be reached ({type(error).__name__})") from None

    return tell
