"""The child process of `kerasmem profile`: trains real steps under TensorFlow's profiler and divides up one of them.

The recording begins before the model is made, so that every chunk that is live in the step is known. Run by
`kerasmem.estimation.measuring`, never imported for its side effects.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from kerasmem.devices.recording import ALLOCATE, AllocatorEvent, Mark, of_device, read_recording, start_recording
from kerasmem.errors import KerasmemError
from kerasmem.estimation.allocator import BFCAllocator
from kerasmem.estimation.probe.running import measured_notes
from kerasmem.estimation.probe.worker import Run, TensorFlowSession
from kerasmem.estimation.report import MemoryReport
from kerasmem.estimation.xla import XlaRefused, compile_plan
from kerasmem.models.op_names import Attribution, NotedScopes, outside_scopes, scopes_noted
from kerasmem.models.own_step import optimizers_of
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import trace_step
from kerasmem.profiling.assembling import assemble
from kerasmem.profiling.known_tensors import known_tensors, tensors_of_model, tensors_of_python
from kerasmem.profiling.naming import Namer
from kerasmem.profiling.replaying import KnownTensor, replay_step
from kerasmem.profiling.results import ProfiledLayer, ProfileSettings, StepProfile

Contents = dict[int, tuple[tuple[int, str], ...]]

MARKS = "kerasmem-"  # in the recording
STEP_MARK, END_MARK = MARKS + "step", MARKS + "end"
WARM_UP_STEPS = 2  # beside the first, which sets things up
SECONDS = 120.0  # after which no further step is begun


def work(data: dict[str, Any]) -> dict[str, Any]:
    """Train the steps that were asked for, and return the profile of the one with the median peak.

    Args:
        data: `request` (a `StepSpec`), `runs` (one: batch size and steps), and `planned`: an estimate by the
            formula, whose model, settings and layers the profile takes over.
    """
    import tensorflow as tf

    batch_size, steps = data["runs"][0]
    with tempfile.TemporaryDirectory(prefix="kerasmem-profile-") as folder:
        start_recording(folder)
        session = _ProfiledSession(StepSpec.from_dict(data["request"]))
        run = session.run(batch_size, steps + WARM_UP_STEPS, seconds=SECONDS)
        tf.profiler.experimental.stop()
        events, marks = read_recording(folder, MARKS)
    return session.profile(data["planned"], run, of_device(events, session.device), marks).to_dict()


class _ProfiledSession(TensorFlowSession):
    """Steps that are recorded one by one, with the addresses of known tensors before and after each."""

    def __init__(self, request: StepSpec) -> None:
        super().__init__(request)
        self.noted = NotedScopes()
        self.is_warm = False
        self.known: list[tuple[list[KnownTensor], list[KnownTensor]]] = []

    def step(self) -> int:
        """Run one step and return its peak in use, in bytes."""
        import tensorflow as tf

        if not self.is_warm:
            self.is_warm = True
            with scopes_noted() as self.noted:
                return super().step()
        before = self._known_tensors()
        with tf.profiler.experimental.Trace(STEP_MARK):
            peak = super().step()
        with tf.profiler.experimental.Trace(END_MARK):
            pass
        self.known.append((before, self._known_tensors()))
        return peak

    def _known_tensors(self) -> list[KnownTensor]:
        import tensorflow as tf

        batch = known_tensors(tf.nest.flatten(self.batch), "inputs", "the batch")
        return [*tensors_of_python(), *batch, *tensors_of_model(self.model, self.noted.owners())]

    def profile(
        self, planned: dict[str, Any], run: Run, events: tuple[AllocatorEvent, ...], marks: tuple[Mark, ...]
    ) -> StepProfile:
        """Return the profile of the usual step among those that were recorded."""
        if not events:
            raise KerasmemError(
                f"the profiler recorded no allocations of {self.device}; unset TF_GPU_ALLOCATOR, or use "
                "`kerasmem measure`"
            )
        template = MemoryReport.from_dict(planned)
        own = template.settings
        begins = [mark.time for mark in marks if mark.name == STEP_MARK]
        ends = [mark.time for mark in marks if mark.name == END_MARK]
        skipped = min(WARM_UP_STEPS, len(run.peaks) - 1)
        peaks = run.peaks[skipped:]
        number = skipped + peaks.index(statistics.median_low(peaks))
        first, last = (bisect.bisect_left(events, each[number], key=attrgetter("time")) for each in (begins, ends))
        before, after = self.known[number]
        contents, scopes, notes, at = self._contents()
        names = [optimizer.name for optimizer in optimizers_of(self.model)] if self.request.mode == "train" else []
        attribution = Attribution(scopes, [row.name for row in template.layers], tuple(names))
        outside = outside_scopes(self.noted.operations(), attribution)
        what = (
            f"the step with the median peak of {len(peaks)}, after {skipped + 1} to warm up; "
            f"{run.seconds:.2g} s a step under the profiler"
        )
        return assemble(
            replay_step(events[first:last], events[:first], before, after, is_complete=True),
            Namer(attribution, contents, outside, at=at, is_xla=self.jit_compile),
            template.model,
            ProfileSettings(
                own.batch_size,
                own.optimizer,
                own.loss,
                own.dtype_policy,
                own.mode,
                "xla" if self.jit_compile else "graph",
                own.device,
            ),
            [ProfiledLayer(**{**vars(row), "bytes_at_peak": 0, "bytes": 0}) for row in template.layers],
            peaks=peaks,
            reserved=_reserved(events[:last], self.device),
            notes=measured_notes(self.device, what, *self.notes, *notes),
            formula=asdict(template.formula),
        )

    def _contents(self) -> tuple[Contents, dict[str, tuple[str, ...]], list[str], str | None]:
        """Return what XLA's plan says of the step's buffer, the scopes of its names, what to note, what runs then."""
        if not self.jit_compile or self.prepared is None:
            return {}, self.noted.scopes, [], None
        try:
            traced = trace_step(self.prepared)
            plan = compile_plan(traced)
        except XlaRefused as error:
            return {}, self.noted.scopes, [f"what XLA's buffer holds is not known: {error}"], None
        note = f"chunks as measured; the contents of XLA's buffer of {plan.temporary:,} B by its buffer assignment"
        return {plan.temporary: plan.live}, traced.scopes, [note], plan.at


def _reserved(events: Sequence[AllocatorEvent], device: str) -> int | None:
    """Return the bytes that the allocator had taken from the device, by its own rules; None where they do not fit."""
    pool = BFCAllocator(descending=device.startswith("CPU"))
    handles: dict[int, int] = {}
    with contextlib.suppress(KeyError, KerasmemError):
        for event in events:
            if event.kind == ALLOCATE:
                pool.next_address = event.address
                handles[event.address] = pool.allocate(event.requested)
                pool.next_address = None
            else:
                pool.free(handles.pop(event.address))
        return pool.reserved if not events or pool.in_use == events[-1].in_use else None
    return None
