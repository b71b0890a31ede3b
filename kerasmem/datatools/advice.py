"""Guess the features and targets of a file, and write the line of Python that streams them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from kerasmem.datatools.listing import Entry
from kerasmem.datatools.packing import Packing

_TARGETS = ("y", "label", "labels", "target", "targets", "class", "classes", "y_train", "codes")
_FEATURES = ("x", "image", "images", "data", "features", "x_train", "inputs")

MOST_INPUTS = 16
"""Most columns that a model is expected to take one by one."""

Known = tuple[str, str, tuple[int, ...]]
"""Name, type and row shape of a dataset."""


def known(entry: Entry) -> Known:
    """Return name, type and row shape of a dataset. Packed values count as floating point."""
    packed = entry.packing is not None and entry.packing.scales
    return entry.name, "<f4" if packed else entry.dtype, (entry.shape or (0,))[1:]


def _is_target(name: str) -> bool:
    return _last_part(name) in _TARGETS


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


def choose_roles(datasets: Sequence[Known]) -> tuple[str, str | None]:
    """Return the names of the likely features and targets.

    Args:
        datasets: those that could be either, of equally many rows; at least one.

    Examples:
        >>> choose_roles([("id", "<i8", ()), ("images", "|u1", (28, 28)), ("label", "<i4", ())])
        ('images', 'label')
    """
    rest = [entry for entry in datasets if not _is_target(entry[0])] or list(datasets)
    by_name = [entry for entry in rest if _last_part(entry[0]) in _FEATURES]
    x = max(by_name or rest, key=lambda entry: prod(entry[2]) * np.dtype(entry[1]).itemsize)
    others = [entry for entry in datasets if entry[0] != x[0]]
    folder = x[0].rpartition("/")[0]

    def fitness(entry: Known) -> tuple[bool, bool, bool, bool]:
        name, dtype, shape = entry
        whole = np.dtype(dtype).kind in "iub" and prod(shape) == 1
        return _is_target(name), whole, prod(shape) == 1, name.rpartition("/")[0] == folder

    candidates = [entry for entry in others if fitness(entry)[0] or fitness(entry)[1] or len(others) == 1]
    if not candidates:
        return x[0], None
    return x[0], max(candidates, key=fitness)[0]


def choose_features(datasets: Sequence[Known], x: str, y: str | None) -> list[str]:
    """Return all features that go with the likely ones: columns of a table are one number a row each.

    Args:
        datasets: those of equally many rows.
        x, y: what `choose_roles` gave.

    Examples:
        >>> choose_features([("age", "<f4", ()), ("height", "<f4", ()), ("label", "<i4", ())], "height", "label")
        ['age', 'height']
    """
    shapes = {name: shape for name, _, shape in datasets}
    if x == y or _last_part(x) in _FEATURES or prod(shapes[x]) != 1:
        return [x]
    return [name for name, shape in shapes.items() if name != y and prod(shape) == 1]


def largest_value(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the largest value of pictures, or None if the dataset holds none.

    Args:
        dtype: NumPy's text for the type.
        shape: of a row.
    """
    return {"uint8": 255, "uint16": 65535}.get(np.dtype(dtype).name) if len(shape) >= 2 else None


def stream_line(
    path: str,
    datasets: Sequence[Known],
    batch_size: int,
    *,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    packings: Mapping[str, Packing] | None = None,
) -> str:
    """Return a line of Python that streams a file.

    Args:
        path: the file.
        datasets: those in it that go together.
        batch_size: rows a batch.
        x: the features, several as several inputs; None for a guess, of the targets too.
        y: the targets; None for none.
        packings: the packed datasets.
    """
    packings = packings or {}
    if x is None:
        first, y = choose_roles(datasets)
        x = choose_features(datasets, first, y)
    features = [x] if isinstance(x, str) else list(x)
    if len(features) > MOST_INPUTS:
        features = features[:1]
    known = {name: (dtype, shape) for name, dtype, shape in datasets}
    inputs = features[0] if len(features) == 1 else features
    settings = [f"{path!r}", f"x={inputs!r}", f"y={y!r}", f"batch_size={batch_size}"]
    if y is None:
        settings.append("shuffle=False")
    most = largest_value(*known.get(features[0], ("<f4", ())))
    scales = {name: _scale_text(packings[name]) for name in (*features, y) if name is not None and name in packings}
    if list(scales) == [features[0]] and len(features) == 1:
        settings.append(f"scale={scales[features[0]]}")
    elif scales:
        settings.append("scale={" + ", ".join(f"{name!r}: {scale}" for name, scale in scales.items()) + "}")
    elif most is not None:
        settings.append(f"scale=1 / {most}")
    return f"H5ChunkSequence({', '.join(settings)})"


def _scale_text(packing: Packing) -> str:
    return f"({packing.factor!r}, {packing.offset!r})" if packing.offset else f"{packing.factor!r}"
