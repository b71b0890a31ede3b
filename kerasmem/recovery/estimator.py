"""Estimates of a training step with changes, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, VERDICTS, Bytes, MemoryReport, device_verdict, verdict
from kerasmem.models.spec import StepSpec
from kerasmem.recovery.changed_model import WholeArrays, build
from kerasmem.recovery.changes import Change, order_changes

# Changes without an estimate by XLA's compiler for a card, which takes the model through JAX.
_TENSORFLOW_ONLY = {"recompute", "micro_batches"}
_INPUTS = ("input_shape", "target_shape", "target_dtype", "sample_weight", "data")  # settings of the batch
_SETTINGS = {"batch_size", "replicas", "jit_compile"}  # changes of settings rather than of the model


class OutOfTimeError(KerasmemError):
    """The time limit of estimates has passed."""


@dataclass(frozen=True)
class Need:
    """The estimate of a changed step."""

    bytes: Bytes
    verdict: str
    method: str
    stands_in: bool = False


@dataclass
class StepEstimator:
    """Estimates a training step with changes, each set of changes once, within a time limit.

    Attributes:
        origin: the user's model and settings.
        target: the device that the step must fit.
        batch_size, mode, jit_compile, method: as for `kerasmem.advise`.
        budget_seconds: time for estimates in seconds; None for no limit.
        progress: called with a few words before each estimate.
        arrays: arrays that Keras keeps on the device, or None. After `estimate_current` the target is without them.
        joined: need of `predict` when it joins its outputs, or None.
        reserved: seconds reserved for later estimates.
        current: estimate of the current step, set by `estimate_current`.
    """

    origin: StepSpec
    target: DeviceTarget
    batch_size: int
    mode: str
    jit_compile: bool | str
    method: str
    budget_seconds: float | None
    progress: Callable[[str], object] | None = None
    arrays: WholeArrays | None = None
    joined: Bytes | None = field(default=None, init=False)
    reserved: float = 0.0
    current: MemoryReport = field(init=False)

    def __post_init__(self) -> None:
        self._end = None if self.budget_seconds is None else time.monotonic() + self.budget_seconds
        self._join_verdict = FITS
        self._durations: list[float] = []  # without the first, which loads TensorFlow
        self._known: dict[tuple[frozenset[tuple[str, str]], str], Need] = {}  # by changes and method

    def estimate_current(self) -> MemoryReport:
        """Estimate the current step without a time limit, and set the method of all other estimates.

        Raises:
            KerasmemError: If `kerasmem.estimate` raises one.
        """
        report = self._estimate((), self.method)
        self.method, self.batch_size = report.settings.method, report.settings.batch_size
        self._keep_arrays(report)
        need = self.add((), report.bytes, self.method, report.settings.stands_in)
        self.current = replace(report, device=device_verdict(self.target, need.verdict))
        return self.current

    def _keep_arrays(self, report: MemoryReport) -> None:
        """Subtract the arrays from the target, or all of it if they do not fit."""
        arrays, target = self.arrays, self.target
        if arrays is None:
            return
        self.joined = arrays.joined(report, descending=target.compute_capability is None)
        fits = arrays.step_bytes < target.limits[1]
        if self.joined is not None:
            self._join_verdict = verdict(self.joined, *target.limits)
            fits = fits and self._join_verdict != DOES_NOT_FIT
        self.target = target.with_available(lambda limit: max(limit - arrays.step_bytes, 0) if fits else 0)

    @property
    def margin(self) -> float:
        """Share of the device used by whole arrays."""
        whole = resolve_device(self.target.name).available_bytes
        return max(0.0, 1 - max(self.target.available_bytes, 1) / whole)

    @property
    def fits_now(self) -> bool:
        """Whether the current step surely fits."""
        return self.current.device is not None and self.current.device.verdict == FITS

    def method_for(self, changes: Iterable[Change]) -> str:
        """Return the method that can estimate these changes."""
        values = {change.kind: change.value for change in changes}
        if "replicas" in values and self.method in ("xla", "gpu-target"):
            return "graph"  # Keras does not compile with XLA under tf.distribute
        if "jit_compile" in values:
            return "xla" if values["jit_compile"] else "graph"
        return "xla" if self.method == "gpu-target" and _TENSORFLOW_ONLY & set(values) else self.method

    def baseline(self, changes: Collection[Change]) -> Need:
        """Return the need without the changes, by their method, to compute the saving."""
        changes_compilation = any(change.kind == "jit_compile" for change in changes)
        return self._need((), self.method if changes_compilation else self.method_for(changes))

    def estimate(self, changes: Iterable[Change]) -> Need:
        """Return the need with the changes.

        Raises:
            OutOfTimeError: If there is no time left.
            KerasmemError: If the changes cannot be estimated.
        """
        in_order = order_changes(changes)
        return self._need(in_order, self.method_for(in_order))

    def add(self, changes: Iterable[Change], need: Bytes, method: str, stands_in: bool = False) -> Need:
        """Add the result of another estimate, and return it."""
        fits = max(verdict(need, *self.target.limits), self._join_verdict, key=VERDICTS.index)
        self._known[_key(changes), method] = Need(need, fits, method, stands_in)
        return self._known[_key(changes), method]

    def has_time(self, estimates: int = 1) -> bool:
        """Return whether the time left suffices for more estimates, by the mean so far."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return self._end is None or self._end - self.reserved - time.monotonic() > estimates * mean

    def _need(self, changes: tuple[Change, ...], method: str) -> Need:
        if (known := self._known.get((_key(changes), method))) is not None:
            return known
        if not self.has_time():
            raise OutOfTimeError("not estimated, as the time limit has passed")
        begin = time.monotonic()
        try:
            report = self._estimate(changes, method)
        except KerasmemError:
            raise
        except Exception as error:  # other remedies are still offered
            raise KerasmemError(f"unexpected {type(error).__name__}: {error}; a defect in kerasmem") from error
        finally:
            self._durations.append(time.monotonic() - begin)
        in_pieces = any(change.kind == "micro_batches" for change in changes)
        need = _with_accumulators(report) if in_pieces else report.bytes
        return self.add(changes, need, method, report.settings.stands_in)

    def _estimate(self, changes: tuple[Change, ...], method: str) -> MemoryReport:
        if self.progress is not None:
            self.progress(", ".join(change.name for change in changes) or "the current step")
        options = {**self.step_options(changes), "method": method}
        if {change.kind for change in changes} <= _SETTINGS:
            return estimate_spec(replace(self.origin, **options))
        # These methods run in a separate process.
        origin = self.origin.portable() if method in ("gpu-target", "probe") else self.origin
        return estimate_spec(_changed_spec(origin, changes, options))

    def request(self, changes: Iterable[Change]) -> StepSpec:
        """Return the changed step for another process, with the execution that was estimated.

        Raises:
            UsageError: If the model cannot be rebuilt from its configuration.
        """
        in_order = order_changes(changes)
        options = self.step_options(in_order)
        method = self.method_for(in_order)
        if method in ("graph", "xla", "gpu-target"):
            options["jit_compile"] = method != "graph"
        return _changed_spec(self.origin.portable(), in_order, options)

    def step_options(self, changes: Iterable[Change] = ()) -> dict[str, Any]:
        """Return the arguments of `kerasmem.estimate` that describe the step and the device, without the method."""
        values = {change.kind: change.value for change in changes}
        batch = int(values.get("batch_size", self.batch_size))
        return {
            "batch_size": -(-batch // int(values.get("micro_batches", 1))),
            "mode": self.mode,
            "jit_compile": values.get("jit_compile", self.jit_compile),
            "replicas": int(values.get("replicas", 1)),
            "device": self.target.name,
            "kernels": self.origin.kernels,
            "threads": self.origin.threads,
            **{name: getattr(self.origin, name) for name in _INPUTS},
        }


def _key(changes: Iterable[Change]) -> frozenset[tuple[str, str]]:
    return frozenset(change.key for change in changes)


def _changed_spec(origin: StepSpec, changes: Iterable[Change], options: Mapping[str, Any]) -> StepSpec:
    """Return a spec for `build` of the changed model."""
    of_model = [change.to_data() for change in changes if change.kind not in _SETTINGS]
    arguments = {"origin": origin, "changes": of_model, "rows": options["batch_size"]}
    return StepSpec(build, factory_args=arguments, **options)


def _with_accumulators(report: MemoryReport) -> Bytes:
    """Add the possible waste of the accumulators' chunks to the upper end.

    They are allocated while the first step's tensors are live, so they are not contiguous. The allocator splits a chunk
    only if it is at least twice as large as requested.
    """
    need = report.bytes
    most = report.model.trainable_parameters * 4
    return need if need.high is None else replace(need, high=need.high + most)
