"""`kerasmem.data.inspect`: list a file's datasets, their size in memory, and how well they stream."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from kerasmem import checks
from kerasmem.datatools.fields import Packing
from kerasmem.datatools.hdf5_source import find_repetition
from kerasmem.datatools.listing import Column, Contents, Entry, list_contents
from kerasmem.datatools.reports import DatasetReport, Inspection
from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import read_parts
from kerasmem.hdf5.format.layout import plain_name, quote, type_name
from kerasmem.hdf5.rows.paths import Access, read_path
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.streaming.stream_plan import StreamSettings, dataset_names, describe_plan, make_plan

_FEATURES = ("x", "image", "images", "data", "features", "x_train", "inputs")
_LARGEST = {"uint8": 255, "uint16": 65535}  # pixel values

MOST_INPUTS = 16
"""Largest number of columns that are proposed as separate inputs."""


def inspect(
    path: str | os.PathLike[str],
    *,
    x: str | None = None,
    y: str | None = None,
    batch_size: int = 32,
    trust_file: bool = False,
) -> Inspection:
    """Describe the datasets of an HDF5 file and how well it streams. No data is read.

    Args:
        path: the file.
        x: dataset of the features. By default it is guessed from names, types and shapes.
        y: dataset of the targets. By default it is guessed too, and may be absent.
        batch_size: rows per batch. Defaults to 32.
        trust_file: as for `H5ChunkSequence`. Defaults to False.

    Returns:
        An `Inspection`. Its `line` is the line of Python that streams the file; `print` shows all of it.

    Raises:
        DataError: If the file cannot be read.
        UsageError: If `x` or `y` is not the name of a dataset that can be trained from.

    Examples:
        >>> import h5py, kerasmem, numpy as np
        >>> with h5py.File("/tmp/inspected.h5", "w") as f:
        ...     f["x"], f["y"] = np.zeros((1000, 8), "f4"), np.arange(1000) % 10
        >>> kerasmem.data.inspect("/tmp/inspected.h5").line
        "H5ChunkSequence('/tmp/inspected.h5', x='x', y='y', batch_size=32)"
    """
    access = Access(checks.flag("trust_file", trust_file))
    contents = list_contents(read_path(path), access)
    batch_size = checks.whole("batch_size", batch_size)
    notes = [] if contents.complete else [f"only the first {len(contents.entries):,} datasets are listed"]
    contents, repeated = _without_repetition(contents)
    notes += repeated
    sparse = [quote(entry.name) for entry in contents.entries if entry.kind == "csr_matrix"]
    if sparse:
        notes.append(f"{', '.join(sparse[:3])}: sparse; kerasmem data convert writes a sparse matrix dense")
    last_axis = contents.rows_on_last_axis(contents.entries)
    if last_axis:
        notes.append(last_axis)
    features, target = choose_columns(contents, x, y)
    reports = tuple(_report(entry) for entry in contents.entries)
    inspection = Inspection(contents.path, os.path.getsize(contents.path), reports, batch_size, notes=tuple(notes))
    if not features or (last_axis and x is None):
        return inspection
    packings = {name: entry.packing for name, entry in contents.usable.items() if entry.packing is not None}
    notes += [_packing_note(name, packings[name]) for name in (*features, target) if name in packings]
    rows = contents.usable[features[0]].rows
    notes += [
        f"{quote(entry.name)} {entry.shape} is a column of MATLAB; kerasmem data convert writes it as {rows:,} rows"
        for entry in contents.usable.values()
        if entry.is_matlab_column and entry.shape == (1, rows)
    ]
    columns = [entry.column for entry in contents.with_rows_of(features[0])]
    line = stream_line(
        contents.path, columns, features, target, batch_size=batch_size, packings=packings, trust_file=trust_file
    )
    try:
        parts = read_parts(features[0], target, None)
        layout = scan_files([contents.path], dataset_names(parts), access)
        plan = make_plan(layout, parts, StreamSettings(batch_size=batch_size, shuffle=target is not None))
        stream = describe_plan(plan)
    except UsageError as error:  # chunks beyond any window
        stream = ""
        notes.append(str(error))
    return replace(inspection, x=features[0], y=target, line=line, stream=stream, notes=tuple(notes))


def _without_repetition(contents: Contents) -> tuple[Contents, list[str]]:
    """Return the contents with the first group only if groups repeat one layout, and notes about them."""
    repetition = find_repetition(contents.entries)
    if repetition is None:
        return contents, []
    problem = f"is a sample, one of {repetition.title}, with the same layout"
    first = [replace(entry, layout=None, problem=problem) for entry in repetition.first]
    shapes = ", ".join(f"{quote(entry.name)} {entry.shape}" for entry in repetition.stacked if entry.parts)
    ragged = [f"{quote(entry.name)} {entry.problem}" for entry in repetition.stacked if entry.kind == "ragged"]
    note = f"{repetition.title}, repeat one layout, a sample each"
    notes = [f"{note}: kerasmem data convert stacks them to {shapes}" if shapes else note, *ragged]
    return replace(contents, entries=(*first, *repetition.outside)), notes


def _packing_note(name: str, packing: Packing) -> str:
    facts = []
    if packing.scales:
        facts.append(
            f"physical values are stored values × {packing.factor:g} + {packing.offset:g} (netCDF); kerasmem data "
            "convert unpacks them"
        )
    missing = [f"{value:g}" for value in packing.missing]
    missing += [] if packing.low is None else [f"below {packing.low:g}"]
    missing += [] if packing.high is None else [f"above {packing.high:g}"]
    if missing:
        facts.append(f"{', '.join(missing)} means a missing value, and a stream delivers it as a number")
    return f"{quote(name)}: {'; '.join(facts)}"


def choose_columns(contents: Contents, x: str | None, y: str | None) -> tuple[list[str], str | None]:
    """Return the names of a file's features and targets, guessing those that are None.

    Returns:
        Names of the features, [] if there are none, and name of the targets.

    Raises:
        UsageError: If a name is not that of a dataset that can be trained from.
    """
    x = None if x is None else find_entry(contents, "x", x).name
    y = None if y is None else find_entry(contents, "y", y).name
    named = x or y
    if named is None:
        candidates = [entry for entry in contents.usable.values() if entry.kind != "codes"]
        if not candidates:
            return [], None
        named = max(candidates, key=lambda entry: (prod(entry.shape or ()), entry.name)).name
    group = contents.with_rows_of(named)
    if y is not None and all(entry.name != y for entry in group):
        raise UsageError(f"y: {quote(y)} must have as many rows as {quote(named)}")
    return choose_roles([entry.column for entry in group], x, y)


def find_entry(contents: Contents, option: str, name: str) -> Entry:
    """Return a dataset that can be trained from.

    Raises:
        UsageError: If the dataset does not exist. The message begins with `option`.
    """
    usable, plain = contents.usable, plain_name(name)
    if plain in usable:
        return usable[plain]
    for entry in contents.entries:
        if entry.name == plain:
            raise UsageError(f"{option}: {quote(name)} {entry.problem}")
    names = ", ".join(map(quote, list(usable)[:12])) or "none that can be trained from"
    raise UsageError(f"{option}: there is no dataset {quote(name)}; there are {names}")


def _report(entry: Entry) -> DatasetReport:
    layout = entry.layout
    if layout is None:
        return DatasetReport(
            entry.name, entry.shape, entry.dtype, "", None, (), entry.stored_bytes, None, entry.problem
        )
    return DatasetReport(
        name=entry.name,
        shape=layout.shape,
        dtype=type_name(layout.dtype),
        storage=layout.storage,
        chunks=layout.chunks,
        filters=layout.filters,
        stored_bytes=layout.stored_bytes,
        float32_bytes=4 * prod(layout.shape),
        class_names=entry.class_names,
    )


def choose_roles(columns: Sequence[Column], x: str | None = None, y: str | None = None) -> tuple[list[str], str | None]:
    """Guess the features and targets among datasets. Codes of categories are features only if named.

    Args:
        columns: datasets with equally many rows.
        x: name of the features, if known. Otherwise, several columns of single numbers are one feature each.
        y: name of the targets, if known.

    Returns:
        Names of the features, and name of the targets or None.

    Examples:
        >>> choose_roles([Column("id", "<i8", ()), Column("images", "|u1", (28, 28)), Column("label", "<i4", ())])
        (['images'], 'label')
        >>> choose_roles([Column("age", "<f4", ()), Column("height", "<f4", ()), Column("label", "<i4", ())])
        (['age', 'height'], 'label')
    """
    candidates = [column for column in columns if not column.is_codes] or list(columns)
    if x is None:
        rest = [column for column in candidates if column.name != y] or candidates
        rest = [column for column in rest if not column.is_named_target] or rest
        likely = [column for column in rest if column.last_name in _FEATURES] or rest
        first = max(likely, key=lambda column: column.row_bytes)
    else:
        first = next(column for column in columns if column.name == x)
    y = y or _choose_target(columns, first)
    if x is not None or first.name == y or first.last_name in _FEATURES or prod(first.shape) != 1:
        return [first.name], y
    return [column.name for column in candidates if column.name != y and prod(column.shape) == 1], y


def _choose_target(columns: Sequence[Column], x: Column) -> str | None:
    others = [column for column in columns if column.name != x.name]
    siblings = [column for column in others if column.folder == x.folder] or others

    def fitness(column: Column) -> tuple[bool, bool, bool]:
        return column.is_named_target, column.may_be_labels, prod(column.shape) == 1

    likely = siblings if len(siblings) == 1 else [column for column in siblings if any(fitness(column)[:2])]
    return max(likely, key=fitness).name if likely else None


def stream_line(
    path: str,
    columns: Sequence[Column],
    x: Sequence[str],
    y: str | None,
    *,
    batch_size: int = 32,
    packings: Mapping[str, Packing] | None = None,
    trust_file: bool = False,
) -> str:
    """Return a line of Python that streams the file.

    Args:
        path: the file.
        columns: datasets with equally many rows.
        x: names of the features. If there are more than 16, only the first is used.
        y: name of the targets, or None.
        batch_size: rows per batch.
        packings: encodings of packed datasets by name.
        trust_file: whether the file must be trusted.
    """
    features = list(x) if len(x) <= MOST_INPUTS else [x[0]]
    inputs = features[0] if len(features) == 1 else features
    settings = [f"{path!r}", f"x={inputs!r}", f"y={y!r}", f"batch_size={batch_size}"]
    if y is None:
        settings.append("shuffle=False")
    scales = {
        name: (packing.factor, packing.offset)
        for name, packing in (packings or {}).items()
        if packing.scales and name in (*features, y)
    }
    first = next(column for column in columns if column.name == features[0])
    largest = _LARGEST.get(np.dtype(first.dtype).name) if len(first.shape) >= 2 else None
    if len(features) == 1 and list(scales) == features:
        settings.append(f"scale={scales[features[0]]!r}")
    elif scales:
        settings.append(f"scale={scales!r}")
    elif largest is not None:
        settings.append(f"scale=1 / {largest}")
    if trust_file:
        settings.append("trust_file=True")
    return f"H5ChunkSequence({', '.join(settings)})"
