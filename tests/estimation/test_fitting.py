"""Lines through recorded allocations: invented recordings, whose sizes at any batch are known."""

from __future__ import annotations

import pytest

from kerasmem.devices.recording import ALLOCATE, DEALLOCATE, AllocatorEvent, Mark
from kerasmem.errors import KerasmemError
from kerasmem.estimation.allocator import BFCAllocator, replay
from kerasmem.estimation.probe import probing
from kerasmem.estimation.probe.fitting import (
    BATCH,
    FIRST,
    SETUP,
    STEP,
    Fit,
    Replayed,
    fit_recording,
    replay_fit,
    split_recording,
)
from kerasmem.estimation.probe.probing import _check, default_batch_sizes, probe
from kerasmem.estimation.probe.running import Answer, Run
from kerasmem.models.request import ModelRequest

# (operation, bytes whatever the batch, bytes a sample)
OPERATIONS = (("conv", 0, 40_000), ("scratch", 70_000, 0), ("dense", 1000, 4000), ("conv", 512, 80_000))


class Recording:
    """A recording being invented: one process, batch size after batch size."""

    def __init__(self):
        self.pool, self.time, self.events, self.marks, self.sizes = BFCAllocator(), 0, [], [], {}

    def mark(self, kind, run):
        self.time += 1
        self.marks.append(Mark(self.time, f"kerasmem-{kind}", run))

    def allocate(self, name, size, shape=""):
        self.time += 1
        address = self.pool.allocate(size)
        self.sizes[address] = size
        self._add(ALLOCATE, address, size, self.pool.chunk_size(address), name, shape)
        return address

    def free(self, address):
        self.time += 1
        size, chunk = self.sizes[address], self.pool.chunk_size(address)
        self.pool.free(address)
        self._add(DEALLOCATE, address, size, chunk, "", "")

    def _add(self, kind, address, size, chunk, name, shape):
        self.events.append(
            AllocatorEvent(
                self.time, kind, "bfc", address, size, chunk, self.pool.in_use, self.pool.peak, name, "", 0, shape
            )
        )


def record(batches, steps=3, extra=None):
    """Weights, then for each batch its tensor and some steps; `extra(recording, batch, run, step)` adds to a step."""
    made = Recording()
    weights = [made.allocate("weights", 300_000) for _ in range(4)]
    for run, batch in enumerate(batches, 1):
        made.mark("batch", run)
        data = made.allocate("fill", 784 * 4 * batch)
        for step in range(steps if run == 1 else 2):
            made.mark("step" if step else "first", run)
            held = [made.allocate(name, fixed + each * batch) for name, fixed, each in OPERATIONS]
            if extra is not None:
                held += extra(made, batch, run, step)
            for address in held[::2] + held[1::2]:
                made.free(address)
        made.free(data)
    assert len(weights) == 4
    return made


def fitted(batches, **options):
    made = record(batches, **options)
    return fit_recording(split_recording(made.events, made.marks), batches)


def square(made, batch, run, step):
    return [made.allocate("attention", 1000 * batch * batch)]


def test_the_parts_of_a_recording():
    made = record((24, 16), steps=2)
    parts = split_recording(made.events, made.marks)
    kinds = [(SETUP, 0), (BATCH, 1), (FIRST, 1), (STEP, 1), (BATCH, 2), (FIRST, 2), (STEP, 2)]
    assert [(part.kind, part.run) for part in parts] == kinds
    assert [len(part.events) for part in parts] == [4, 1, 8, 9, 1, 8, 9]
    keys = [key for key, _ in parts[2].keyed() if key]
    assert keys == [("conv", "", 0), ("scratch", "", 0), ("dense", "", 0), ("conv", "", 1)]


@pytest.mark.parametrize("batches", [(24, 16, 8), (24, 16)])
def test_a_batch_that_was_not_run_is_foretold_to_the_byte(batches):
    fit = fitted(batches)
    assert (fit.off, fit.unmatched) == (0, 0)
    for target in (24, 25, 128, 1000):
        truth = record((target,))
        asked = [event.requested for event in truth.events if event.kind == ALLOCATE]
        assert [size for _, size in fit.at(target) if size >= 0] == asked
        found = replay_fit(fit, target, descending=False)
        assert set(found.peaks) == {max(event.in_use for event in truth.events)}
        assert found.reserved == truth.pool.reserved
        assert found.requested == (4 * 300_000 + 784 * 4 * target + 71_512 + 124_000 * target,) * 2
        replay(BFCAllocator(found.smallest_limit), fit.at(target))


def test_what_does_not_grow_in_proportion_is_seen_by_the_third_batch():
    assert fitted((24, 16), extra=square).off == 0  # two points lie on a line
    fit = fitted((24, 16, 8), extra=square)
    share = 1000 * 24 * 24 / (1000 * 24 * 24 + 72_512 - 1000 + 124_000 * 24)
    assert fit.off == pytest.approx(share, rel=0.01)


