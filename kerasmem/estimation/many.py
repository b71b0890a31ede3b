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
# Settings of `kerasmem.estimate` for a grid. Other names are arguments of the function that builds the model.
_SETTINGS = set(EstimateSettings.__annotations__) - {"factory", "factory_args", "custom_objects", "trust", "data"}
_COUNTED = {FITS: "fit", DOES_NOT_FIT: "do not fit", TOO_CLOSE: "too close to call", FAILED: "failed"}
_COLUMNS = ("parameters", "batch_size", "method", "execution", "total", "low", "high", "device")


@dataclass(frozen=True)
class Candidate(Record, what="candidate", version=1):
    """One model in one setting.

    Attributes:
        model: the path, or the function's name.
        grid: the setting by name, such as {"batch_size": 32}.
        report: the estimate without its layers, or None if it failed.
        reason: why the estimate failed, or None.
    """

    model: str
    grid: Mapping[str, Any]
    report: MemoryReport | None = None
    reason: str | None = None

    @property
    def verdict(self) -> str | None:
        """ "fits", "does not fit", "too close to call" or "failed", or None if no device was named."""
        if self.report is None:
            return FAILED
        return None if self.report.device is None else self.report.device.verdict

    def row(self) -> dict[str, Any]:
        """Return a row of a table, sizes in bytes, None if unknown."""
        values = {name: self.grid.get(name) for name in _COLUMNS}
        if self.report is not None:
            parts = {**vars(self.report.model), **vars(self.report.settings), **vars(self.report.bytes)}
            values = {name: parts[name] for name in _COLUMNS}
        return {"model": self.model, **self.grid, **values, "verdict": self.verdict, "reason": self.reason}


@dataclass(frozen=True)
class EstimateTable(Record, what="table of estimates", version=1, rows="candidates"):
    """Estimates of many models and settings, one row each.

    `to_frame()` has a column for each setting that differs, and sizes in bytes.

    Attributes:
        candidates: the rows, in the order of the models and then of the grid.
    """

    candidates: tuple[Candidate, ...]

    @property
    def failed(self) -> tuple[Candidate, ...]:
        """The rows without an estimate."""
        return tuple(candidate for candidate in self.candidates if candidate.report is None)

    @property
    def answer(self) -> str:
        """A summary: "12 candidates, 256 MiB to 2.10 GiB: 7 fit, 3 do not fit, 1 too close to call, 1 failed"."""
        peaks = [candidate.report.peak for candidate in self.candidates if candidate.report is not None]
        sizes = f", {format_size(min(peaks))} to {format_size(max(peaks))}" if peaks else ""
        counts = Counter(candidate.verdict for candidate in self.candidates)
        verdicts = ", ".join(f"{counts[verdict]:,} {words}" for verdict, words in _COUNTED.items() if counts[verdict])
        count = len(self.candidates)
        return f"{count:,} candidate{'' if count == 1 else 's'}{sizes}" + (f": {verdicts}" if verdicts else "")

    def _table(self) -> list[dict[str, Any]]:
        return [candidate.row() for candidate in self.candidates]


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

    Each estimate runs in a subprocess, forked from one that has loaded TensorFlow already. If it crashes or exceeds a
    limit, its row has the reason. On Windows and macOS estimates run in this process.

    Args:
        models: paths, "package.module:function", or functions that return a model.
        grid: name to list of values; every combination is estimated. A name is a setting of `kerasmem.estimate`
            ({"batch_size": [16, 32], "optimizer": ["sgd", "adam"]}), or an argument of the function that builds the
            model ({"depth": [5, 10]}). Defaults to one estimate a model.
        executor: runs the estimates, such as `ProcessPoolExecutor(4)`. Defaults to one at a time from this process.
        timeout: seconds for each estimate, or None for no limit. Defaults to half an hour.
        host_memory_limit: bytes of resident memory for each estimate. Defaults to 80 % of the memory that this job may
            have.
        progress: called after each estimate with its row, the number of finished estimates and the number of all.
        **settings: as for `kerasmem.estimate`.

    Returns:
        An `EstimateTable` in the order of `models`, then of the grid, with its last name varying fastest.

    Raises:
        UsageError: If an argument is wrong, or a subprocess cannot open a model.
        KerasmemError: If a worker of the executor was lost.

    Examples:
        >>> import kerasmem
        >>> table = kerasmem.estimate_many(
        ...     ["keras.applications:MobileNetV2", "no.module:f"], grid={"batch_size": [8, 64]}, method="formula")
        >>> [(row.grid["batch_size"], row.verdict) for row in table.candidates]
        [(8, None), (64, None), (8, 'failed'), (64, 'failed')]
    """
    points = list(_points(grid or {}))
    models = list(models)
    if not models:
        raise UsageError("models must have at least one model; got none")
    if timeout is not None and not checks.number("timeout", timeout) > 0:
        raise UsageError(f"timeout must be more than 0 seconds; got {timeout!r}")
    if host_memory_limit is not None:
        checks.whole("host_memory_limit", host_memory_limit)
    for model in models:
        _check_model(model)
    tasks = [(_at(StepSpec(model, **settings), point), point) for model in models for point in points]
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
            raise UsageError(f"grid: {name!r} must be a setting of estimate or an argument of the model's function")
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"grid: {name} must be a list of values; got {values!r}")
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
            "models must be paths, package.module:function, or functions that return a model; got "
            f"{type(model).__name__}. For a Keras model call kerasmem.estimate"
        )


def _candidate(task: tuple[StepSpec, Mapping[str, Any]], *, seconds: float | None, host_bytes: int | None) -> Candidate:
    """Estimate one row. Each worker keeps a process that has loaded TensorFlow."""
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
