"""`kerasmem.data.inspect`: list a file's datasets, their size in memory, and how well they stream."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from kerasmem import checks
from kerasmem.datatools.advice import choose_features, choose_roles, is_named_target, known, stream_line
from kerasmem.datatools.listing import Contents, Entry, checksums, list_contents
from kerasmem.datatools.packing import Packing
from kerasmem.datatools.repetition import find_repetition
from kerasmem.datatools.reports import DatasetReport, Inspection, Progress, ignore_progress
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import plain_name, shown, type_name
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.hdf5.rows.settings import Access, read_parts, read_path
from kerasmem.streaming.data_source import read_windows
from kerasmem.streaming.plan import StreamSettings, dataset_names, describe_plan, make_plan

MOST_CLASSES = 1000
"""Most different values of labels."""

MOST_COUNTED = 1 << 22
"""Most rows of a file that are read to count classes. Of more rows, runs spread over a dataset are read."""

_RUNS = 16  # of rows in a dataset, where not all are counted


def inspect(
    path: str | os.PathLike[str],
    *,
    x: str | None = None,
    y: str | None = None,
    batch_size: int = 32,
    nan: bool = False,
    verify: bool = False,
    trust_file: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Describe the content of an HDF5 file and how well it streams.

    The file's structure and the targets' classes are read, of very many rows a sample; the rest only with `nan` or
    `verify`.

    Args:
        path: the file.
        x: the dataset of the features; None for the one that looks most like them.
        y: that of the targets; None for the same.
        batch_size: rows a batch.
        nan: count NaN and infinity, for which all floating-point datasets are read.
        verify: compare the checksums that `kerasmem.data.convert` stored.
        trust_file: as for `H5ChunkSequence`.
        progress: called with the step, the rows done and all rows.

    Raises:
        DataError: the file cannot be read.
        UsageError: `x` or `y` names none of its datasets.

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/inspected.h5", "w") as f:
        ...     f["x"], f["y"] = np.zeros((1000, 8), "f4"), np.arange(1000) % 10
        >>> found = inspect("/tmp/inspected.h5")
        >>> found.line
        "H5ChunkSequence('/tmp/inspected.h5', x='x', y='y', batch_size=32)"
    """
    tell = progress or ignore_progress
    access = Access(checks.flag("trust_file", trust_file))
    contents = list_contents(read_path(path), access)
    batch_size = checks.whole("batch_size", batch_size)
    notes = [] if contents.complete else [f"only the first {len(contents.entries):,} datasets were looked at"]
    contents, repeated = _without_repetition(contents)
    notes += repeated
    sparse = [shown(entry.name) for entry in contents.entries if entry.kind == "csr_matrix"]
    if sparse:
        notes.append(f"{', '.join(sparse[:3])}: sparse; kerasmem data convert writes a sparse matrix dense")
    last_axis = contents.rows_on_last_axis(contents.entries)
    if last_axis:
        notes.append(last_axis)
    labels = [name for name, entry in contents.usable.items() if entry.may_be_labels]
    first, second = choose_pair(contents, x, y)
    counted = {name for name in labels if name == second or is_named_target(name)}
    share = MOST_COUNTED // max(1, len(counted))
    reports = [
        _report(
            contents, entry, batch_size, nan=nan, verify=verify, access=access, tell=tell,
            counted=share if entry.name in counted else 0,
        )
        for entry in contents.entries
    ]  # fmt: skip
    found = Inspection(contents.path, contents.size, tuple(reports), batch_size, notes=tuple(notes))
    if first is None or (last_axis and x is None):
        return found
    datasets = [known(entry) for entry in contents.with_rows_of(first)]
    codes = {entry.name for entry in contents.entries if entry.kind == "codes"}
    candidates = [entry for entry in datasets if entry[0] == first or entry[0] not in codes]
    features = [first] if x is not None else choose_features(candidates, first, second)
    packings = {name: entry.packing for name, entry in contents.usable.items() if entry.packing is not None}
    scaled = {name: packing for name, packing in packings.items() if packing.scales}
    line = stream_line(contents.path, datasets, batch_size, x=features, y=second, packings=scaled)
    notes += [_packing_note(name, packings[name]) for name in (*features, second) if name in packings]
    if trust_file:
        line = line[:-1] + ", trust_file=True)"
    found = replace(found, x=first, y=second, line=line, notes=tuple(notes))
    try:
        parts = read_parts(first, second, None)
        layout = scan_files([contents.path], dataset_names(parts), access)
        plan = make_plan(layout, parts, StreamSettings(batch_size=batch_size, shuffle=second is not None))
    except UsageError as error:  # chunks beyond any window
        return replace(found, notes=(*notes, str(error)))
    return replace(found, stream=describe_plan(plan))


