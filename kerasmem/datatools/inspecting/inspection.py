"""`inspect_data`: what is in a file, what it would come to in memory, and how well it streams."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod

import numpy as np

from kerasmem.datatools.inspecting.advice import choose_roles, stream_line
from kerasmem.datatools.inspecting.checksum import checksum
from kerasmem.datatools.inspecting.listing import Contents, Entry, list_contents
from kerasmem.datatools.inspecting.preview import Preview
from kerasmem.datatools.inspecting.results import DatasetReport, Inspection
from kerasmem.datatools.inspecting.rows import read_windows
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.layout import plain_name, shown
from kerasmem.hdf5.settings import Access, read_path, read_whole
from kerasmem.streaming.description import describe_quality

MOST_CLASSES = 1000
"""Different values beyond which whole numbers are taken for something else than labels."""

_AMPLIFIED = 1.5  # bytes read for one needed, from which on a repacked file is worth its while


def inspect_data(
    path: str | os.PathLike[str],
    *,
    x: str | None = None,
    y: str | None = None,
    batch_size: int = 32,
    nan: bool = False,
    verify: bool = False,
    allow_external: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Return what an HDF5 file holds and how well `H5ChunkSequence` would stream it.

    Read are the file's structure and whole numbers that may be labels; the rest only with `nan` or `verify`.

    Args:
        path: the file.
        x: the dataset of the features; None for the one that looks most like them.
        y: that of the targets; None for the same.
        batch_size: rows a batch.
        nan: count NaN and infinity, for which all floating-point datasets are read.
        verify: compare the checksums that `convert_data` stored.
        allow_external: follow what leads into other files.
        progress: called with what goes on, the rows done and all rows.

    Raises:
        DataError: the file cannot be read.
        UsageError: `x` or `y` names none of its datasets.

    Example:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/inspected.h5", "w") as f:
        ...     f["x"], f["y"] = np.zeros((1000, 8), "f4"), np.arange(1000) % 10
        >>> found = inspect_data("/tmp/inspected.h5")
        >>> found.line
        "H5ChunkSequence('/tmp/inspected.h5', x='x', y='y', batch_size=32)"
        >>> found.read_amplification
        1.0
    """
    tell = progress or (lambda what, done, total: None)
    access = Access(allow_external=allow_external)
    contents = list_contents(read_path(path), access)
    batch_size = read_whole("batch_size", batch_size, 1)
    reports = [
        _report(contents, entry, batch_size, nan=nan, verify=verify, access=access, tell=tell)
        for entry in contents.entries
    ]
    notes = [] if contents.complete else [f"only the first {len(contents.entries):,} datasets were looked at"]
    notes += _writer_notes(contents)
    first, second = choose_pair(contents, x, y)
    if first is None:
        return Inspection(contents.path, contents.size, contents.writer, tuple(reports), batch_size, notes=tuple(notes))
    known = [entry for entry in together(contents, first) if entry.name in (first, second)]
    line = stream_line(
        contents.path,
        [(e.name, e.layout.dtype, e.layout.row_shape) for e in known if e.layout],
        batch_size,
        x=first,
        y=second,
    )
    if second is None and ", y=None" not in line:
        raise UsageError(f"y: name the targets that belong to {first!r}")
    if allow_external:
        line = line[:-1] + ", allow_external=True)"
    try:
        preview = Preview(contents.path, first, second, batch_size=batch_size, access=access)
    except UsageError as error:  # chunks beyond any window
        notes.append(str(error))
        return Inspection(
            contents.path,
            contents.size,
            contents.writer,
            tuple(reports),
            batch_size,
            first,
            second,
            line,
            notes=tuple(notes),
        )
    needed, read = preview.reading()
    stream, mixing, advice = preview.describe(), None, ""
    labels = next((report for report in reports if report.name == second), None)
    if second is not None and labels is not None and labels.class_counts is not None:
        quality, advice = preview.mixing(second)
        mixing = quality.to_dict()
        stream += "\n" + describe_quality(quality, shuffle=preview.shuffle)
    if needed and read / needed > _AMPLIFIED:
        why = (
            f"an epoch reads {read / needed:.1f} bytes for each byte needed, as chunks are too large or lie across rows"
        )
        advice = "; ".join(part for part in (advice, f"{why}: kerasmem data repack writes the file anew") if part)
    return Inspection(
        contents.path,
        contents.size,
        contents.writer,
        tuple(reports),
        batch_size,
        first,
        second,
        line,
        stream,
        needed,
        read,
        mixing,
        advice,
        tuple(notes),
    )


