"""Prefetching of ranges: order, limits and release."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from waiting import until

from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.io.fetcher import RangeFetcher, RangeRequest
from kerasmem.hdf5.io.ranges import Claim

KIB = 1024


class Reader:
    """Returns bytes once `allowed` is set. `begun` lists the starts of requested ranges in order."""

    def __init__(self):
        self.begun, self.ended = [], []
        self.allowed = threading.Event()

    async def read(self, start, stop):
        self.begun.append(start)
        while not self.allowed.is_set():
            await asyncio.sleep(0.001)
        self.ended.append(start)
        return memoryview(bytes([start % 251]) * (stop - start))


@pytest.fixture
def fetcher():
    made = RangeFetcher(RemoteAccess(ahead_bytes=64 * KIB))
    yield made
    made.close()


@pytest.fixture
def roomy_fetcher():
    made = RangeFetcher(RemoteAccess())
    yield made
    made.close()


def claims(fetcher, reader, starts, size):
    requests = [RangeRequest(reader, start, start + size) for start in starts]
    return requests, [Claim(fetcher, [request]) for request in requests]


def test_prefetch_keeps_order_and_byte_limit(fetcher):
    reader = Reader()
    requests, held = claims(fetcher, reader, [9, 3, 5, 1, 7, 8], 16 * KIB)
    fetcher.prefetch(requests)
    until(lambda: len(reader.begun) == 4)
    time.sleep(0.05)
    assert reader.begun == [9, 3, 5, 1]  # 64 KiB
    reader.allowed.set()
    assert bytes(fetcher.result(requests[0])) == bytes([9]) * 16 * KIB
    time.sleep(0.05)
    assert reader.begun == [9, 3, 5, 1]  # fetched, and not yet used
    held[0].release()
    until(lambda: reader.begun == [9, 3, 5, 1, 7])
    for claim in held[1:]:
        claim.release()
    until(lambda: not fetcher._held and not fetcher._active)


def test_released_ranges_are_cancelled(fetcher):
    reader = Reader()
    requests, held = claims(fetcher, reader, range(8), 32 * KIB)
    fetcher.prefetch(requests)
    until(lambda: len(reader.begun) == 2)
    for claim in reversed(held[:7]):  # those on their way last, so that no other begins meanwhile
        claim.release()
    until(lambda: reader.begun == [0, 1, 7])
    reader.allowed.set()
    assert fetcher.result(requests[7])[0] == 7 and reader.ended == [7]


def test_more_small_than_large_ranges_are_in_flight(roomy_fetcher):
    reader = Reader()
    reader.allowed.set()
    requests, _warm_up = claims(roomy_fetcher, reader, range(60), KIB)
    roomy_fetcher.prefetch(requests)
    until(lambda: len(reader.ended) == 60)
    for size, in_flight in ((KIB, 64), (1024 * KIB, 16)):
        reader = Reader()
        requests, held = claims(roomy_fetcher, reader, range(80), size)
        roomy_fetcher.prefetch(requests)
        until(lambda reader=reader, in_flight=in_flight: len(reader.begun) == in_flight)
        time.sleep(0.05)
        assert len(reader.begun) == in_flight
        for claim in held:
            claim.release()
        until(lambda: not roomy_fetcher._active)
