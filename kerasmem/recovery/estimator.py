"""Estimates of a training step with some changes: the same settings but for them, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, resolve_device
from kerasmem.errors import KerasmemError
from kerasmem.estimation.estimating import estimate_spec
from kerasmem.estimation.report import FITS, Bytes, MemoryReport, device_verdict, verdict
from kerasmem.models.spec import StepSpec
from kerasmem.recovery.changed_model import build
from kerasmem.recovery.changes import Change, ordered

# What TensorFlow alone runs, and XLA's compiler for a card, which takes the model through JAX, does not.
_TENSORFLOW_ONLY = {"recompute", "micro_batches"}
_SETTINGS = {"batch_size", "replicas", "jit_compile"}  # changes of the estimate, and not of the model


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
        current: the estimate of the step as it is; known once `estimate_current` was called.
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
    current: MemoryReport = field(init=False)

    def __post_init__(self) -> None:
        self._end = None if self.budget_seconds is None else time.monotonic() + self.budget_seconds
        self._durations: list[float] = []  # the first left out: it loads TensorFlow
        self._known: dict[tuple[frozenset[tuple[str, str]], str], Need] = {}  # by changes and method

    def estimate_current(self) -> MemoryReport:
        """Return the estimate of the step as it is, whatever time there is; it settles the method of all others.

        Raises:
            KerasmemError: as `kerasmem.estimate`.
        """
        report = self._estimate((), self.method)
        self.method, self.batch_size = report.settings.method, report.settings.batch_size
        self.add((), report.bytes, self.method, report.settings.stands_in)
        self.current = replace(report, device=device_verdict(self.target, report.bytes))
        return self.current

    @property
    def margin(self) -> float:
        """Share of the device that whole arrays take."""
        whole = resolve_device(self.target.name).available_bytes
        return max(0.0, 1 - max(self.target.available_bytes, 1) / whole)

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
        """Keep an answer that another estimate brought along, and return it."""
        fits = verdict(need, self.target.available_bytes)
        self._known[_key(changes), method] = Need(need, fits, method, stands_in)
        return self._known[_key(changes), method]

    def has_time(self, estimates: int = 1) -> bool:
        """Return whether there is time for some estimates as long as those so far."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return self._end is None or self._end - self.reserved - time.monotonic() > estimates * mean

    def _need(self, changes: tuple[Change, ...], method: str) -> Need:
        if (known := self._known.get((_key(changes), method))) is not None:
            return known
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


def _key(changes: Iterable[Change]) -> frozenset[tuple[str, str]]:
    return frozenset(each.key for each in changes)


def _changed(origin: StepSpec, changes: Iterable[Change], options: Mapping[str, Any]) -> StepSpec:
    """Return a spec for `build` of the changed model."""
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
