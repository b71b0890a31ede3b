"""Convert in parts: an executor writes the parts, and the index of all comes last."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from kerasmem.datatools import indexing
from kerasmem.datatools.planning import WritePlan, make_plan
from kerasmem.datatools.reports import ignore_progress
from kerasmem.datatools.settings import ReadOptions, WriteSettings, read_output, refuse_outputs
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.datatools.writing import PARTIAL, Outcome, RunOptions, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.files import open_kept, read_json, replacing
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.access import RemoteAccess, read_remote
from kerasmem.hdf5.io.remote_file import RemoteFile, expand, put_file, refuse_web, remove_file
from kerasmem.hdf5.rows.settings import INDEX_SUFFIX, read_place
from kerasmem.processes.executors import run_tasks

PART_SIZE = "1GiB"
_PART = re.compile(r"part-\d{5,}\.h5")


def is_index(output: Any, executor: Executor | None) -> bool:
    """Return whether a conversion writes parts and an index."""
    named = isinstance(output, (str, os.PathLike)) and os.fsdecode(output).endswith(INDEX_SUFFIX)
    return named or executor is not None


def read_index(output: Any, settings: WriteSettings) -> str:
    """Return the index to be written, a path or a URL.

    Raises:
        UsageError: If it cannot be one, or the settings need all rows in one place.
    """
    whole = {
        "shuffle": (settings.shuffle, "H5ChunkSequence shuffles as it reads"),
        "split": (settings.splits, "H5ChunkSequence(rows=…) takes a part of the rows"),
    }
    for name, (given, instead) in whole.items():
        if given:
            problem = f"{name}: needs all rows in one place, and an index has parts"
            raise UsageError(f"{problem}. Name a file that ends with .h5, or leave {name} out: {instead}.")
    target = read_place(output)
    if not target.endswith(INDEX_SUFFIX):
        name = f"parts/train{INDEX_SUFFIX}"
        raise UsageError(f"output: an executor writes parts and an index of them. Name the index, such as {name}.")
    if not is_url(target):
        return read_output(target)
    refuse_web(target)
    return target


class _Part(NamedTuple):
    source: RowSource
    output: str


def write_parts(
    source: RowSource, plan: WritePlan, settings: WriteSettings, options: ReadOptions, target: str, run: RunOptions
) -> Outcome:
    """Write a source's rows to files beside an index, and the index.

    Finished parts of an interrupted run are kept.

    Args:
        source: what is read.
        plan: what would be written in one file.
        settings: compression.
        options: how sources are read.
        target: the index, a path or a URL.
        run: options.
    """
    remote = read_remote(run.remote)
    bounds = part_bounds(source, max(1, run.part_bytes // plan.row_bytes))
    folder = target.rsplit("/", 1)[0] if is_url(target) else os.path.dirname(target)
    outputs = [f"{folder}/part-{number:05}.h5" for number in range(len(bounds) - 1)]
    state_path = target + PARTIAL
    told = _fingerprint(source, plan, settings, bounds)
    state = _read_state(state_path, remote)
    if state is not None and state.get("settings") != told:
        if not run.force:
            raise UsageError(
                f"{shown(target)}: a conversion with other settings, or of sources that have changed since, was "
                "interrupted. Start that one again to finish it, or give force=True (--force) to begin again."
            )
        state = None
    if state is None:
        _clear(folder, [target, *outputs], source.paths, remote, force=run.force)
    done = _present(state or {}, outputs, remote)
    _write_state(state_path, told, done, remote)
    left = [number for number in range(len(outputs)) if number not in done]
    before = sum(bounds[number + 1] - bounds[number] for number in done)
    parts = (_Part(source.part(bounds[number], bounds[number + 1]), outputs[number]) for number in left)
    write = functools.partial(
        _write_part, settings=settings, options=replace(options, threads=1),
        run=replace(run, force=True, executor=None, progress=ignore_progress),
    )  # fmt: skip
    for number, outcome in zip(left, run_tasks(run.executor, write, parts), strict=True):
        _check_reached(outputs[number])
        done[number] = outcome
        _write_state(state_path, told, done, remote)
        run.progress("writing", bounds[number + 1], plan.rows)
    names = [field.name for field in plan.datasets]
    index = indexing.index(
        outputs, target, datasets=names, remote=run.remote, executor=run.executor, progress=run.progress
    )
    _remove_state(state_path, remote)
    return Outcome(
        sums=[None] * len(plan.targets),
        stored=np.sum([outcome.stored for outcome in done.values()], axis=0).tolist(),
        size=index.index_bytes + sum(outcome.size for outcome in done.values()),
        inexact=sum((Counter(outcome.inexact) for outcome in done.values()), Counter()),
        losses=sum((Counter(outcome.losses) for outcome in done.values()), Counter()),
        resumed_rows=before,
        most_rows=int(np.diff(bounds).max()),
    )


def _fingerprint(source: RowSource, plan: WritePlan, settings: WriteSettings, bounds: Sequence[int]) -> dict[str, Any]:
    """Return the settings that finished parts depend on."""
    found = {
        "version": 3,
        "sources": source.identity(),
        "parts": bounds,
        "datasets": [[t.field.name, t.field.dtype, t.field.shape, t.chunk_rows] for t in plan.targets],
        "columns": [[field.name, field.dtype, field.class_names, field.unpacked] for field in plan.read],
        "joins": [list(field.columns) for field in plan.datasets],
        "compression": asdict(settings.compression),
    }
    return dict(json.loads(json.dumps(found)))


def _read_state(path: str, access: RemoteAccess) -> dict[str, Any] | None:
    """Return the state that an interrupted conversion left, or None."""
    try:
        if is_url(path):
            with contextlib.closing(RemoteFile(path, access)) as remote:
                data = remote.readall() or b""
        else:
            with open_kept(path) as file:
                data = file.read()
        return dict(read_json(data))
    except (FileNotFoundError, DataError, ValueError, TypeError):
        return None  # a damaged state is none


def _write_state(path: str, settings: Mapping[str, Any], done: Mapping[int, Outcome], access: RemoteAccess) -> None:
    state = {"settings": settings, "parts": {str(number): asdict(each) for number, each in done.items()}}
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        here = os.path.join(folder, "state") if is_url(path) else path
        with replacing(here, durable=True) as file:
            file.write(json.dumps(state).encode())
        if is_url(path):
            put_file(here, path, access)


def _remove_state(path: str, access: RemoteAccess) -> None:
    if not is_url(path):
        os.unlink(path)
        return
    with contextlib.suppress(DataError):  # it may not be deleted, and does no harm
        remove_file(path, access)


def _present(state: Mapping[str, Any], outputs: Sequence[str], access: RemoteAccess) -> dict[int, Outcome]:
    """Return the parts that an interrupted run wrote and that are still there."""
    try:
        found = {int(number): Outcome(**each) for number, each in state.get("parts", {}).items()}
        if found and is_url(outputs[0]):
            there = {path.rsplit("/", 1)[1] for path in _at_url(outputs[0].rsplit("/", 1)[0], access)}
            return {number: each for number, each in found.items() if outputs[number].rsplit("/", 1)[1] in there}
        return {number: each for number, each in found.items() if os.path.exists(outputs[number])}
    except (AttributeError, IndexError, TypeError, ValueError):
        return {}  # another version's, or damaged


def part_bounds(source: RowSource, rows: int) -> list[int]:
    """Return the first row of each part, and the number of rows.

    Parts have about as many rows, `rows` at most where the source can be read from any row; else they begin where it
    can be.
    """
    bounds = np.linspace(0, source.rows, -(-source.rows // rows) + 1).astype(np.int64)
    if source.starts is not None:
        starts = np.array([*source.starts, source.rows])
        bounds = np.unique(starts[np.searchsorted(starts, bounds)])
    return [int(bound) for bound in bounds]


def _clear(folder: str, outputs: Sequence[str], sources: Sequence[str], access: RemoteAccess, *, force: bool) -> None:
    """Refuse to overwrite outputs and parts, or remove old parts with `force`."""
    if is_url(folder):
        if not force and (found := _at_url(folder, access)):
            raise UsageError(f"output: {shown(found[0])} exists already; choose another place, or force=True (--force)")
        return
    present = [
        path for path in glob.glob(f"{glob.escape(folder)}/part-*.h5") if _PART.fullmatch(os.path.basename(path))
    ]
    refuse_outputs([*outputs, *present], sources, force=force)
    for path in present:
        os.unlink(path)


def _at_url(folder: str, access: RemoteAccess) -> list[str]:
    try:
        return sorted(expand(f"{folder}/part-*.h5", access))
    except DataError:
        return []  # or the place cannot be reached, which the first part will tell


def _write_part(part: _Part, settings: WriteSettings, options: ReadOptions, run: RunOptions) -> Outcome:
    """Write a part in a worker, perhaps for the second time."""
    plan = make_plan(part.source, settings, options)
    if not is_url(part.output):
        return write_files(part.source, plan, settings, options.threads, part.output, run)
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        path = os.path.join(folder, "part.h5")
        outcome = write_files(part.source, plan, settings, options.threads, path, run)
        put_file(path, part.output, read_remote(run.remote))
        return outcome


def _check_reached(output: str) -> None:
    if not is_url(output) and not os.path.exists(output):
        raise DataError(f"{shown(output)}: written by a worker, and not visible here; name a shared folder or a URL")
