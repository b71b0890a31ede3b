"""One question to the estimator for a set of changes: the same settings but for them, within a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.cache import cache_folder, cache_key, cached_estimate, read_entry, write_entry
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.report import Bytes, MemoryReport
from kerasmem.estimation.verdict import verdict
from kerasmem.models.request import request_for
from kerasmem.recovery.building import OPTIMIZER_CONFIGS, Origin, build
from kerasmem.recovery.changes import Change, ordered

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


class Asker:
    """Asks the estimator, each question once, until the time is over."""

    def __init__(
        self,
        origin: Origin,
        target: DeviceTarget,
        *,
        batch_size: int,
        mode: str,
        jit_compile: bool | str,
        method: str,
        cache: bool,
        budget_seconds: float | None,
        progress: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.origin, self.target, self.batch_size = origin, target, batch_size
        self.mode, self.jit_compile, self.method, self.cache = mode, jit_compile, method, cache
        self.progress, self.clock = progress, clock
        self.end = None if budget_seconds is None else clock() + budget_seconds
        self.reserved = 0.0  # seconds that are kept for later questions
        self.seconds: list[float] = []  # that questions took, the first left out: it loads TensorFlow
        self.base: MemoryReport | None = None
        self.is_stand_in = False
        self._known: dict[tuple[Keys, str], Need] = {}

    def first(self) -> MemoryReport:
        """Return the estimate of the step as it is, which settles the method of all others; it is asked whatever time
        there is.

        Raises:
            KerasmemError: as `kerasmem.estimate`.
        """
        ask = cached_estimate if self.cache else estimate
        self._say("the step as it is")
        report = ask(self.origin.source, **self.settings(), method=self.method)
        is_auto = self.method == "auto"
        self.base, self.method = report, report.settings.method
        self.batch_size = report.settings.batch_size
        self.is_stand_in = is_auto and self.method == "xla" and self.target.source == "catalogue"
        self._known[frozenset(), self.method] = Need(report.bytes, self._verdict(report.bytes), self.method)
        return report

    def method_for(self, changes: Iterable[Change]) -> str:
        """Return the method that can answer for these changes."""
        made = {each.kind: each.value for each in changes}
        if "replicas" in made and self.method in ("xla", "gpu-target"):
            return "graph"  # Keras does not compile with XLA under tf.distribute
        if "jit_compile" in made:
            return "xla" if made["jit_compile"] else "graph"
        return "xla" if self.method == "gpu-target" and _TENSORFLOW_ONLY & set(made) else self.method

    def without(self, changes: Iterable[Change]) -> Need:
        """Return the need without the changes, by the method that answers for them: what a saving counts from."""
        method = self.method_for(changes)
        if self.base is None or any(each.kind == "jit_compile" for each in changes):
            method = self.method
        return self._ask((), method)

    def ask(self, changes: Iterable[Change]) -> Need:
        """Return the need with the changes.

        Raises:
            OutOfTimeError: there is no time left for it.
            KerasmemError: the estimator has no answer.
        """
        made = ordered(changes)
        return self._ask(made, self.method_for(made))

    def tell(self, changes: Iterable[Change], found: Bytes, method: str) -> Need:
        """Keep an answer that another question brought along."""
        need = Need(found, self._verdict(found), method)
        self._known[frozenset(each.key for each in changes), method] = need
        return need

    @property
    def time_left(self) -> float:
        """Seconds for the questions of now."""
        return float("inf") if self.end is None else self.end - self.reserved - self.clock()

    def has_time(self, questions: int = 1) -> bool:
        """Return whether there is time for some questions as long as those so far."""
        mean = sum(self.seconds) / len(self.seconds) if self.seconds else 0.0
        return self.time_left > questions * mean

    def _ask(self, changes: tuple[Change, ...], method: str) -> Need:
        keys = frozenset(each.key for each in changes)
        if (keys, method) in self._known:
            return self._known[keys, method]
        if not self.has_time():
            raise OutOfTimeError("there was no time for it")
        self._say(", ".join(each.name for each in changes) or "the step as it is")
        begin = self.clock()
        try:
            report = self._estimate(changes, method)
        except KerasmemError:
            raise
        except Exception as error:  # one remedy that cannot be estimated is not offered, the others are
            raise KerasmemError(f"unexpected {type(error).__name__}: {error}; a defect in kerasmem") from error
        finally:
            self.seconds.append(self.clock() - begin)
        is_divided = any(each.kind == "micro_batches" for each in changes)
        need = _with_accumulators(report) if is_divided else report.bytes
        found = self._known[keys, method] = Need(need, self._verdict(need), method)
        return found

    def _estimate(self, changes: tuple[Change, ...], method: str) -> MemoryReport:
        made = {each.kind: each.value for each in changes}
        settings = self.settings(made)
        settings["method"] = method
        if set(made) <= _SETTINGS and made.get("optimizer") != "sgd_momentum":
            if "dtype_policy" in made:
                settings["dtype_policy"] = made["dtype_policy"]
            if "optimizer" in made:
                settings["optimizer"] = OPTIMIZER_CONFIGS[made["optimizer"]][0]
            return (cached_estimate if self.cache else estimate)(self.origin.source, **settings)
        for name in ("factory", "factory_args", "custom_objects", "trust", "dtype_policy", "optimizer", "loss"):
            settings.pop(name, None)
        listed = [each.to_dict() for each in changes if each.kind not in ("batch_size", "replicas", "jit_compile")]
        given = {"changes": listed, "rows": settings["batch_size"]}
        key = self._cache_key(listed, settings)
        folder = cache_folder()
        if key is not None and folder is not None and (kept := read_entry(folder, key)) is not None:
            return kept
        if method in ("gpu-target", "probe"):
            with request_for(self.origin.source, input_shape=self.origin.input_shape, optimizer=self.origin.optimizer,
                             loss=self.origin.loss, **self.origin.options) as request:  # fmt: skip
                report = estimate(build, factory_args={"origin": request.to_dict(), **given}, **settings)
        else:
            report = estimate(build, factory_args={"origin": self.origin, **given}, **settings)
        if key is not None and folder is not None:
            write_entry(folder, key, report)
        return report

    def settings(self, made: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments of `kerasmem.estimate`, the method left out."""
        changed = made or {}
        batch = int(changed.get("batch_size", self.batch_size))
        batch = -(-batch // int(changed.get("micro_batches", 1)))
        return {
            **self.origin.options,
            "optimizer": self.origin.optimizer,
            "loss": self.origin.loss,
            "batch_size": batch,
            "mode": self.mode,
            "jit_compile": changed.get("jit_compile", self.jit_compile),
            "replicas": int(changed.get("replicas", 1)),
            "device": self.target.name,
            "input_shape": None if "input_size" in changed else self.origin.input_shape,
        }

    def _cache_key(self, listed: list[dict[str, Any]], settings: Mapping[str, Any]) -> str | None:
        if not self.cache or not isinstance(self.origin.source, (str, os.PathLike)):
            return None
        own = {**settings, **self.origin.options, "optimizer": self.origin.optimizer, "loss": self.origin.loss}
        return cache_key(self.origin.source, {**own, "changes": listed})

    def _verdict(self, need: Bytes) -> str:
        return verdict(self._lowered(need), self.target.available_bytes)

    def _lowered(self, need: Bytes) -> Bytes:
        """Return the need as `kerasmem.estimate` claims it where this machine's plan stands in for a card's: all that
        is sure is what the step holds from beginning to end."""
        if not self.is_stand_in or need.low is None:
            return need
        held = sum(getattr(need, name) or 0 for name in ("weights", "optimizer", "inputs"))
        return replace(need, low=min(need.low, held))

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text)


def _with_accumulators(report: MemoryReport) -> Bytes:
    """Return the need with room for what the accumulators' chunks may waste.

    They are made while the first step's tensors are live, so they lie where there is a place and not side by side, and
    the allocator hands a chunk out whole unless it is twice what is asked for.
    """
    need = report.bytes
    most = report.model.trainable_parameters * 4
    return need if need.high is None else replace(need, high=need.high + most)


def check_budget(seconds: Any) -> None:
    """Raise UsageError unless a budget is a number of seconds from 0, or None."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise UsageError(f"budget_seconds {seconds!r}: give seconds, 0 or more, or None for no limit")
