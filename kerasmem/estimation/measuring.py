"""`measure` and `profile`: real training steps in a subprocess, read from TensorFlow's allocator or its profiler.

A profile is recorded from before the model is made, so that every chunk that is live in the step is known.
"""

from __future__ import annotations

import bisect
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from typing_extensions import Unpack

from kerasmem import checks
from kerasmem.devices.recording import AllocatorEvent, Mark, of_device, read_recording, start_recording
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.methods import backend_refusal
from kerasmem.estimation.probing import DEFAULT_TIMEOUT, call_with_steps, measured_notes, run_steps
from kerasmem.estimation.real_steps import MeasuredSteps, TensorFlowSession
from kerasmem.estimation.report import Bytes, MemoryReport, Pool, device_verdict
from kerasmem.estimation.xla import XlaRefused, compile_plan
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.op_names import Attribution, NotedScopes, scopes_noted
from kerasmem.models.own_step import optimizers_of
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.models.step import trace_step
from kerasmem.profiling.assembling import Namer, build_profile
from kerasmem.profiling.replaying import KnownTensor, known_tensors, replay_step, tensors_of_model, tensors_of_python
from kerasmem.profiling.results import METHOD, ProfiledLayer, ProfileSettings, StepProfile


@shows_settings("method", "replicas")
def measure(
    model: Any, *, steps: int = 10, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[EstimateSettings]
) -> MemoryReport:
    """Return how much memory training a model takes, by running some steps of it in a process of its own.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. The report has the layout of an estimate: `bytes.total` is the median of the steps'
    peaks in use, `low` and `high` the least and the most of them; graph mode runs operations in parallel, so that
    identical steps differ.

    Args:
        model: as for `kerasmem.estimate`.
        steps: steps that are measured, after a first one that sets things up.
        timeout: seconds for the whole process.
        **settings: as for `kerasmem.estimate` but for `method` and `replicas`.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> import kerasmem
        >>> kerasmem.measure("keras.applications:MobileNetV2", batch_size=8).settings.method  # doctest: +SKIP
        'measure'
    """
    planned, spec = planned_step(StepSpec(model, **settings), steps)
    run = run_steps(spec, spec.batch_size, steps, timeout=timeout)
    need = Bytes(run.median, min(run.peaks), max(run.peaks), planned.bytes.weights, run.optimizer, inputs=run.inputs)
    ran = f"{len(run.peaks)} steps of {run.seconds:.2g} s after a first one that had its peak at {run.first:,} B"
    return replace(
        planned,
        settings=replace(planned.settings, method="measure", execution=run.execution),
        bytes=need,
        layers=tuple(replace(row, bytes=None) for row in planned.layers),
        device=None if planned.device is None else device_verdict(planned.device, need),
        unmodelled=(),
        notes=measured_notes(run.device, ran, *run.notes, way=run.way),
        pool=Pool(requested=None, in_use=run.median, reserved=None),
        instant=None,
    )


def planned_step(spec: StepSpec, steps: int) -> tuple[MemoryReport, StepSpec]:
    """Return the formula's report of a step that is to be run, and the spec for the process that runs it.

    Args:
        spec: the step; if the model fixes its own batch size, the spec for the process has that one.
        steps: number of steps to run.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
    """
    checks.whole("steps", steps)
    if spec.method != "auto" or spec.replicas != 1:
        raise UsageError("method and replicas are for kerasmem.estimate; here real steps run on one device")
    if (reason := backend_refusal("measure", spec.jit_compile)) is not None:
        raise UsageError(reason)
    planned = estimate_spec(replace(spec, method="formula"))
    return planned, spec.portable(batch_size=planned.settings.batch_size)


@shows_settings("method", "replicas")
def profile(
    model: Any, *, steps: int = 5, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[EstimateSettings]
) -> StepProfile:
    """Profile the memory of one real training step at its peak, by layer and category.

    The process has real weights, a batch of zeros, and the GPU's allocator where the machine has a GPU; otherwise the
    same allocator for the CPU. TensorFlow's profiler records every allocation from the process's start on. In graph
    mode operations run in parallel, so that identical steps differ: the step with the median peak is the one shown.

    Args:
        model: as for `kerasmem.estimate`.
        steps: steps that are recorded, after those that warm up.
        timeout: seconds for the whole process.
        **settings: as for `measure`; `mode` may be "evaluate", too.

    Raises:
        UsageError: an argument is wrong, or the model cannot be sent to another process.
        ModelError: a step failed, or ran out of memory.
        KerasmemError: the process gave no answer in time, or was ended by the system.

    Examples:
        >>> profile("keras.applications:MobileNetV2", batch_size=8).named_share > 0.95  # doctest: +SKIP
        True
    """
    require_tensorflow("profile", "estimate and measure work on JAX")
    planned, spec = planned_step(StepSpec(model, **settings), steps)
    runs = [(spec.batch_size, steps, spec.mode)]
    result: StepProfile = call_with_steps(profiled_step, spec, runs, planned, timeout=timeout)
    return result


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
