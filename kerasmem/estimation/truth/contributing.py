"""Rows of the data set measured on this machine: each network estimated, and trained in a process of its own."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import kerasmem
from kerasmem import checks
from kerasmem.checks import Method
from kerasmem.devices.catalogue import find_card
from kerasmem.devices.host import usable_cores
from kerasmem.devices.kernels import CUDA, cpu_facts, cpu_kernels
from kerasmem.devices.live import LiveDevice, list_devices
from kerasmem.errors import InputError, KerasmemError, UsageError
from kerasmem.estimation.facade import estimate
from kerasmem.estimation.measuring import planned_request
from kerasmem.estimation.probe.running import DEFAULT_TIMEOUT, run_steps
from kerasmem.estimation.truth.checking import check_rows
from kerasmem.estimation.truth.networks import NETWORKS, compiled
from kerasmem.estimation.truth.results import ContributedRow, Contribution
from kerasmem.estimation.truth.rows import LICENSE, Row, Rows, StoredRow, measured
from kerasmem.models.backend import import_keras, require_tensorflow

DEFAULT_OUTPUT = "kerasmem-rows.jsonl"
_FACTORY = f"{compiled.__module__}:{compiled.__name__}"
_FIGURES = ("total", "low", "high")


@dataclass(frozen=True)
class _Here:
    """What all rows of this machine have in common.

    Attributes:
        versions, machine: as in the rows.
        kernels: of graph steps.
        device: what estimates are for, None for this CPU.
    """

    versions: dict[str, str]
    machine: dict[str, Any]
    kernels: str
    device: str | None


def contribute(
    models: Sequence[str] | None = None,
    *,
    output: str | os.PathLike[str] = DEFAULT_OUTPUT,
    steps: int = 10,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], object] | None = None,
) -> Contribution:
    """Measure some networks that come with kerasmem, estimate them, and write rows for the data set.

    Each network is trained in graph mode and under XLA. A row that the file has already is not measured again, so a
    run that was stopped goes on. Nothing is sent anywhere, and a row holds no name of a user, a host or a folder.

    Args:
        models: names of the networks; None for all.
        output: the file of rows, made or gone on with.
        steps: that are measured, after a first one.
        timeout: seconds for the process of one step.
        progress: called with a few words before each row.

    Returns:
        What was measured and estimated, sizes in bytes.

    Raises:
        UsageError: an argument is wrong, Keras does not run on TensorFlow, or the file has rows of another machine.
        InputError: the file holds something else.
        OSError: the file cannot be written.

    Examples:
        >>> contribute(["mnist_cnn"]).answer  # doctest: +SKIP
        '2 of 2 rows measured, in kerasmem-rows.jsonl; nothing was sent'
    """
    names = [checks.choice("models", name, tuple(NETWORKS)) for name in (models if models is not None else NETWORKS)]
    path, steps = checks.path("output", output), checks.whole("steps", steps)
    require_tensorflow("bench contribute")
    here = _here()
    store = Rows(path)
    stored = _readable(path, here, store)
    rows = []
    for row in _plan(names, here.kernels):
        is_new = measured(stored.get(row.key, {})) is None
        failed = None
        if is_new:
            if progress is not None:
                progress(row.key)
            stored[row.key], failed = _measured_row(row, here, steps, timeout)
            if measured(stored[row.key]) is not None:
                _keep(store, stored[row.key])
        rows.append(_summary(stored[row.key], failed, is_new))
    return Contribution(path, here.versions, here.machine, tuple(rows))


def _plan(names: Sequence[str], kernels: str) -> Iterator[Row]:
    for name in dict.fromkeys(names):
        entry = NETWORKS[name]
        for mode in entry.modes:
            yield Row(name, entry.batches[0], "adam", mode, "float32", False, entry.held_out, entry.heavy, kernels)


def _here() -> _Here:
    import numpy
    import tensorflow as tf

    packages = {"keras": import_keras(), "tensorflow": tf, "numpy": numpy, "kerasmem": kerasmem}
    versions = {"python": platform.python_version(), **{name: str(each.__version__) for name, each in packages.items()}}
    card = next((each for each in list_devices() if each.cuda_index == 0), None)
    machine = {"system": platform.system(), "cores": usable_cores(), **cpu_facts(), **_device_facts(card)}
    device = None if card is None else card.name
    return _Here(versions, machine, cpu_kernels().kind if card is None else CUDA, device)


def _device_facts(card: LiveDevice | None) -> dict[str, Any]:
    """Return what a row says of the card: no number of its own, which would tell it from others of its kind."""
    if card is None:
        return {"device": "cpu"}
    found = {
        "memory_bytes": card.total_bytes, "compute_capability": card.compute_capability, "driver": card.driver_version,
    }  # fmt: skip
    return {"device": card.name or "unknown card", **{name: each for name, each in found.items() if each is not None}}


def _readable(path: str, here: _Here, store: Rows) -> dict[str, StoredRow]:
    """Return the rows that a file has already, if they are rows of this machine as it is."""
    if not os.path.lexists(path):
        return {}
    found = check_rows(path)
    if found.problems:
        first = found.problems[0]
        raise InputError(
            f"{path}: line {first.line}: {first.field or 'the line'}: {first.what}; {first.way_out}, or name another "
            "file (--output)"
        )
    stored = store.read()
    for name, now in (("versions", here.versions), ("machine", here.machine)):
        if any(row.get(name) != now for row in stored.values()):
            raise UsageError(
                f"{path}: has rows of another machine or of other versions ({name}): name another file (--output)"
            )
    return stored


def _measured_row(row: Row, here: _Here, steps: int, timeout: float) -> tuple[StoredRow, str | None]:
    """Return a row with what its step took and what was predicted, and why a part of that is missing."""
    is_xla = row.mode == "xla"
    facts = asdict(row)
    if is_xla:
        del facts["kernels"]
    whole: StoredRow = {
        "key": row.key, **facts, "license": LICENSE, "versions": here.versions, "machine": here.machine,
    }  # fmt: skip
    options: dict[str, Any] = {
        "factory_args": {
            "name": row.model, "optimizer": row.optimizer, "dtype": row.dtype, "metrics": row.metrics,
            "jit_compile": is_xla,
        },
        "jit_compile": is_xla,
    }  # fmt: skip
    try:
        with planned_request(_FACTORY, row.batch_size, steps, options) as (_, request):
            run = run_steps(request, [(row.batch_size, steps)], timeout=timeout).runs[0]
        whole["truth"] = {"runs": [{
            "peak_bytes": list(run.peaks), "before_bytes": [run.before], "first_peak_bytes": run.first,
            "inputs_bytes": run.inputs, "step_seconds": round(run.seconds, 4),
        }]}  # fmt: skip
        method = cast("Method", row.mode if here.device is None else "auto")
        report = estimate(_FACTORY, batch_size=row.batch_size, method=method, device=_known(here.device), **options)
    except KerasmemError as error:
        return whole, str(error)
    figures = {name: getattr(report.bytes, name) for name in _FIGURES}
    answer = {"method": report.settings.method, "method_used": report.settings.method, "error": None, **figures}
    whole["estimates"] = {report.settings.method: {**answer, "formula": report.formula.total_bytes}}
    return whole, None


def _known(card: str | None) -> str | None:
    """Return the card's name where the catalogue has it."""
    try:
        return None if card is None else find_card(card).key
    except UsageError:
        return None


def _keep(store: Rows, row: StoredRow) -> None:
    facts = {name: each for name, each in row.items() if name != "truth"}
    store.put(row["key"], facts, "truth", row["truth"])


def _summary(row: StoredRow, failed: str | None, is_new: bool) -> ContributedRow:
    need, estimates = measured(row), row.get("estimates", {})
    method = next(iter(estimates), None)
    total = None if method is None else estimates[method].get("total")
    return ContributedRow(row["key"], None if need is None else int(need), total, method, failed, is_new)
