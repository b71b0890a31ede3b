"""`kerasmem.estimate_many`: estimates of many models and settings, in warm processes."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Unpack

from kerasmem import checks
from kerasmem.devices.host import default_memory_limit
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.estimating import LONGEST, estimate_spec, forked_report
from kerasmem.estimation.report import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryReport
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.processes.children import Limits, off_the_cards
from kerasmem.processes.executors import run_tasks
from kerasmem.records import Record
from kerasmem.units import format_size

FAILED = "failed"
# What of `kerasmem.estimate` a grid may set; other names are arguments of the function that builds the model.
_SETTINGS = set(EstimateSettings.__annotations__) - {"factory", "factory_args", "custom_objects", "trust"}
_SAID = {FITS: "fit", DOES_NOT_FIT: "do not fit", TOO_CLOSE: "too close to call", FAILED: "failed"}
_COLUMNS = ("parameters", "batch_size", "method", "execution", "total", "low", "high", "device")


@dataclass(frozen=True)
class Candidate(Record, what="candidate", version=1):
    """One model in one setting.

    Attributes:
        model: as it was given; of a function its name.
        grid: what this setting is, by name: {"batch_size": 32}.
        report: the estimate, without its layers; None where it failed.
        reason: why it failed; None where it did not.
    """

    model: str
    grid: Mapping[str, Any]
    report: MemoryReport | None = None
    reason: str | None = None

    @property
    def verdict(self) -> str | None:
        """ "fits", "does not fit", "too close to call" or "failed"; None if no device was named."""
        if self.report is None:
            return FAILED
        return None if self.report.device is None else self.report.device.verdict

    def row(self) -> dict[str, Any]:
        """Return a row of a table, sizes in bytes, None if unknown."""
        known = {name: self.grid.get(name) for name in _COLUMNS}
        if self.report is not None:
            parts = {**vars(self.report.model), **vars(self.report.settings), **vars(self.report.bytes)}
            known = {name: parts[name] for name in _COLUMNS}
        return {"model": self.model, **self.grid, **known, "verdict": self.verdict, "reason": self.reason}


@dataclass(frozen=True)
class EstimateTable(Record, what="table of estimates", version=1, rows="candidates"):
    """Many estimates: a row a model and setting, in the order asked, those that failed with their reasons.

    `to_frame()` has a column for each setting that differs, and sizes in bytes.
    """

    candidates: tuple[Candidate, ...]

    @property
    def failed(self) -> tuple[Candidate, ...]:
        """Those without an estimate."""
        return tuple(each for each in self.candidates if each.report is None)

    @property
    def answer(self) -> str:
        """The answer: "12 candidates, 256 MiB to 2.10 GiB: 7 fit, 3 do not fit, 1 too close to call, 1 failed"."""
        peaks = [each.report.peak for each in self.candidates if each.report is not None]
        sizes = f", {format_size(min(peaks))} to {format_size(max(peaks))}" if peaks else ""
        counts = Counter(each.verdict for each in self.candidates)
        told = ", ".join(f"{counts[verdict]:,} {said}" for verdict, said in _SAID.items() if counts[verdict])
        count = len(self.candidates)
        return f"{count:,} candidate{'' if count == 1 else 's'}{sizes}" + (f": {told}" if told else "")

    def _table(self) -> list[dict[str, Any]]:
        return [each.row() for each in self.candidates]


@shows_settings()
def estimate_many(
    models: Iterable[Any],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    executor: Executor | None = None,
    timeout: float | None = LONGEST,
    host_memory_limit: int | None = None,
    progress: Callable[[Candidate, int, int], None] | None = None,
    **settings: Unpack[EstimateSettings],
) -> EstimateTable:
    """Estimate many models, each in every setting of a grid.

    Each estimate has a process of its own, forked from one that has loaded TensorFlow already. One that crashes, takes
    too much memory or does not end is a row with its reason, and no memory is left behind. (Without forks, so on
    Windows and macOS, estimates share the process.)

    Args:
        models: paths, "package.module:function", or functions that return a model.
        grid: name to values, of which every combination is estimated: a setting of `kerasmem.estimate`
            ({"batch_size": [16, 32], "optimizer": ["sgd", "adam"]}), or an argument of the function that builds the
            model ({"depth": [5, 10]}).
        executor: runs the estimates, such as `ProcessPoolExecutor(4)`. Defaults to one at a time from this process.
        timeout: seconds for each estimate; None for no limit.
        host_memory_limit: bytes of resident memory for each; None: 80 % of what its job may have.
        progress: called with each row as it comes, how many are done, and of how many.
        **settings: as for `kerasmem.estimate`.

    Returns:
        An `EstimateTable`, in the order of `models`, and for each in that of the grid, its last name varying fastest.

    Raises:
        UsageError: an argument is wrong, or a model is none that another process can open.
        KerasmemError: a worker of the executor was lost.

    Examples:
        >>> import kerasmem
        >>> table = kerasmem.estimate_many(
        ...     ["keras.applications:MobileNetV2", "no.module:f"], grid={"batch_size": [8, 64]}, method="formula")
        >>> [(row.grid["batch_size"], row.verdict) for row in table.candidates]
        [(8, None), (64, None), (8, 'failed'), (64, 'failed')]
    """
    points = list(_points(grid or {}))
    named = list(models)
    if not named:
        raise UsageError("models: give at least one")
    if timeout is not None and not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout {timeout!r}: give seconds, more than 0")
    if host_memory_limit is not None:
        checks.whole("host_memory_limit", host_memory_limit)
    for model in named:
        _check_model(model)
    tasks = [(_at(StepSpec(model, **settings), point), point) for model in named for point in points]
    work = functools.partial(_candidate, seconds=timeout, host_bytes=host_memory_limit)
    rows: list[Candidate] = []
    for row in run_tasks(executor, work, tasks):
        rows.append(row)
        if progress is not None:
            progress(row, len(rows), len(tasks))
    return EstimateTable(tuple(rows))


def _points(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the grid's values."""
    for name, values in grid.items():
        if not name.isidentifier():
            raise UsageError(f"grid: {name!r} is no setting of estimate and no argument of a function")
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"grid: {name}: {values!r}: give a list of values")
    for combination in itertools.product(*grid.values()):
        yield dict(zip(grid, combination, strict=True))


