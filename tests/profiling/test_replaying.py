"""Invented events, whose peak and live set are known."""

from __future__ import annotations

from itertools import count

import pytest

from kerasmem.devices.recording import ALLOCATE, DEALLOCATE, AllocatorEvent
from kerasmem.profiling.replaying import KnownTensor, replay_step


class Recording:
    """Events of an allocator whose chunks are as large as asked for, rounded up to 256 B."""

    def __init__(self, in_use: int = 0) -> None:
        self.events: list[AllocatorEvent] = []
        self.in_use = in_use
        self.time = count(10**6, 10**6)

    def allocate(self, address, size, op="op", region="output"):
        chunk = -(-size // 256) * 256
        self.in_use += chunk
        self._add(ALLOCATE, address, size, chunk, op, region)
        return self

    def free(self, address, size):
        chunk = -(-size // 256) * 256
        self.in_use -= chunk
        self._add(DEALLOCATE, address, size, chunk, "", "")
        return self

    def _add(self, kind, address, size, chunk, op, region):
        self.events.append(
            AllocatorEvent(next(self.time), kind, "bfc", address, size, chunk, self.in_use, op, region, "[]")
        )


def test_peak_and_live_chunks():
    step = Recording().allocate(1, 1000, "a").allocate(2, 3000, "b").free(1, 1000).allocate(3, 512, "c").events
    replay = replay_step(step, is_complete=True)
    assert (replay.begin, replay.peak, replay.operation, replay.unknown) == (0, 1024 + 3072, "b", 0)
    assert [(chunk.operation, chunk.requested, chunk.allocated) for chunk in replay.live] == [
        ("a", 1000, 1024),
        ("b", 3000, 3072),
    ]
    assert [point.bytes for point in replay.points] == [0, 1024, 4096, 3072, 3584]
    assert [point.time_us for point in replay.points] == [0, 0, 1, 2, 3]


def test_a_step_that_only_frees_has_its_peak_at_its_begin():
    earlier = Recording().allocate(1, 1000, "batch").allocate(2, 500, "weight")
    step = Recording(earlier.in_use).free(1, 1000).events
    replay = replay_step(step, earlier.events, is_complete=True)
    assert (replay.peak, replay.operation) == (earlier.in_use, "")
    assert [chunk.operation for chunk in replay.live] == ["batch", "weight"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_empty_step(is_complete):
    earlier = Recording().allocate(1, 1000).events
    replay = replay_step([], earlier, is_complete=is_complete)
    assert (replay.peak, len(replay.live), len(replay.points)) == (1024, 1, 1)
    assert replay_step([]).peak == 0


def test_variables_are_known_by_their_addresses():
    earlier = Recording().allocate(1, 1000, "init").allocate(2, 64, "other")
    step = Recording(earlier.in_use).allocate(3, 1000, "assign", "temp").free(1, 1000).events
    weight = KnownTensor(1, 1000, "weights", "dense/kernel", ("net", "dense"))
    moved = KnownTensor(3, 1000, "weights", "dense/kernel", ("net", "dense"))
    replay = replay_step(step, earlier.events, [weight], [moved], is_complete=True)
    assert [chunk.tensor for chunk in replay.live] == [weight, None, moved]


def test_an_address_that_was_handed_out_again_is_another_chunk():
    step = Recording().allocate(1, 5000, "scratch").free(1, 5000).allocate(1, 800, "assign").events
    replay = replay_step(step, (), (), [KnownTensor(1, 800, "weights", "w")])
    assert [(chunk.operation, chunk.tensor) for chunk in replay.live] == [("scratch", None)]


def test_without_the_past_frees_and_holdings_tell_of_it():
    step = Recording(10_240).allocate(7, 2000, "a").free(5, 3000).events
    replay = replay_step(step, (), [KnownTensor(4, 1000, "weights", "w")])
    assert (replay.begin, replay.peak) == (10_240, 10_240 + 2048)
    assert {(chunk.requested, chunk.allocated) for chunk in replay.live} == {(1000, 1024), (3000, 3072), (2000, 2048)}
    assert replay.unknown == 10_240 - 1024 - 3072


def test_a_tensor_that_shares_memory_of_numpy_is_no_chunk():
    step = Recording(4096).allocate(7, 2000, "a").events
    weight, shared = KnownTensor(4, 3000, "weights", "w"), KnownTensor(5, 50_000, "kept", "a data set")
    small = KnownTensor(6, 1000, "kept", "a small one")
    replay = replay_step(step, (), [shared, small, weight])
    assert {chunk.tensor for chunk in replay.live} == {weight, small, None}
    assert sum(chunk.allocated for chunk in replay.live) + replay.unknown == replay.peak


def test_complete_recording_ignores_unrecorded_tensors():
    earlier = Recording().allocate(1, 1000).events
    replay = replay_step([], earlier, [KnownTensor(99, 4000, "constant", "a view")], is_complete=True)
    assert len(replay.live) == 1
    assert replay.live[0].tensor is None
