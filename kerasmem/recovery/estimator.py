"""Estimates of a training step with some changes: the same settings but for them, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from kerasmem.checks import Method
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.devices.kernels import ONEDNN, assumed, onednn_is_left_off
from kerasmem.devices.live import list_devices
from kerasmem.errors import KerasmemError
from kerasmem.estimation.cache import cache_folder, cache_key, cached_estimate, read_entry, write_entry
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.report import Bytes, MemoryReport
from kerasmem.estimation.verdict import FITS, verdict
from kerasmem.models.request import request_for
from kerasmem.recovery.building import Origin, build
from kerasmem.recovery.changes import OPTIMIZERS, Change, ordered

Keys = frozenset[tuple[str, str]]

# Changes to the settings of an estimate; with these alone the model is asked about as it was given.
_SETTINGS = {"batch_size", "replicas", "jit_compile", "dtype_policy", "optimizer"}
# What TensorFlow alone runs, and XLA's compiler for a card, which takes the model through JAX, does not.
_TENSORFLOW_ONLY = {"recompute", "micro_batches"}


class OutOfTimeError(KerasmemError):
    """The time for estimates is over."""


@dataclass(frozen=True)
class Need:
    """What a changed step needs: bytes, the verdict on the device, and by which method."""

    bytes: Bytes
    verdict: str
    method: str


@dataclass
class StepEstimator:
    """Estimates a training step with changes, each set of changes once, until the time is over.

    Attributes:
        origin: the model.
        target: the device that the step must fit.
        batch_size, mode, jit_compile, method, cache: as for `kerasmem.advise`.
        budget_seconds: time for estimates; None: as long as it takes.
        progress: called with a few words before each estimate.
        clock: the time in seconds.
        reserved: seconds that are kept for later estimates.
        current: the estimate of the step as it is; known once `estimate_current` was called.
    """

    origin: Origin
    target: DeviceTarget
    batch_size: int
    mode: str
    jit_compile: bool | str
    method: str
    cache: bool
    budget_seconds: float | None
    progress: Callable[[str], object] | None = None
    clock: Callable[[], float] = time.monotonic
    reserved: float = 0.0
    current: MemoryReport = field(init=False)

    def __post_init__(self) -> None:
        self._end = None if self.budget_seconds is None else self.clock() + self.budget_seconds
        self._durations: list[float] = []  # the first left out: it loads TensorFlow
        self._is_stand_in = False
        self._known: dict[tuple[Keys, str], Need] = {}

    def estimate_current(self) -> MemoryReport:
        """Return the estimate of the step as it is, whatever time there is; it settles the method of all others.

        Raises:
            KerasmemError: as `kerasmem.estimate`.
        """
        self._report_progress(())
        estimate_one = cached_estimate if self.cache else estimate
        report = estimate_one(self.origin.source, **self.estimate_options(), method=cast("Method", self.method))
        is_auto = self.method == "auto"
        self.current, self.method = report, report.settings.method
        self.batch_size = report.settings.batch_size
        self._is_stand_in = is_auto and self.method == "xla" and self.target.source == "catalogue"
        self.add((), report.bytes, self.method)
        return report

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

    def baseline(self, changes: Iterable[Change]) -> Need:
        """Return the need without the changes, by the method that answers for them: what a saving counts from."""
        made = tuple(changes)
        is_compiled_otherwise = any(each.kind == "jit_compile" for each in made)
        return self._need((), self.method if is_compiled_otherwise else self.method_for(made))

    def estimate(self, changes: Iterable[Change]) -> Need:
        """Return the need with the changes.

        Raises:
            OutOfTimeError: there is no time left for it.
            KerasmemError: the estimator has no answer.
        """
        made = ordered(changes)
        return self._need(made, self.method_for(made))

    def add(self, changes: Iterable[Change], found: Bytes, method: str) -> Need:
        """Keep an answer that another estimate brought along."""
        need = Need(found, verdict(self._widened(found), self.target.available_bytes), method)
        self._known[frozenset(each.key for each in changes), method] = need
        return need

    def with_onednn(self) -> Need | None:
        """Return the need of the step as it is on oneDNN's kernels, where it was estimated on TensorFlow's own.

        None where that is not the question: the step runs on a card, XLA compiles it, or oneDNN's run already.
        """
        on_this_cpu = self.target.source != "catalogue" and self.method == "graph" and not list_devices()
        if not on_this_cpu or not onednn_is_left_off() or not self.has_time():
            return None
        with assumed(ONEDNN):
            report = estimate(self.origin.source, **self.estimate_options(), method="graph")
        return Need(report.bytes, verdict(report.bytes, self.target.available_bytes), "graph")

    def has_time(self, estimates: int = 1) -> bool:
        """Return whether there is time for some estimates as long as those so far."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return self._end is None or self._end - self.reserved - self.clock() > estimates * mean

    def _need(self, changes: tuple[Change, ...], method: str) -> Need:
        keys = frozenset(each.key for each in changes)
        if (keys, method) in self._known:
            return self._known[keys, method]
        if not self.has_time():
            raise OutOfTimeError("there was no time for it")
        self._report_progress(changes)
        begin = self.clock()
        try:
            report = self._estimate(changes, method)
        except KerasmemError:
            raise
        except Exception as error:  # one remedy that cannot be estimated is not offered, the others are
            raise KerasmemError(f"unexpected {type(error).__name__}: {error}; a defect in kerasmem") from error
        finally:
            self._durations.append(self.clock() - begin)
        is_divided = any(each.kind == "micro_batches" for each in changes)
        return self.add(changes, _with_accumulators(report) if is_divided else report.bytes, method)

    def _estimate(self, changes: tuple[Change, ...], method: str) -> MemoryReport:
        made = {each.kind: each.value for each in changes}
        options = {**self.estimate_options(made), "method": method}
        if set(made) <= _SETTINGS and made.get("optimizer") != "sgd_momentum":
            if "dtype_policy" in made:
                options["dtype_policy"] = made["dtype_policy"]
            if "optimizer" in made:
                options["optimizer"] = OPTIMIZERS[made["optimizer"]].class_name.lower()
            return (cached_estimate if self.cache else estimate)(self.origin.source, **options)
        origin = self.origin
        of_model = {
            **origin.options, **origin.targets.options(), "optimizer": origin.optimizer, "loss": origin.loss,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if name not in of_model}
        data = [each.to_data() for each in changes if each.kind not in ("batch_size", "replicas", "jit_compile")]
        given = {"changes": data, "rows": options["batch_size"]}
        folder = cache_folder() if self.cache else None
        key = None if folder is None else cache_key(origin.source, {**options, **of_model, "changes": data})
        if key is not None and folder is not None and (kept := read_entry(folder, key)) is not None:
            return kept
        if method in ("gpu-target", "probe"):  # in a process of its own
            with request_for(origin.source, input_shape=origin.input_shape, **of_model) as request:
                report = estimate(build, factory_args={"origin": request.to_dict(), **given}, **options)
        else:
            report = estimate(build, factory_args={"origin": origin, **given}, **options)
        if key is not None and folder is not None:
            write_entry(folder, key, report)
        return report

    def estimate_options(self, made: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments of `kerasmem.estimate`, the method left out."""
        changed = made or {}
        batch = int(changed.get("batch_size", self.batch_size))
        return {
            **self.origin.options,
            "optimizer": self.origin.optimizer,
            "loss": self.origin.loss,
            "batch_size": -(-batch // int(changed.get("micro_batches", 1))),
            "mode": self.mode,
            "jit_compile": changed.get("jit_compile", self.jit_compile),
            "replicas": int(changed.get("replicas", 1)),
            "device": self.target.name,
            "input_shape": None if "input_size" in changed else self.origin.input_shape,
            **self.origin.targets.options(),
        }

    def _widened(self, need: Bytes) -> Bytes:
        """Return the need as `kerasmem.estimate` claims it where this machine's plan stands in for a card's: all that
        is sure is what the step holds from beginning to end."""
        if not self._is_stand_in or need.low is None:
            return need
        held = sum(getattr(need, name) or 0 for name in ("weights", "optimizer", "inputs"))
        return replace(need, low=min(need.low, held))

    def _report_progress(self, changes: Iterable[Change]) -> None:
        if self.progress is not None:
            self.progress(", ".join(each.name for each in changes) or "the step as it is")


def _with_accumulators(report: MemoryReport) -> Bytes:
    """Return the need with room for what the accumulators' chunks may waste.

    They are made while the first step's tensors are live, so they lie where there is a place and not side by side, and
    the allocator hands a chunk out whole unless it is twice what is asked for.
    """
    need = report.bytes
    most = report.model.trainable_parameters * 4
    return need if need.high is None else replace(need, high=need.high + most)
