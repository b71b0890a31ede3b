"""Real steps under TensorFlow's profiler, which `kerasmem profile` runs in a subprocess, and the memory of one of them.

The recording begins before the model is made, so that every chunk that is live in the step is known.
"""

from __future__ import annotations

import bisect
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter

from kerasmem.devices.recording import AllocatorEvent, Mark, of_device, read_recording, start_recording
from kerasmem.errors import KerasmemError
from kerasmem.estimation.probe.running import measured_notes
from kerasmem.estimation.probe.worker import MeasuredSteps, TensorFlowSession
from kerasmem.estimation.report import MemoryReport
from kerasmem.estimation.xla import XlaRefused, compile_plan
from kerasmem.models.op_names import Attribution, NotedScopes, scopes_noted
from kerasmem.models.own_step import optimizers_of
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import trace_step
from kerasmem.profiling.assembling import Namer, build_profile
from kerasmem.profiling.replaying import KnownTensor, known_tensors, replay_step, tensors_of_model, tensors_of_python
from kerasmem.profiling.results import METHOD, ProfiledLayer, ProfileSettings, StepProfile

MARKS = "kerasmem-"  # in the recording
STEP_MARK, END_MARK = MARKS + "step", MARKS + "end"
WARM_UP_STEPS = 2  # beside the first, which sets things up
SECONDS = 120.0  # after which no further step is begun


def profiled_step(request: StepSpec, runs: Sequence[tuple[int, int, str]], planned: MemoryReport) -> StepProfile:
    """Train some steps, and return the profile of the one with the median peak.

    Args:
        request: the model and how it is trained.
        runs: batch size, steps and mode of the only run.
        planned: an estimate by the formula, whose model, settings and layers the profile takes over.
    """
    import tensorflow as tf

    ((batch_size, steps, mode),) = runs
    with tempfile.TemporaryDirectory(prefix="kerasmem-profile-") as folder:
        start_recording(folder)
        session = _ProfiledSession(request)
        run = session.run(batch_size, steps + WARM_UP_STEPS, mode, SECONDS)
        tf.profiler.experimental.stop()
        events, marks = read_recording(folder, MARKS)
    return session.profile(planned, run, of_device(events, session.device), marks)


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
        self, planned: MemoryReport, run: MeasuredSteps, events: tuple[AllocatorEvent, ...], marks: tuple[Mark, ...]
    ) -> StepProfile:
        """Return the profile of the usual step among those that were recorded."""
        if not events:
            raise KerasmemError(
                f"the profiler recorded no allocations of {self.device}; unset TF_GPU_ALLOCATOR, or use "
                "`kerasmem measure`"
            )
        settings = {field.name: getattr(planned.settings, field.name) for field in fields(ProfileSettings)}
        settings |= {"method": METHOD, "execution": run.execution}
        begins = [mark.time for mark in marks if mark.name == STEP_MARK]
        ends = [mark.time for mark in marks if mark.name == END_MARK]
        skipped = min(WARM_UP_STEPS, len(run.peaks) - 1)
        peaks = run.peaks[skipped:]
        number = skipped + peaks.index(statistics.median_low(peaks))
        first, last = (bisect.bisect_left(events, times[number], key=attrgetter("time")) for times in (begins, ends))
        before, after = self.known[number]
        namer, notes = self._namer([row.name for row in planned.layers])
        ran = (
            f"the step with the median peak of {len(peaks)}, after {skipped + 1} to warm up; "
            f"{run.seconds:.2g} s a step under the profiler"
        )
        return build_profile(
            replay_step(events[first:last], events[:first], before, after, is_complete=True),
            namer,
            planned.model,
            ProfileSettings(**settings),
            [ProfiledLayer(**{**vars(row), "bytes_at_peak": 0, "bytes": 0}) for row in planned.layers],
            peaks=peaks,
            notes=measured_notes(self.device, ran, *run.notes, *notes),
            formula=asdict(planned.formula),
        )

    def _namer(self, rows: Sequence[str]) -> tuple[Namer, list[str]]:
        """Return the names of the chunks, and remarks on the contents of XLA's buffer."""
        plan, scopes, note = None, self.noted.scopes, ""
        if self.jit_compile and self.prepared is not None:
            try:
                traced = trace_step(self.prepared)
                plan, scopes = compile_plan(traced), traced.scopes
                note = f"chunks as measured; XLA's buffer of {plan.temporary:,} B by its buffer assignment"
            except XlaRefused as error:
                note = f"the contents of XLA's buffer are not known: {error}"
        contents, at = ({}, None) if plan is None else ({plan.temporary: plan.live}, plan.at)
        names = [optimizer.name for optimizer in optimizers_of(self.model)] if self.request.mode == "train" else []
        attribution = Attribution(scopes, rows, tuple(names))
        return Namer(attribution, contents, at=at, is_xla=self.jit_compile), [note] if note else []
