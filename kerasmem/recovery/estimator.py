"""Estimates of a training step with some changes: the same settings but for them, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.devices.kernels import ONEDNN, SHORT_TITLES, CpuKernels, assumed, kernels_on, onednn_is_left_off
from kerasmem.devices.machine import list_devices
from kerasmem.errors import KerasmemError
from kerasmem.estimation.facade import estimate_spec
from kerasmem.estimation.report import FITS, Bytes, MemoryReport, device_verdict, verdict
from kerasmem.models.spec import StepSpec
from kerasmem.recovery.building import build
from kerasmem.recovery.changes import STREAM, Change, ordered
from kerasmem.recovery.traits import SampleBytes
from kerasmem.units import MIB

# What TensorFlow alone runs, and XLA's compiler for a card, which takes the model through JAX, does not.
_TENSORFLOW_ONLY = {"recompute", "micro_batches"}
_MOST_WASTE = 128 * MIB  # of a chunk that the allocator does not divide
_SETTINGS = {"batch_size", "replicas", "jit_compile", STREAM}  # changes of the estimate, and not of the model


class OutOfTimeError(KerasmemError):
    """The time for estimates is over."""


@dataclass(frozen=True)
class Need:
    """The need of a changed step: bytes, the verdict on the device, the method, and whether a CPU stands in."""

    bytes: Bytes
    verdict: str
    method: str
    stands_in: bool = False


@dataclass
class StepEstimator:
    """Estimates a training step with changes, each set of changes once, until the time is over.

    Attributes:
        origin: the model as the user gave it.
        target: the device that the step must fit.
        batch_size, mode, jit_compile, method: as for `kerasmem.advise`.
        budget_seconds: time for estimates; None: as long as it takes.
        progress: called with a few words before each estimate.
        reserved: seconds that are kept for later estimates.
        samples: of arrays that Keras is given whole, whose copy on the device counts; None: data comes in batches.
        current: the estimate of the step as it is; known once `estimate_current` was called.
        data_bytes: what Keras keeps on the device beside every step: the copy of the arrays, and outputs of `predict`.
        joined_bytes: what `predict` holds at its end, when it joins the outputs of all batches; else 0.
    """

    origin: StepSpec
    target: DeviceTarget
    batch_size: int
    mode: str
    jit_compile: bool | str
    method: str
    budget_seconds: float | None
    progress: Callable[[str], object] | None = None
    reserved: float = 0.0
    samples: int | None = None
    current: MemoryReport = field(init=False)
    data_bytes: int = field(init=False, default=0)
    joined_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._end = None if self.budget_seconds is None else time.monotonic() + self.budget_seconds
        self._durations: list[float] = []  # the first left out: it loads TensorFlow
        # By changes and method: the need of the step alone, without arrays, and whether a CPU stands in for the card.
        self._known: dict[tuple[frozenset[tuple[str, str]], str], tuple[Bytes, bool]] = {}

    def estimate_current(self) -> MemoryReport:
        """Return the estimate of the step as it is, whatever time there is; it settles the method of all others.

        Raises:
            KerasmemError: as `kerasmem.estimate`.
        """
        report = self._estimate((), self.method)
        self.method, self.batch_size = report.settings.method, report.settings.batch_size
        self.add((), report.bytes, self.method, report.settings.stands_in)
        self.current = self._judged(report)
        return self.current

    def count_arrays(self, sample: SampleBytes) -> None:
        """Count what Keras keeps on the device of arrays that it is given whole, in all figures from now on.

        `fit` and `evaluate` keep a copy of inputs and targets. `predict` keeps a copy of the inputs and the outputs of
        every batch, and joins these at the end into one more copy.
        """
        predicts = self.mode == "inference"
        if self.samples is None or (predicts and sample.outputs is None):
            return
        outputs = (sample.outputs or 0) * self.samples if predicts else 0
        inputs = (sample.inputs + (0 if predicts else sample.targets)) * self.samples
        self.data_bytes = inputs + outputs
        self.joined_bytes = inputs + 2 * outputs if predicts else 0
        self.current = self._judged(self.current)

    def _judged(self, report: MemoryReport) -> MemoryReport:
        need = self.baseline(()).bytes
        return replace(report, bytes=need, device=device_verdict(self.target, need))

    @property
    def must_stream(self) -> bool:
        """Whether the arrays alone take more than the device has."""
        return (self.arrays_bytes or 0) >= self.target.available_bytes

    @property
    def arrays_bytes(self) -> int | None:
        """The most that whole arrays take; None if the model does not tell their shapes."""
        if self.samples is not None and not self.data_bytes:
            return None
        return max(self.data_bytes, self.joined_bytes)

    @property
    def fits_now(self) -> bool:
        """Whether the step as it is surely fits."""
        return self.current.device is not None and self.current.device.verdict == FITS

    def method_for(self, changes: Iterable[Change]) -> str:
        """Return the method that can answer for these changes."""
        made = {each.kind: each.value for each in changes}
        if "replicas" in made and self.method in ("xla", "gpu-target"):
            return "graph"  # Keras does not compile with XLA under tf.distribute
        if "jit_compile" in made:
            return "xla" if made["jit_compile"] else "graph"
        return "xla" if self.method == "gpu-target" and _TENSORFLOW_ONLY & set(made) else self.method

    def baseline(self, changes: Collection[Change]) -> Need:
        """Return the need without the changes, by their method: the base of a saving."""
        is_compiled_otherwise = any(each.kind == "jit_compile" for each in changes)
        return self._need((), self.method if is_compiled_otherwise else self.method_for(changes))

    def estimate(self, changes: Iterable[Change]) -> Need:
        """Return the need with the changes.

        Raises:
            OutOfTimeError: there is no time left for it.
            KerasmemError: the estimator has no answer.
        """
        made = ordered(changes)
        return self._need(made, self.method_for(made))

    def add(self, changes: Iterable[Change], need: Bytes, method: str, stands_in: bool = False) -> Need:
        """Keep an answer that another estimate brought along, and return the need with the arrays."""
        changes = tuple(changes)
        self._known[_key(changes), method] = need, stands_in
        streams = any(each.kind == STREAM for each in changes)
        whole = need if streams else self._with_arrays(need)
        return Need(whole, verdict(whole, self.target.available_bytes), method, stands_in)

    def _with_arrays(self, step: Bytes) -> Bytes:
        """Add the arrays that Keras keeps on the device to the need of a step."""
        at_end = (step.weights or 0) + self.joined_bytes
        sizes = ((name, getattr(step, name)) for name in ("total", "low", "high"))
        whole = {name: max(size + self.data_bytes, at_end) for name, size in sizes if size is not None}
        if step.high is not None:
            whole["high"] += min(self.data_bytes, _MOST_WASTE)  # the copy may lie in a chunk that is so much larger
        if step.inputs is not None:
            whole["inputs"] = step.inputs + whole["total"] - step.total
        return replace(step, **whole)

    def kernels(self, method: str) -> str | None:
        """Name the kernels that the figures of a method hold for; None for the formula."""
        if method == "formula":
            return None
        if method in ("xla", "gpu-target"):
            return f"XLA, {self.target.name if method == 'gpu-target' else 'this CPU'}"
        if method == "probe" and list_devices():
            return "CUDA, this GPU"
        found = kernels_on(self.target if method == "graph" else None)
        return SHORT_TITLES[found.kind] if isinstance(found, CpuKernels) else f"CUDA, {self.target.name}"

    def with_onednn(self) -> Need | None:
        """Estimate the step as it is on oneDNN's kernels, if it was estimated on TensorFlow's own.

        None where that is not the question: the step runs on a card, XLA compiles it, or oneDNN's run already.
        """
        on_this_cpu = self.target.source != "catalogue" and self.method == "graph" and not list_devices()
        if not on_this_cpu or not onednn_is_left_off() or not self.has_time():
            return None
        with assumed(ONEDNN):
            report = self._estimate((), "graph")
        return self.add((), report.bytes, ONEDNN)

    def has_time(self, estimates: int = 1) -> bool:
        """Return whether there is time for some estimates as long as those so far."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return self._end is None or self._end - self.reserved - time.monotonic() > estimates * mean

    def _need(self, changes: tuple[Change, ...], method: str) -> Need:
        if (known := self._known.get((_key(changes), method))) is not None:
            return self.add(changes, known[0], method, known[1])
        if not self.has_time():
            raise OutOfTimeError("there was no time for it")
        begin = time.monotonic()
        try:
            report = self._estimate(changes, method)
        except KerasmemError:
            raise
        except Exception as error:  # one remedy that cannot be estimated is not offered, the others are
            raise KerasmemError(f"unexpected {type(error).__name__}: {error}; a defect in kerasmem") from error
        finally:
            self._durations.append(time.monotonic() - begin)
        in_pieces = any(each.kind == "micro_batches" for each in changes)
        need = _with_accumulators(report) if in_pieces else report.bytes
        return self.add(changes, need, method, report.settings.stands_in)

    def _estimate(self, changes: tuple[Change, ...], method: str) -> MemoryReport:
        if self.progress is not None:
            self.progress(", ".join(each.name for each in changes) or "the step as it is")
        options = {**self.step_options(changes), "method": method}
        if {each.kind for each in changes} <= _SETTINGS:
            return estimate_spec(replace(self.origin, **options))
        # Some methods estimate in a process of their own.
        origin = self.origin.portable() if method in ("gpu-target", "probe") else self.origin
        return estimate_spec(_changed(origin, changes, options))

    def request(self, changes: Iterable[Change]) -> StepSpec:
        """Return the changed step for another process, to run it as it was estimated.

        Raises:
            UsageError: If the model cannot be built again from its configuration.
        """
        made = ordered(changes)
        options = self.step_options(made)
        method = self.method_for(made)
        if method in ("graph", "xla", "gpu-target"):
            options["jit_compile"] = method != "graph"
        return _changed(self.origin.portable(), made, options)

    def step_options(self, changes: Iterable[Change] = ()) -> dict[str, Any]:
        """Return the arguments of `kerasmem.estimate` that describe the step and the device, without the method."""
        values = {each.kind: each.value for each in changes}
        batch = int(values.get("batch_size", self.batch_size))
        return {
            "batch_size": -(-batch // int(values.get("micro_batches", 1))),
            "mode": self.mode,
            "jit_compile": values.get("jit_compile", self.jit_compile),
            "replicas": int(values.get("replicas", 1)),
            "device": self.target.name,
            "input_shape": self.origin.input_shape,
        }

    def limit_for(self, changes: Iterable[Change]) -> int:
        """Return the bytes of the device that are left for a step, besides the arrays that Keras keeps."""
        return self.target.available_bytes - (0 if _streams(changes) else self.data_bytes)


def _streams(changes: Iterable[Change]) -> bool:
    return any(each.kind == STREAM for each in changes)


def _key(changes: Iterable[Change]) -> frozenset[tuple[str, str]]:
    """Return what tells the step of some changes from others; the source of the data does not change it."""
    return frozenset(each.key for each in changes if each.kind != STREAM)


def _changed(origin: StepSpec, changes: Iterable[Change], options: Mapping[str, Any]) -> StepSpec:
    """Return the spec of the changed model, which `build` builds."""
    of_model = [each.to_data() for each in changes if each.kind not in _SETTINGS]
    arguments = {"origin": origin, "changes": of_model, "rows": options["batch_size"]}
    return StepSpec(build, factory_args=arguments, **options)


def _with_accumulators(report: MemoryReport) -> Bytes:
    """Add the possible waste of the accumulators' chunks to the upper end.

    They are made while the first step's tensors are live, so they lie where there is a place and not side by side, and
    the allocator hands a chunk out whole unless it is twice what is asked for.
    """
    need = report.bytes
    most = report.model.trainable_parameters * 4
    return need if need.high is None else replace(need, high=need.high + most)
