"""What a real process's allocator did, read from its recording and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import check_complete

from kerasmem.devices.recording import ALLOCATE, read_recording
from kerasmem.errors import InputError
from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.probe.fitting import FIRST, STEP, split_recording
from kerasmem.estimation.probe.running import run_steps
from kerasmem.models.request import ModelRequest

MODELS = Path(__file__).parents[1] / "support" / "small_models.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A process that trained three steps, recorded from its start."""
    folder = tmp_path_factory.mktemp("profile")
    answer = run_steps(ModelRequest(f"{MODELS}:convnet"), [(16, 3)], folder=folder, timeout=300)
    return answer, folder, *read_recording(folder, "kerasmem-")


def test_the_simulation_hands_out_the_chunks_that_tensorflow_did(recorded):
    _, _, events, _ = recorded
    pool, handles, wrong = BFCAllocator(descending=True), {}, 0
    for event in events:
        if event.kind == ALLOCATE:
            pool.next_address = event.address
            handles[event.address] = pool.allocate(event.requested)
            pool.next_address = None
            wrong += (handles[event.address], pool.chunk_size(handles[event.address])) != (
                event.address,
                event.allocated,
            )
        else:
            pool.free(handles.pop(event.address))
        assert pool.in_use == event.in_use
    assert wrong == 0
    assert len(events) > 500


def test_the_recording_is_complete_and_in_order(recorded):
    _, _, events, _ = recorded
    assert check_complete(events) == 0
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert {event.allocator for event in events} == {"bfc_cpu_allocator_for_gpu"}
    assert all(event.requested <= event.allocated for event in events)


def test_marks_divide_it_into_the_steps_whose_peaks_were_measured(recorded):
    answer, _, events, marks = recorded
    assert [mark.name for mark in marks] == ["kerasmem-batch", "kerasmem-first", *["kerasmem-step"] * 3]
    steps = [part for part in split_recording(events, marks) if part.kind == STEP]
    assert [max(event.in_use for event in part.events) for part in steps] == list(answer.runs[0].peaks)


def test_events_say_what_they_are_for(recorded):
    _, _, events, marks = recorded
    first = next(part for part in split_recording(events, marks) if part.kind == FIRST)
    shapes = {event.shape for event in first.events if "eyes" in event.op and event.region == "output"}
    assert any(shape.startswith("[16,22,22,16]") for shape in shapes)
    # Memory of this recording is of the size that the shapes say.
    sizes = {event.requested for event in first.events if event.shape == "[16,22,22,16]"}
    assert 16 * 22 * 22 * 16 * 4 in sizes


def test_a_folder_without_a_recording_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"was the profiler stopped"):
        read_recording(tmp_path, "kerasmem-")
