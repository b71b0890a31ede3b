"""The rows of one dataset, through all files it lies in: read as they are needed, or kept in memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kerasmem.hdf5.columns import Column
from kerasmem.hdf5.direct.delivery import Delivery, Places, RowRun, ScatterRead, Scratch, part_of
from kerasmem.hdf5.direct.sources import Outputs
from kerasmem.hdf5.files import OpenFiles
from kerasmem.hdf5.grid import Grid
from kerasmem.hdf5.layout import DatasetLayout
from kerasmem.hdf5.remote.handle import Claim

Claims = Sequence[Claim | None]
"""What a task will read of remote files, by the files it lies in; None for a file of this machine."""


class DatasetRows:
    """A dataset through all files.

    Args:
        files: the files.
        starts: the first row of each, and last the number of all rows.
        name: the dataset.
    """

    def __init__(self, files: OpenFiles, starts: Sequence[int], name: str) -> None:
        self._files = files
        self._starts = np.asarray(starts)
        self._name = name
        self.remote = files.remote

    def read(self, run: RowRun, outputs: Outputs, scratch: Scratch, claims: Claims = ()) -> None:
        """Read rows, counted through the files, into the windows; `claims` are what `claims` returned for them."""
        for (number, here), claim in itertools.zip_longest(self._by_file(run), claims):
            with self._files.use(number, self._name) as file, claim or contextlib.nullcontext():
                file.source(self._name).read(here, outputs, scratch)

    def claims(self, runs: Sequence[RowRun]) -> list[Claims]:
        """Have fetched what will be read of remote files; return for each run the claims, one a file it lies in."""
        parts = [list(self._by_file(run)) for run in runs]
        by_file: dict[int, list[RowRun]] = {}
        for number, here in itertools.chain.from_iterable(parts):
            by_file.setdefault(number, []).append(here)
        found: dict[int, Iterator[Claim | None]] = {}
        for number, there in by_file.items():
            with self._files.use(number, self._name) as file:
                found[number] = iter(file.claims(self._name, there))
        return [[next(found[number]) for number, _ in each] for each in parts]

    def _by_file(self, run: RowRun) -> Iterator[tuple[int, RowRun]]:
        number = int(np.searchsorted(self._starts, run.start, side="right")) - 1
        while run.start < run.stop:
            first, end = int(self._starts[number]), int(self._starts[number + 1])
            here = RowRun(run.start - first, min(run.stop, end) - first, run.picked, run.places)
            rest = RowRun(run.stop, run.stop, None, slice(0))
            if run.stop > end:
                assert isinstance(run.places, slice)  # blocks lie in one file each; only what stays is read across
                here = replace(here, places=part_of(run.places, 0, end - run.start))
                rest = RowRun(end, run.stop, None, part_of(run.places, end - run.start, run.stop - run.start))
            yield number, here
            run, number = rest, number + 1

    def plan(self, rows: np.ndarray, places: Places, target: np.ndarray) -> list[ScatterRead] | None:
        """Return how to read rows as they lie in the files, a plan for each run of them in one file.

        None where the rows do not lie there as they are.
        """
        files = np.searchsorted(self._starts, rows, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
        plans = []
        for first, last in itertools.pairwise(bounds):
            number = int(files[first])
            here, start = rows[first:last], int(self._starts[number])
            with self._files.use(number, self._name) as file:
                offsets = file.source(self._name).offsets(here - start)
            if offsets is None:
                return None
            plans.append(ScatterRead(offsets, part_of(places, first, last), target, here, start))
        return plans

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int]) -> None:
        """Read a share of what was planned."""
        number = int(np.searchsorted(self._starts, plan.start, side="right")) - 1
        with self._files.use(number, self._name) as file:
            file.source(self._name).read_scattered(plan, share)


class ResidentRows:
    """A dataset in memory as stored, read part by part as rows are needed."""

    def __init__(self, layout: DatasetLayout, grid: Grid, rows: DatasetRows) -> None:
        stored = np.dtype(layout.dtype)
        self.values = np.empty(layout.shape, stored)
        self._rows = rows
        self._grid = grid
        self._there = np.zeros(int(grid.cell(layout.rows - 1)) + 1, bool)
        self._delivery = Delivery(Column(layout.name, layout.row_shape, layout.dtype, stored.str))
        self._loading = threading.Lock()

    def load(self, rows: np.ndarray, scratch: Scratch) -> None:
        """Read what is still missing of the cells in which the rows lie."""
        with self._loading:
            needed = np.unique(self._grid.cell(rows))
            if self._rows.remote and len(needed):  # in one range: what lies between will be needed too
                needed = np.arange(needed[0], needed[-1] + 1)
            missing = needed[~self._there[needed]]
            breaks = np.flatnonzero(np.diff(missing) > 1) + 1
            for cells in np.split(missing, breaks):
                if len(cells):
                    start = int(self._grid.low(int(cells[0])))
                    stop = min(int(self._grid.high(int(cells[-1]))), len(self.values))
                    run = RowRun(start, stop, None, slice(start, stop))
                    (claims,) = self._rows.claims([run]) if self._rows.remote else [()]
                    self._rows.read(run, [(self._delivery, self.values)], scratch, claims)
                    self._there[cells] = True