def _without_repetition(contents: Contents) -> tuple[Contents, list[str]]:
    """Return the contents with one group of those that repeat its layout, a sample each, and a note about them."""
    repetition = find_repetition(contents.entries)
    if repetition is None:
        return contents, []
    within, others = repetition.divide(contents.entries)
    stacked = repetition.stacked()
    problem = f"is a sample; {len(repetition.groups):,} groups have the same layout"
    first = [entry for entry in within if entry.name.startswith(f"{repetition.groups[0]}/")]
    entries = [*(replace(entry, layout=None, problem=problem) for entry in first), *others]
    shapes = ", ".join(f"{shown(entry.name)} {entry.shape}" for entry in stacked if entry.parts)
    ragged = [f"{shown(entry.name)} {entry.problem}" for entry in stacked if entry.kind == "ragged"]
    note = f"{repetition.title}, repeat one layout, a sample each"
    notes = [f"{note}: kerasmem data convert stacks them to {shapes}" if shapes else note, *ragged]
    return replace(contents, entries=tuple(entries)), notes


def _packing_note(name: str, packing: Packing) -> str:
    """Describe the packing of a dataset and its missing values."""
    facts = []
    if packing.scales:
        facts.append(f"stored values × {packing.factor:g} + {packing.offset:g} are meant (netCDF)")
    missing = [f"{value:g}" for value in packing.missing]
    missing += [] if packing.low is None else [f"below {packing.low:g}"]
    missing += [] if packing.high is None else [f"above {packing.high:g}"]
    if missing:
        facts.append(f"{', '.join(missing)} stands for no value, and a stream delivers it as a number")
    if packing.unsigned:
        facts.append("values are unsigned, and a stream delivers them as signed")
    if packing.scales:
        facts.append("kerasmem data convert unpacks it")
    return f"{shown(name)}: {'; '.join(facts)}"


def choose_pair(contents: Contents, x: str | None, y: str | None) -> tuple[str | None, str | None]:
    """Return the features and targets of a file, those named or those that look most like them.

    Codes of categories may be targets; they are features only if named.

    Raises:
        UsageError: a name is none of a dataset that can be trained from.
    """
    usable = contents.usable
    x, y = (_checked_name(contents, option, name) for option, name in (("x", x), ("y", y)))
    if x is None:
        able = {name: entry for name, entry in usable.items() if entry.kind != "codes"}
        if not able:
            return None, None
        heaviest = y or max(able, key=lambda name: (prod(able[name].shape or ()), name))
        candidates = [entry for entry in contents.with_rows_of(heaviest) if entry.name in able]
        x = choose_roles([known(each) for each in candidates if each.name != y or len(candidates) == 1])[0]
    if y is None:
        folder = x.rpartition("/")[0]
        rest = [each for each in contents.with_rows_of(x) if each.name != x]
        near = [each for each in rest if each.name.rpartition("/")[0] == folder] or rest
        y = choose_roles([("x", "<f8", (1 << 20,)), *map(known, near)])[1] if near else None
    elif usable[y].rows != usable[x].rows:
        raise UsageError(f"y: {shown(y)} and {shown(x)} differ in their number of rows")
    return x, y


def _checked_name(contents: Contents, option: str, name: str | None) -> str | None:
    plain = None if name is None else plain_name(name)
    if name is None or plain in contents.usable:
        return plain
    for entry in contents.entries:
        if entry.name == plain:
            raise UsageError(f"{option}: {shown(name)} {entry.problem}")
    listed = ", ".join(map(shown, list(contents.usable)[:12])) or "nothing that can be trained from"
    raise UsageError(f"{option}: there is no dataset {shown(name)}; there are {listed}")


