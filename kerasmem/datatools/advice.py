"""Guess the features and targets of a file, and write the line of Python that streams them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from kerasmem.datatools.packing import Packing

_TARGETS = ("y", "label", "labels", "target", "targets", "class", "classes", "y_train", "codes")
_FEATURES = ("x", "image", "images", "data", "features", "x_train", "inputs")
_LARGEST = {"uint8": 255, "uint16": 65535}  # value of pictures

MOST_INPUTS = 16
"""Most columns that a model is expected to take one by one."""


class Column(NamedTuple):
    """A dataset by its name, type, row shape, and whether it holds codes of categories."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_codes: bool = False

    @property
    def folder(self) -> str:
        """Path of the group."""
        return self.name.rpartition("/")[0]

    @property
    def last_name(self) -> str:
        """Name in the group, in lower case."""
        return self.name.rpartition("/")[2].lower()

    @property
    def is_named_target(self) -> bool:
        """Whether the name is one that targets usually have."""
        return self.last_name in _TARGETS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def may_be_labels(self) -> bool:
        """Whether a row is one whole number."""
        return prod(self.shape) == 1 and np.dtype(self.dtype).kind in "iub"


def choose_roles(columns: Sequence[Column], x: str | None = None, y: str | None = None) -> tuple[list[str], str | None]:
    """Return the names of the likely features and targets. Codes are features only if named.

    Args:
        columns: datasets of equally many rows.
        x: name of the features, if known. Several columns of numbers are guessed to be a feature each.
        y: name of the targets, if known.

    Examples:
        >>> choose_roles([Column("id", "<i8", ()), Column("images", "|u1", (28, 28)), Column("label", "<i4", ())])
        (['images'], 'label')
        >>> choose_roles([Column("age", "<f4", ()), Column("height", "<f4", ()), Column("label", "<i4", ())])
        (['age', 'height'], 'label')
    """
    able = [column for column in columns if not column.is_codes] or list(columns)
    if x is None:
        rest = [column for column in able if column.name != y] or able
        rest = [column for column in rest if not column.is_named_target] or rest
        likely = [column for column in rest if column.last_name in _FEATURES] or rest
        first = max(likely, key=lambda column: column.row_bytes)
    else:
        first = next(column for column in columns if column.name == x)
    y = y or _choose_target(columns, first)
    if x is not None or first.name == y or first.last_name in _FEATURES or prod(first.shape) != 1:
        return [first.name], y
    return [column.name for column in able if column.name != y and prod(column.shape) == 1], y


def _choose_target(columns: Sequence[Column], x: Column) -> str | None:
    others = [column for column in columns if column.name != x.name]
    near = [column for column in others if column.folder == x.folder] or others

    def fitness(column: Column) -> tuple[bool, bool, bool]:
        return column.is_named_target, column.may_be_labels, prod(column.shape) == 1

    likely = near if len(near) == 1 else [column for column in near if any(fitness(column)[:2])]
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
    """Return a line of Python that streams a file.

    Args:
        path: the file.
        columns: the datasets of equally many rows.
        x: names of the features; only the first of more than 16 is taken.
        y: name of the targets; None for none.
        batch_size: rows a batch.
        packings: how the values of datasets are packed.
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
