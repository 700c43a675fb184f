"""Which local day it is and when it ends. Decides nothing; days of 23 and 25 hours come from the zone."""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo


def local_day(instant: float, zone: ZoneInfo | None) -> tuple[str, float]:
    """Return the ISO date at an instant (seconds since 1970) and the seconds until that day ends (>= 0).

    zone None is the system's.
    """
    local = datetime.fromtimestamp(instant, zone)
    tomorrow = datetime.combine(local.date() + timedelta(days=1), datetime.min.time())
    # Without a zone a plain datetime is taken for the system's local time.
    midnight = tomorrow.replace(tzinfo=zone) if zone else tomorrow
    return local.date().isoformat(), max(0.0, midnight.timestamp() - instant)