def count_classes(
    counts: Counter[int], values: np.ndarray, packing: Packing | None = None, most: int = MOST_CLASSES
) -> bool:
    """Add values to the counts, and return whether they are few enough to be labels.

    Values that stand for no value are left out.
    """
    values = values.reshape(len(values))
    if packing is not None:
        values = packing.stored(values)
        values = values[~packing.is_missing(values)]
    found, rows = np.unique(values, return_counts=True)
    counts.update(dict(zip(map(int, found.tolist()), rows.tolist(), strict=True)))
    return len(counts) <= most


def sample_rows(rows: int, chunk: int, most: int) -> np.ndarray | None:
    """Return evenly spread runs of at most `most` rows, or None for all rows.

    Examples:
        >>> sample_rows(100, 10, 32).tolist()[:6]
        [0, 1, 2, 10, 11, 12]
    """
    if rows <= most:
        return None
    chunks = -(-rows // chunk)
    runs = max(1, min(_RUNS, chunks, most))
    starts = np.linspace(0, chunks - 1, runs).astype(np.int64) * chunk
    length = max(1, min(most // runs, int(np.diff(np.r_[starts, rows]).min())))
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _report(
    contents: Contents,
    entry: Entry,
    batch_size: int,
    *,
    nan: bool,
    verify: bool,
    access: Access,
    tell: Progress,
    counted: int,
) -> DatasetReport:
    layout = entry.layout
    values = None if entry.shape is None else prod(entry.shape)
    if layout is None:
        return DatasetReport(
            entry.name, entry.shape, entry.dtype, "", None, (), entry.stored_bytes, None,
            4 * values if entry.kind and values is not None else None, None, entry.problem,
        )  # fmt: skip
    dtype, values = np.dtype(layout.dtype), prod(layout.shape)

    def windows(what: str, rows: np.ndarray | None = None) -> Iterator[np.ndarray]:
        total = layout.rows if rows is None else len(rows)
        for first, window in read_windows([contents.path], [entry.name], access=access, rows=rows):
            yield window[entry.name]
            tell(f"{what} in {entry.name}", first + len(window[entry.name]), total)

    counts = nans = infinite = some = None
    if counted:
        some = sample_rows(layout.rows, layout.chunk_rows, counted)
        counts = _label_counts(entry, windows("counting classes", some))
    if nan and dtype.kind == "f":
        nans = infinite = 0
        for window in windows("counting NaN"):
            nans += int(np.count_nonzero(np.isnan(window)))
            infinite += int(np.count_nonzero(np.isinf(window)))
    state = ""
    if verify and entry.checksum is not None:
        tell(f"summing up {entry.name}", 0, layout.rows)
        state = "right" if checksums(contents.path, [entry.name])[entry.name] == entry.checksum else "wrong"
    return DatasetReport(
        name=entry.name,
        shape=layout.shape,
        dtype=type_name(layout.dtype),
        storage=layout.storage,
        chunks=layout.chunks,
        filters=layout.filters,
        stored_bytes=layout.stored_bytes,
        value_bytes=values * dtype.itemsize,
        float32_bytes=4 * values,
        batch_bytes=4 * prod(layout.row_shape) * min(batch_size, layout.rows),
        class_names=entry.class_names,
        class_counts=counts,
        counted_rows=None if some is None or counts is None else len(some),
        nan_count=nans,
        infinite_count=infinite,
        checksum=state,
    )


def _label_counts(entry: Entry, windows: Iterator[np.ndarray]) -> dict[str, int] | None:
    counts: Counter[int] = Counter()
    try:
        if not all(count_classes(counts, window, entry.packing) for window in windows):
            return None
    except (DataError, UsageError):  # damaged; chunks beyond any window
        return None
    names = entry.class_names or ()
    return {names[value] if 0 <= value < len(names) else str(value): counts[value] for value in sorted(counts)}
