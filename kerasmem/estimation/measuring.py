"""`measure` and `profile`: memory of real training steps in a subprocess.

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
from kerasmem.devices.catalogue import resolve_device
from kerasmem.devices.recording import AllocatorEvent, Mark, of_device, read_recording, start_recording
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.methods import backend_refusal, constant_bytes, stand_in_note, unused_profile
from kerasmem.estimation.probing import DEFAULT_TIMEOUT, call_with_steps, measurement_notes, run_steps
from kerasmem.estimation.real_steps import MeasuredSteps, TensorFlowSession
from kerasmem.estimation.report import Bytes, MemoryReport, Pool, device_verdict
from kerasmem.estimation.xla import XlaRefused, compile_plan
from kerasmem.models.backend import require_tensorflow
from kerasmem.models.op_names import Attribution, RecordedScopes, record_scopes
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
    """Measure the memory of real training steps in a subprocess.

    The subprocess has real weights and a batch of zeros. It reads TensorFlow's allocator, of the GPU if there is one,
    else of the CPU. Identical steps differ, because graph mode runs operations in parallel.

    Args:
        model: as for `kerasmem.estimate`.
        steps: number of measured steps, after one warm-up step. Defaults to 10.
        timeout: seconds for the whole subprocess. Defaults to 600.
        **settings: as for `kerasmem.estimate`, except `method` and `replicas`.

    Returns:
        A `MemoryReport`, as `kerasmem.estimate` returns. `bytes.total` is the median of the steps' peaks; `low` and
        `high` are the smallest and the largest.

    Raises:
        UsageError: If an argument is wrong, or the model cannot be sent to a subprocess.
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the subprocess was too slow or was killed.

    Examples:
        >>> import kerasmem
        >>> kerasmem.measure("keras.applications:MobileNetV2", batch_size=8).settings.method  # doctest: +SKIP
        'measure'
    """
    planned, spec = plan_real_steps(StepSpec(model, **settings), steps)
    run = run_steps(spec, spec.samples, steps, timeout=timeout)
    need = Bytes(run.median, min(run.peaks), max(run.peaks), planned.bytes.weights, run.optimizer, inputs=run.inputs)
    notes = unused_profile(spec, run.kernels, "measure")
    if stands_in := _stands_in(spec, run):
        need = replace(need, low=min(*run.peaks, constant_bytes(need)))
        notes = (*notes, stand_in_note("measure"))
    steps_note = f"{len(run.peaks)} steps of {run.seconds:.2g} s after a first one with a peak of {run.first:,} B"
    return replace(
        planned,
        settings=replace(
            planned.settings, method="measure", execution=run.execution, stands_in=stands_in, **_profile_of(run)
        ),
        bytes=need,
        layers=tuple(replace(row, bytes=None) for row in planned.layers),
        device=None if planned.device is None else device_verdict(planned.device, need),
        unmodelled=(),
        notes=measurement_notes(run.device, steps_note, *run.notes, *notes, way=run.way),
        pool=Pool(requested=None, in_use=run.median, reserved=None),
        instant=None,
    )


def _profile_of(run: MeasuredSteps) -> dict[str, Any]:
    return {} if run.kernels is None else run.kernels.profile


def _stands_in(spec: StepSpec, run: MeasuredSteps) -> bool:
    """Return whether steps ran on the CPU although a card is named."""
    is_card = spec.device is not None and resolve_device(str(spec.device)).source == "catalogue"
    return is_card and run.device == "CPU:0"


def plan_real_steps(spec: StepSpec, steps: int) -> tuple[MemoryReport, StepSpec]:
    """Return the formula's report, and the spec of the step to run.

    Args:
        spec: the step. If the model fixes its own batch size, the returned spec has that one.
        steps: number of steps to run.

    Raises:
        UsageError: If an argument is wrong, or the model cannot be sent to a subprocess.
    """
    checks.whole("steps", steps)
    if spec.method != "auto" or spec.replicas != 1:
        raise UsageError("method and replicas: only kerasmem.estimate takes them; real steps run on one device")
    if (reason := backend_refusal("measure", spec.jit_compile)) is not None:
        raise UsageError(reason)
    planned = estimate_spec(replace(spec, method="formula"))
    return planned, spec.portable(batch_size=planned.settings.batch_size)


@shows_settings("method", "replicas")
def profile(
    model: Any, *, steps: int = 5, timeout: float = DEFAULT_TIMEOUT, **settings: Unpack[EstimateSettings]
) -> StepProfile:
    """Profile a real training step's peak memory by layer and category.

    The steps run as those of `measure`, while TensorFlow's profiler records every allocation of the subprocess.

    Args:
        model: as for `kerasmem.estimate`.
        steps: number of recorded steps, after the warm-up steps. Defaults to 5.
        timeout: seconds for the whole subprocess. Defaults to 600.
        **settings: as for `measure`.

    Returns:
        A `StepProfile` of the step with the median peak.

    Raises:
        UsageError: If an argument is wrong, or the model cannot be sent to a subprocess.
        ModelError: If a step failed, or ran out of memory.
        KerasmemError: If the subprocess was too slow or was killed.

    Examples:
        >>> import kerasmem
        >>> kerasmem.profile("keras.applications:MobileNetV2", batch_size=8).named_share > 0.95  # doctest: +SKIP
        True
    """
    require_tensorflow("profile", "estimate and measure work on JAX")
    planned, spec = plan_real_steps(StepSpec(model, **settings), steps)
    runs = [(spec.samples, steps, spec.mode)]
    result: StepProfile = call_with_steps(profile_steps, spec, runs, planned, timeout=timeout)
    return result


MARKS = "kerasmem-"  # in the recording
STEP_MARK, END_MARK = MARKS + "step", MARKS + "end"
WARM_UP_STEPS = 2  # after the first one, which sets things up
SECONDS = 120.0  # after which no further step is begun


def profile_steps(request: StepSpec, runs: Sequence[tuple[int, int, str]], planned: MemoryReport) -> StepProfile:
    """Run steps and return the profile of the one with the median peak.

    Args:
        request: the model and its training.
        runs: batch size, steps and mode of a single run.
        planned: estimate by the formula. The profile has its model, settings and layers.
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
    """Recorded steps, with the addresses of known tensors before and after each."""

    def __init__(self, request: StepSpec) -> None:
        super().__init__(request)
        self.noted = RecordedScopes()
        self.is_warm = False
        self.known: list[tuple[list[KnownTensor], list[KnownTensor]]] = []

    def step(self) -> int:
        """Run one step and return its peak in use, in bytes."""
        import tensorflow as tf

        if not self.is_warm:
            self.is_warm = True
            with record_scopes() as self.noted:
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
        """Return the profile of the step with the median peak."""
        if not events:
            raise KerasmemError(
                f"the profiler recorded no allocations of {self.device}; unset TF_GPU_ALLOCATOR, or run "
                "`kerasmem measure`"
            )
        settings = {field.name: getattr(planned.settings, field.name) for field in fields(ProfileSettings)}
        settings |= {"method": METHOD, "execution": run.execution, **_profile_of(run)}
        settings["stands_in"] = _stands_in(self.request, run)
        begins = [mark.time for mark in marks if mark.name == STEP_MARK]
        ends = [mark.time for mark in marks if mark.name == END_MARK]
        skipped = min(WARM_UP_STEPS, len(run.peaks) - 1)
        peaks = run.peaks[skipped:]
        number = skipped + peaks.index(statistics.median_low(peaks))
        first, last = (bisect.bisect_left(events, times[number], key=attrgetter("time")) for times in (begins, ends))
        before, after = self.known[number]
        namer, notes = self._namer([row.name for row in planned.layers])
        steps_note = (
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
            notes=measurement_notes(
                self.device, steps_note, *run.notes, *notes, *unused_profile(self.request, run.kernels, METHOD)
            ),
            formula=asdict(planned.formula),
        )

    def _namer(self, rows: Sequence[str]) -> tuple[Namer, list[str]]:
        """Return the namer of the chunks, and notes on XLA's buffer."""
        plan, scopes, note = None, self.noted.scopes, ""
        if self.jit_compile and self.prepared is not None:
            try:
                traced = trace_step(self.prepared)
                plan, scopes = compile_plan(traced), traced.scopes
                note = f"chunks as measured; XLA's buffer of {plan.temporary:,} B by its buffer assignment"
            except XlaRefused as error:
                note = f"the contents of XLA's buffer are unknown: {error}"
        contents, at = ({}, None) if plan is None else ({plan.temporary: plan.live}, plan.at)
        names = [optimizer.name for optimizer in optimizers_of(self.model)] if self.request.mode == "train" else []
        attribution = Attribution(scopes, rows, tuple(names))
        return Namer(attribution, contents, at=at, is_xla=self.jit_compile), [note] if note else []
