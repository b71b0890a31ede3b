"""What a real process's allocator did, read from its recording and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import json_of
from recordings import check_complete

from kerasmem.devices.recording import ALLOCATE, read_recording
from kerasmem.errors import InputError
from kerasmem.estimation.allocator import BFCAllocator

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A process that trained three steps, recorded from its start: the steps' peaks, the events and the marks."""
    folder = tmp_path_factory.mktemp("profile")
    peaks = json_of(SUPPORT / "recorded.py", f"{SUPPORT}/small_models.py:convnet", 16, folder)
    return peaks, *read_recording(folder, "kerasmem-")


def test_the_simulation_hands_out_the_chunks_that_tensorflow_did(recorded):
    _, events, _ = recorded
    pool, handles, wrong = BFCAllocator(descending=True), {}, 0
    for event in events:
        if event.kind == ALLOCATE:
            pool.next_address = event.address
            handles[event.address] = pool.allocate(event.requested)
            pool.next_address = None
            wrong += (handles[event.address], pool.used[handles[event.address]][0]) != (
                event.address,
                event.allocated,
            )
        else:
            pool.free(handles.pop(event.address))
        assert pool.in_use == event.in_use
    assert wrong == 0
    assert len(events) > 500


def test_the_recording_is_complete_and_in_order(recorded):
    _, events, _ = recorded
    assert check_complete(events) == 0
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert {event.allocator for event in events} == {"bfc_cpu_allocator_for_gpu"}
    assert all(event.requested <= event.allocated for event in events)


def test_marks_divide_the_recording_into_steps(recorded):
    peaks, events, marks = recorded
    begins = [mark.time for mark in marks]
    steps = [
        [event for event in events if begin <= event.time < end]
        for begin, end in zip(begins, [*begins[1:], events[-1].time + 1], strict=True)
    ]
    assert [max(event.in_use for event in step) for step in steps] == peaks
    shapes = {event.shape for event in steps[0] if "eyes" in event.op and event.region == "output"}
    assert any(shape.startswith("[16,22,22,16]") for shape in shapes)
    sizes = {event.requested for event in steps[0] if event.shape == "[16,22,22,16]"}
    assert 16 * 22 * 22 * 16 * 4 in sizes


def test_a_folder_without_a_recording_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"was the profiler stopped"):
        read_recording(tmp_path, "kerasmem-")
