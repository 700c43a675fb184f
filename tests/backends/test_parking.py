"""Parking: what is forgotten when the bytes run out, and memory that is used again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.parking import Parking
from engine_service.scheduling.model import RequestId

MIB = 2**20


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def park(parking: Parking, ids: NDArray[np.int32], num_bytes: int, mark: int) -> NDArray[np.uint8]:
    data = parking.buffer(ids, num_bytes)
    assert len(data) == num_bytes
    data[:] = mark
    parking.put(ids, data)
    return data


def test_memory_of_what_is_repeated_is_used_again() -> None:
    """A request that was put back twice needs the same memory twice, a little grown."""
    parking = Parking(100 * MIB)
    first = park(parking, tokens(1, 2, 3), 8 * MIB, 1)
    place = first.ctypes.data
    again = park(parking, tokens(1, 2, 3, 4), 8 * MIB + 1000, 2)
    assert again.ctypes.data == place
    assert len(parking) == 1
    found, length = parking.best_match(tokens(1, 2, 3, 4, 5))
    assert found is not None
    assert (length, len(found.data), int(found.data.min())) == (4, 8 * MIB + 1000, 2)


def test_memory_of_what_is_forgotten_is_used_again() -> None:
    parking = Parking(20 * MIB)
    oldest = park(parking, tokens(1), 8 * MIB, 1)
    park(parking, tokens(2), 8 * MIB, 2)
    third = park(parking, tokens(3), 8 * MIB, 3)
    assert third.ctypes.data == oldest.ctypes.data
    assert [parking.best_match(tokens(i))[1] for i in (1, 2, 3)] == [0, 1, 1]


def test_prepared_memory_is_taken_first() -> None:
    parking = Parking(20 * MIB)
    parking.prepare(8 * MIB)
    prepared = parking._spare[0].ctypes.data
    assert park(parking, tokens(1), 7 * MIB, 1).ctypes.data == prepared
    parking = Parking(4 * MIB)
    parking.prepare(8 * MIB)
    assert not parking._spare, "more than may be parked at all"


def test_a_short_sequence_does_not_take_the_memory_of_a_long_one() -> None:
    parking = Parking(20 * MIB)
    parking.prepare(8 * MIB)
    park(parking, tokens(1), MIB, 1)
    assert parking._spare[0].nbytes == 8 * MIB


def reserved(parking: Parking) -> int:
    assert parking._reserved is not None
    return parking._reserved.ctypes.data


def test_reserved_memory_is_for_who_comes_back() -> None:
    parking = Parking(40 * MIB)
    parking.reserve(8 * MIB)
    place = reserved(parking)
    away = {RequestId("a")}

    def save(*ids: int, num_bytes: int, owner: str) -> int:
        data = parking.buffer(
            tokens(*ids), num_bytes, owner=RequestId(owner), is_away=lambda request_id: request_id in away
        )
        parking.put(tokens(*ids), data)
        return data.ctypes.data

    assert park(parking, tokens(1), 4 * MIB, 1).ctypes.data != place
    assert save(2, num_bytes=5 * MIB, owner="a") == place
    found, _ = parking.best_match(tokens(2, 9))
    assert found is not None
    parking.touch(found)  # by somebody who begins alike
    assert save(3, num_bytes=5 * MIB, owner="b") != place, "somebody has to come back"
    away.clear()
    assert save(4, num_bytes=8 * MIB, owner="b") == place, "whoever it was for is there again, or gone"
    assert parking.best_match(tokens(2))[1] == 0, "what was there is overwritten"
    away.add(RequestId("b"))
    assert save(4, 5, num_bytes=8 * MIB, owner="b") == place, "it grew meanwhile"
    parking.clear()
    assert save(6, num_bytes=MIB, owner="c") == place


def test_what_is_larger_than_the_reserve_is_parked_elsewhere() -> None:
    parking = Parking(40 * MIB)
    parking.reserve(8 * MIB)
    data = parking.buffer(tokens(1), 9 * MIB, owner=RequestId("a"))
    assert data.ctypes.data != reserved(parking)
    parking.put(tokens(1), data)
    assert parking.best_match(tokens(1))[1] == 1


def test_reserved_memory_counts_and_is_never_forgotten_for_others() -> None:
    parking = Parking(40 * MIB)
    parking.reserve(8 * MIB)
    parking.put(tokens(1), parking.buffer(tokens(1), 8 * MIB, owner=RequestId("a")))
    for number in range(2, 12):
        park(parking, tokens(number), 9 * MIB, number)
        held = sum(one.data.base.nbytes for one in parking._parked.values() if one.data.base is not None)
        assert held + sum(memory.nbytes for memory in parking._spare) <= 40 * MIB
    assert parking.best_match(tokens(1))[1] == 1
    parking.reserve(MIB)
    assert parking._reserved is not None
    assert parking._reserved.nbytes == 8 * MIB, "once"


def test_no_more_is_reserved_than_may_be_parked() -> None:
    parking = Parking(4 * MIB)
    parking.reserve(8 * MIB)
    assert parking._reserved is None
    assert parking.buffer(tokens(1), MIB, owner=RequestId("a")).nbytes == MIB


def test_spare_memory_counts() -> None:
    rng = np.random.default_rng(7)
    parking = Parking(30 * MIB)
    parking.prepare(6 * MIB)
    for number in range(200):
        ids = tokens(*rng.integers(0, 3, size=rng.integers(1, 5)))
        park(parking, ids, int(rng.integers(1, 12) * MIB), number % 256)
        found, length = parking.best_match(ids)
        assert found is not None
        assert length == len(ids)
        spare = sum(memory.nbytes for memory in parking._spare)
        held = sum(one.data.base.nbytes for one in parking._parked.values() if one.data.base is not None)
        assert (parking.num_bytes, parking.num_bytes + spare <= 30 * MIB) == (held, True)
        places = [m.ctypes.data for m in parking._spare]
        places += [one.data.ctypes.data for one in parking._parked.values()]
        assert len(set(places)) == len(places), "memory is in use twice"


def test_what_is_larger_than_everything_is_not_parked() -> None:
    parking = Parking(MIB)
    park(parking, tokens(1), 2 * MIB, 1)
    assert len(parking) == 0
    assert parking.num_bytes == 0


def test_bytes_that_somebody_else_made_are_parked_as_they_are() -> None:
    parking = Parking(10 * MIB)
    parking.put(tokens(1), np.arange(1000, dtype=np.int32).view(np.uint8))
    assert parking.num_bytes == 4000