def test_operations_without_a_counterpart_are_counted_and_guessed_by_their_shape():
    def renamed(made, batch, run, step):
        return [made.allocate(f"other_{run}", 9000 * batch, f"[{batch},2250]"), made.allocate(f"table_{run}", 5000)]

    fit = fitted((24, 16, 8), extra=renamed)
    assert fit.unmatched == pytest.approx((9000 * 24 + 5000) / (71_512 + 133_000 * 24 + 5000), rel=0.01)
    assert {9000 * 48, 5000} <= {size for _, size in fit.at(48)}


def test_an_operation_that_allocates_in_some_steps_only_is_matched():
    def sometimes(made, batch, run, step):
        return [made.allocate("mul", 2000 * batch)] if step == run % 2 else []

    fit = fitted((24, 16, 8), extra=sometimes)
    assert (fit.off, fit.unmatched) == (0, 0)
    assert 2000 * 100 in {size for _, size in fit.at(100)}


def answer(peak):
    runs = tuple(Run(batch, 100 * batch, 0, 0, (peak,), 0.1) for batch in (24, 16, 8))
    return Answer("CPU:0", "graph", 1, None, (), runs)


def test_fits_that_cannot_be_trusted_are_refused_with_a_way_out():
    def renamed(made, batch, run, step):
        return [made.allocate(f"other_{run}", 9000 * batch)]

    request = ModelRequest("m.keras", batch_size=512)
    with pytest.raises(KerasmemError, match=r"16% .* proportion .* 8, 16, 24 \(graph mode\).*measure batch 512 itself"):
        _check(fitted((24, 16, 8), extra=square), answer(1), request)
    with pytest.raises(KerasmemError, match=r"7% .* are not the same at batches 8, 16, 24"):
        _check(fitted((24, 16, 8), extra=renamed), answer(1), request)
    fit = fitted((24, 16, 8))
    with pytest.raises(KerasmemError, match="cannot be complete"):
        _check(fit, answer(1_000_000), request)
    _check(fit, answer(replay_fit(fit, 24, descending=True, with_limit=False).total), request)


def test_batch_sizes():
    assert default_batch_sizes(25) == (8, 16, 24)
    assert default_batch_sizes(100) == (12, 24, 36)
    assert default_batch_sizes(4096) == (16, 32, 48)
    assert default_batch_sizes(4096, is_xla=True) == (512, 1024, 1536)


# What a probe passes on

EVENT = AllocatorEvent(1, ALLOCATE, "bfc_cpu_allocator_for_gpu", 256, 256, 256, 256, 256)


def answered(*batches, optimizer=60):
    runs = tuple(Run(batch, 5 * batch, 0, 0, (95, 100, 110), 0.1) for batch in batches)
    return Answer("CPU:0", "graph", 30, optimizer, ("assumed",), runs)


@pytest.fixture
def outcome(monkeypatch):
    """Return what a probe says of the batch of a request, by what the process and the replay found."""

    def ask(answer, target, *, limit=105, **options):
        replayed = Replayed((95, 100, 110), (80, 90, 100), 200, limit)
        monkeypatch.setattr(probing, "run_steps", lambda request, runs, **_: answer)
        monkeypatch.setattr(probing, "read_recording", lambda folder, marks: ((EVENT,), ()))
        monkeypatch.setattr(probing, "fit_recording", lambda segments, sizes: Fit(24, (), (), (0,), 0, 0))
        monkeypatch.setattr(probing, "replay_fit", lambda *_, **__: replayed)
        return probe(ModelRequest("m.keras", batch_size=target), **options)

    return ask


def test_a_fixed_or_small_batch_is_measured_and_passed_on(outcome):
    found = outcome(answered(512), 512, is_fixed=True)
    assert (found.method, found.execution) == ("probe", "graph")
    assert (found.total, found.low, found.high) == (100, 95, 110)
    assert (found.pool.requested, found.pool.in_use, found.pool.reserved) == (None, 100, None)
    assert found.categories == {"weights": 30, "inputs": 5 * 512, "optimizer": 60}
    assert "small enough to be run itself: 3 steps" in found.notes[0] and found.notes[1] == "assumed"
    assert "optimizer" not in outcome(answered(8, optimizer=None), 8).categories


def test_what_was_foretold_is_passed_on(outcome):
    found = outcome(answered(24, 16, 8), 512)
    assert (found.total, found.low, found.high) == (100, 91, 110)
    assert found.pool.smallest_limit == 105
    assert (found.pool.requested, found.pool.in_use, found.pool.reserved) == (90, 100, 200)
    assert found.categories == {"weights": 30, "inputs": 5 * 512, "optimizer": 60}
    assert found.notes[0].startswith("run at batches 8 and 16 and 24 on CPU:0") and found.notes[1] == "assumed"
    assert outcome(answered(24, 16, 8), 512, limit=130).high == 130  # never below the limit that trains
