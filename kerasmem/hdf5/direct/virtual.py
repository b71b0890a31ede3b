"""Virtual datasets whose rows lie one after another in other datasets of the same file, read from these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np

from kerasmem.hdf5.direct.delivery import RowRun, Scratch, part_of
from kerasmem.hdf5.direct.sources import Outputs, Source
from kerasmem.hdf5.links import encoded, points_of

_MOST_SEGMENTS = 10_000


@dataclass(frozen=True)
class Segment:
    """Rows of a virtual dataset: where they begin in it, and in which dataset they lie from which row on."""

    start: int
    stop: int
    source: str
    first: int


def find_segments(file: h5py.File, dataset: h5py.Dataset) -> list[Segment] | None:
    """Return the rows of a virtual dataset by the datasets of the file that they lie in, rising.

    None where it is made of anything but whole rows of the same shape and type, one stretch after another without gaps.
    """
    creation = dataset.id.get_create_plist()
    count = creation.get_virtual_count()
    if not 0 < count <= _MOST_SEGMENTS:
        return None
    segments = []
    for number in range(count):
        name = creation.get_virtual_dsetname(number)
        there = file.get(encoded(name)) if creation.get_virtual_filename(number) == "." else None
        if not isinstance(there, h5py.Dataset) or there.dtype != dataset.dtype or "%" in name:
            return None
        rows = _whole_rows(creation.get_virtual_vspace(number), dataset.shape)
        taken = _whole_rows(creation.get_virtual_srcspace(number), there.shape)
        if rows is None or taken is None or rows[1] - rows[0] != taken[1] - taken[0]:
            return None
        segments.append(Segment(*rows, name, taken[0]))
    segments.sort(key=lambda segment: segment.start)
    bounds = [0, *(segment.stop for segment in segments)]
    whole = [segment.start for segment in segments] == bounds[:-1] and bounds[-1] == dataset.shape[0]
    return segments if whole else None


def _whole_rows(space: Any, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the first row of a selection and the one after its last, where it is of whole rows without a gap."""
    if not shape:
        return None
    if space.get_select_type() == h5py.h5s.SEL_ALL:  # whose extent is not stored
        return 0, shape[0]
    points = points_of(space)
    if points < 0:
        return None
    low, high = space.get_select_bounds()
    box = [int(last) - int(first) + 1 for first, last in zip(low, high, strict=True)]
    if prod(box) != points or tuple(box[1:]) != tuple(shape[1:]) or any(low[1:]) or high[0] >= shape[0]:
        return None
    return int(low[0]), int(high[0]) + 1


@dataclass(eq=False)
class SegmentedSource(Source):
    """A virtual dataset that is read from the datasets its rows lie in.

    Args, after those of every source:
        segments: which rows lie where.
        sources: what reads each of them.
    """

    segments: Sequence[Segment]
    sources: Sequence[Source]

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch) -> None:
        """Read rows into the windows."""
        for source, part in self._parts(run):
            source.read(part, outputs, scratch)

    def extents(self, run: RowRun) -> Iterator[tuple[int, int]]:
        """Return where the rows lie."""
        return itertools.chain.from_iterable(source.extents(part) for source, part in self._parts(run))

    def lies_where(self, other: Source) -> bool:
        """Return whether the data known to `other`, made earlier, still lies where it did."""
        if not isinstance(other, SegmentedSource) or list(other.segments) != list(self.segments):
            return False
        return all(now.lies_where(before) for now, before in zip(self.sources, other.sources, strict=True))

    def _parts(self, run: RowRun) -> Iterator[tuple[Source, RowRun]]:
        """Return the parts of a run that lie in one dataset each, counted in that one's rows."""
        for segment, source in zip(self.segments, self.sources, strict=True):
            low, high = max(run.start, segment.start), min(run.stop, segment.stop)
            if low >= high:
                continue
            first, last, picked = low - run.start, high - run.start, None
            if run.picked is not None:
                first, last = np.searchsorted(run.picked, [first, last]).tolist()
                if first == last:
                    continue
                picked = run.picked[first:last] + (run.start - low)
            shift = segment.first - segment.start
            yield source, RowRun(low + shift, high + shift, picked, part_of(run.places, first, last))