def choose_pair(contents: Contents, x: str | None, y: str | None) -> tuple[str | None, str | None]:
    """Return the features and targets of a file, those named or those that look most like them.

    Raises:
        UsageError: a name is none of a dataset that can be trained from.
    """
    usable = {entry.name: entry for entry in contents.usable}
    for option, name in (("x", x), ("y", y)):
        if name is not None and plain_name(name) not in usable:
            entry = next((entry for entry in contents.entries if entry.name == plain_name(name)), None)
            listed = ", ".join(map(shown, list(usable)[:12])) or "nothing that can be trained from"
            why = (
                f"{shown(name)} {entry.problem}"
                if entry is not None
                else f"there is no dataset {shown(name)}; there are {listed}"
            )
            raise UsageError(f"{option}: {why}")
    if not usable:
        return None, None
    x = None if x is None else plain_name(x)
    y = None if y is None else plain_name(y)
    if x is None:
        candidates = together(contents, y) if y is not None else _largest_rows(contents)
        x = choose_roles([_known(entry) for entry in candidates if entry.name != y or len(candidates) == 1])[0]
    if y is None:
        folder = x.rpartition("/")[0]
        rest = [entry for entry in together(contents, x) if entry.name != x]
        near = [entry for entry in rest if entry.name.rpartition("/")[0] == folder] or rest
        y = choose_roles([("x", "<f8", (1 << 20,)), *map(_known, near)])[1] if near else None
    elif usable[y].shape != () and (usable[y].shape or (0,))[0] != (usable[x].shape or (0,))[0]:
        raise UsageError(f"y: {shown(y)} and {shown(x)} differ in their number of rows")
    return x, y


def together(contents: Contents, name: str | None) -> list[Entry]:
    """Return the datasets with as many rows as one of them."""
    rows = next(entry.layout.rows for entry in contents.usable if entry.layout and entry.name == name)
    return [entry for entry in contents.usable if entry.layout and entry.layout.rows == rows]


def count_classes(counts: dict[int, int], values: np.ndarray) -> bool:
    """Add the values of a window to the counts; return False once there are too many different ones to be labels."""
    found, rows = np.unique(values.reshape(len(values)), return_counts=True)
    for value, count in zip(found.tolist(), rows.tolist(), strict=True):
        counts[int(value)] = counts.get(int(value), 0) + count
    return len(counts) <= MOST_CLASSES


def _largest_rows(contents: Contents) -> list[Entry]:
    heaviest = max(contents.usable, key=lambda entry: (prod(entry.shape or ()), entry.name))
    return together(contents, heaviest.name)


def _known(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
    assert entry.layout is not None
    return entry.name, entry.layout.dtype, entry.layout.row_shape


def _report(
    contents: Contents,
    entry: Entry,
    batch_size: int,
    *,
    nan: bool,
    verify: bool,
    access: Access,
    tell: Callable[[str, int, int], None],
) -> DatasetReport:
    layout = entry.layout
    values = None if entry.shape is None else prod(entry.shape)
    if layout is None:
        return DatasetReport(
            entry.name, entry.shape, entry.dtype, "", None, (), entry.stored_bytes, None,
            4 * values if entry.sparse and values is not None else None, None, entry.problem,
        )  # fmt: skip
    assert values is not None
    dtype = np.dtype(layout.dtype)
    counts = nans = infinite = None
    if dtype.kind in "iub" and prod(layout.row_shape) == 1:
        counts = _label_counts(contents.path, entry, access, tell)
    if nan and dtype.kind == "f":
        nans = infinite = 0
        for first, window in read_windows([contents.path], [entry.name], access=access):
            nans += int(np.count_nonzero(np.isnan(window[entry.name])))
            infinite += int(np.count_nonzero(np.isinf(window[entry.name])))
            tell(f"counting NaN in {entry.name}", first + len(window[entry.name]), layout.rows)
    state = ""
    if verify and entry.checksum is not None:
        tell(f"summing up {entry.name}", 0, layout.rows)
        state = "right" if checksum(contents.path, entry.name) == entry.checksum else "wrong"
    order = "big-endian " if dtype.byteorder == ">" else ""
    return DatasetReport(
        name=entry.name,
        shape=layout.shape,
        dtype=order + dtype.newbyteorder("=").name,
        storage=layout.storage,
        chunks=layout.chunks,
        filters=layout.filters,
        stored_bytes=layout.stored_bytes,
        value_bytes=values * dtype.itemsize,
        float32_bytes=4 * values,
        batch_bytes=4 * prod(layout.row_shape) * min(batch_size, layout.rows),
        class_names=entry.class_names,
        class_counts=counts,
        nan_count=nans,
        infinite_count=infinite,
        checksum=state,
    )


def _label_counts(
    path: str, entry: Entry, access: Access, tell: Callable[[str, int, int], None]
) -> dict[str, int] | None:
    counts: dict[int, int] = {}
    try:
        for first, window in read_windows([path], [entry.name], access=access):
            if not count_classes(counts, window[entry.name]):
                return None
            tell(
                f"counting classes in {entry.name}",
                first + len(window[entry.name]),
                entry.layout.rows if entry.layout else 0,
            )
    except DataError:
        return None
    names = entry.class_names or ()
    return {names[value] if 0 <= value < len(names) else str(value): counts[value] for value in sorted(counts)}


def _writer_notes(contents: Contents) -> list[str]:
    notes = {
        "MATLAB": "MATLAB counts axes from the other end: its last axis is the first here, which counts the rows",
        "AnnData": "cells are rows; a column of text in obs is stored as codes (NAME/codes), which can be targets",
        "pandas": "a fixed-format frame lies in its block*_values, a block a type; tables of the table format have "
        "to be converted",
    }
    return [text for writer, text in notes.items() if contents.writer.startswith(writer)]