def _at(spec: StepSpec, point: Mapping[str, Any]) -> StepSpec:
    """Return the spec at a point of the grid."""
    plain = {name: value for name, value in point.items() if name in _SETTINGS}
    built = {name: value for name, value in point.items() if name not in plain}
    arguments = {**(spec.factory_args or {}), **built} if built else spec.factory_args
    return replace(spec, **plain, factory_args=arguments)


def _check_model(model: Any) -> None:
    is_named = isinstance(model, (str, os.PathLike))
    if not is_named and (not callable(model) or hasattr(model, "layers")):
        raise UsageError(
            f"models: {type(model).__name__}: give a path, package.module:function, or a function that returns a model;"
            " a Keras model that is there already is for kerasmem.estimate"
        )


def _candidate(task: tuple[StepSpec, Mapping[str, Any]], *, seconds: float | None, host_bytes: int | None) -> Candidate:
    """Return one row. Each worker keeps a process that has loaded TensorFlow."""
    spec, point = task
    limits = Limits(seconds, default_memory_limit() if host_bytes is None else host_bytes)
    work = functools.partial(_report, spec)
    try:
        report = forked_report(spec.label, limits, work) if hasattr(os, "pidfd_open") else work()
    except KerasmemError as error:
        return Candidate(spec.label, point, reason=str(error))
    return Candidate(spec.label, point, replace(report, layers=()))


def _report(spec: StepSpec) -> MemoryReport:
    with off_the_cards():
        return estimate_spec(spec)
