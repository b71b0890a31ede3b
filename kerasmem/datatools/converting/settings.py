"""Settings of a conversion, checked before anything is read, and the names of its outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasmem.datatools.converting.encoding import Compression
from kerasmem.datatools.converting.splitting import read_split
from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.settings import read_path


@dataclass(frozen=True)
class WriteSettings:
    """What the result depends on, apart from the sources.

    Args:
        columns: as in `choose_fields`.
        drop: as in `choose_fields`.
        batch_size: rows trained on together, for the size of chunks.
        shuffle: whether rows are written in random order.
        seed: of shuffle and split.
        compression: what is done to chunks.
        memory: bytes.
        keep_float64: write float64 as it is.
        shares: the share of each part by name; one called "" where nothing is split.
        as_groups: whether parts are groups of one file, in place of files.
        stratify: column whose classes every part gets its share of.
        group: column whose groups are not torn apart.
        narrow: write whole numbers in as few bytes as their values allow.

    Raises:
        UsageError: settings contradict each other.
    """

    columns: Mapping[str, str | Sequence[str]] | None
    drop: tuple[str, ...]
    batch_size: int
    shuffle: bool
    seed: int
    compression: Compression
    memory: int
    keep_float64: bool
    shares: Mapping[str, float] = field(default_factory=lambda: read_split(None))
    as_groups: bool = False
    stratify: str | None = None
    group: str | None = None
    narrow: bool = False

    def __post_init__(self) -> None:
        if self.stratify is not None and self.group is not None:
            raise UsageError(
                "stratify and group contradict each other: a group goes whole, whatever its classes; choose one"
            )
        for name, value in (("stratify", self.stratify), ("group", self.group)):
            if value is not None and not self.splits:
                raise UsageError(f"{name}: says how to split, and nothing is split; give split too, such as '0.8,0.2'")
        if self.as_groups and not self.splits:
            raise UsageError("split_as: nothing is split; give split too, such as '0.8,0.2'")

    @property
    def splits(self) -> bool:
        """Whether there are several parts."""
        return len(self.shares) > 1

    @property
    def key(self) -> str | None:
        """The column that decides where rows go, if there is one."""
        return self.stratify or self.group


def read_output(output: Any) -> str:
    """Return the absolute path of an output whose folder exists.

    Raises:
        UsageError: it cannot be written there.
    """
    path = read_path(output)
    if os.path.isdir(path):
        raise UsageError(f"output: {shown(path)} is a folder; name a file in it")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise UsageError(f"output: the folder {shown(folder)} does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"output: no permission to write in {shown(folder)}")
    return path


def output_paths(output: str, settings: WriteSettings) -> tuple[str, ...]:
    """Return the files that are written: out-train.h5 and so on where there is a file a part."""
    if not settings.splits or settings.as_groups:
        return (output,)
    stem, suffix = os.path.splitext(output)
    return tuple(f"{stem}-{name}{suffix}" for name in settings.shares)


def refuse_outputs(outputs: Sequence[str], sources: Sequence[str], *, force: bool) -> None:
    """Refuse to write onto a source, and onto an existing file without `force`.

    Raises:
        UsageError: that would happen.
    """
    real = [os.path.realpath(path) for path in sources]
    for output in outputs:
        here = os.path.realpath(output)
        for path in real:
            same = os.path.exists(here) and os.path.exists(path) and os.path.samefile(here, path)
            if here == path or same or (os.path.isdir(path) and here.startswith(path + os.sep)):
                raise UsageError(f"output: {shown(output)} is, or lies in, what is read; choose another name")
        if os.path.isdir(output):
            raise UsageError(f"output: {shown(output)} is a folder; choose another name")
        if os.path.lexists(output) and not force:
            raise UsageError(
                f"output: {shown(output)} exists already; choose another name, or give force=True (--force)"
            )
