"""Read rows of a dataset through all files, as jobs for any number of threads."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.grid import Grid, ranges
from kerasmem.hdf5.format.layout import DatasetLayout
from kerasmem.hdf5.io.ranges import Claim
from kerasmem.hdf5.rows.delivery import Delivery, Places, RowRun, ScatterRead, WantedRows, can_scatter, part_of
from kerasmem.hdf5.rows.files import OpenFiles
from kerasmem.hdf5.rows.opened import OpenFile
from kerasmem.hdf5.rows.sources import Outputs


@dataclass(eq=False)
class Job:
    """A part of a read that any thread may do, with buffers of its own.

    Args:
        files: the files of the data set.
        file: the one that is kept open meanwhile.
        name: the dataset.
        run: the rows, counted within the file.
        outputs: what to make of the rows, and where to put them.
        claim: ranges of a remote file that were prefetched.
    """

    files: OpenFiles
    file: OpenFile
    name: str
    run: RowRun
    outputs: Outputs
    claim: Claim | None = None

    def __call__(self, scratch: Scratch) -> Places:
        """Read the rows. Return their places.

        Raises:
            DataError: If they cannot be read.
        """
        try:
            with self.files.use(self.file):
                self.file.read(self.name, lambda source: source.read(self.run, self.outputs, scratch, self.claim))
        finally:
            if self.claim is not None:
                self.claim.release()
        return self.run.places


Task = Callable[[Scratch], Places | None]
"""A `Job`, or another part of a read that any thread may do with its own buffers. It returns the places it filled."""


def prefetch(jobs: Sequence[Task]) -> None:
    """Fetch the ranges of jobs that read remote files, in this order.

    Raises:
        DataError: If a file cannot be opened, or is not what it was.
    """
    by_file: dict[OpenFile, list[Job]] = {}
    for job in jobs:
        if isinstance(job, Job) and job.file.is_remote:
            by_file.setdefault(job.file, []).append(job)
    for file, there in by_file.items():
        with there[0].files.use(file):
            claims = file.claims([(job.name, job.run) for job in there])
        for job, claim in zip(there, claims, strict=True):
            job.claim = claim


@dataclass(eq=False)
class DatasetRows:
    """A dataset through all files.

    Args:
        files: the files.
        name: the dataset.
    """

    files: OpenFiles
    name: str

    def jobs(self, rows: WantedRows, outputs: Outputs) -> Sequence[Task]:
        """Return the jobs that read rows. They may run in any order and at once.

        Raises:
            DataError: If a file has gone or has changed.
        """
        scattered = self._scattered(rows, *outputs[0]) if len(outputs) == 1 else None
        return self.run_jobs(rows.runs, outputs) if scattered is None else scattered

    def run_jobs(self, runs: Sequence[RowRun], outputs: Outputs) -> list[Job]:
        """Return the jobs that read runs of rows, one a file."""
        return [
            Job(self.files, self.files[number], self.name, here, outputs)
            for run in runs
            for number, here in self._parts(run)
        ]

    def _parts(self, run: RowRun) -> Iterator[tuple[int, RowRun]]:
        """Yield the part of a run in each file, counted within it."""
        starts = self.files.starts
        number = int(self.files.numbers(run.start))
        while run.start < run.stop:
            first, end = int(starts[number]), int(starts[number + 1])
            here = RowRun(run.start - first, min(run.stop, end) - first, run.picked, run.places)
            rest = RowRun(run.stop, run.stop, None, slice(0))
            if run.stop > end:
                assert isinstance(run.places, slice)  # blocks lie in one file each; only what stays is read across
                here = replace(here, places=part_of(run.places, 0, end - run.start))
                rest = RowRun(end, run.stop, None, part_of(run.places, end - run.start, run.stop - run.start))
            yield number, here
            run, number = rest, number + 1

    def _scattered(self, rows: WantedRows, delivery: Delivery, target: np.ndarray) -> list[Task] | None:
        """Return jobs for rows that lie in the files as they are delivered; None if they do not."""
        if not delivery.plain or not can_scatter(target[0].nbytes):
            return None
        numbers = self.files.numbers(rows.numbers)
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        jobs: list[Task] = []
        for first, last in itertools.pairwise(bounds):
            number = int(numbers[first])
            file, here = self.files[number], rows.numbers[first:last] - self.files.starts[number]
            with self.files.use(file):
                offsets = file.source(self.name).offsets(here)
            if offsets is None:
                return None
            plan = ScatterRead(offsets, part_of(rows.places, first, last), target, here)
            jobs += [functools.partial(self._read_share, file, plan, share) for share in plan.shares()]
        return jobs

    def _read_share(self, file: OpenFile, plan: ScatterRead, share: tuple[int, int], scratch: Scratch) -> Places:
        with self.files.use(file):
            file.read(self.name, lambda source: source.read_scattered(plan, share))
        return part_of(plan.places, *share)


class ResidentRows:
    """A dataset in memory as stored, read part by part as rows are needed.

    Args:
        layout: the dataset through all files.
        grid: the parts.
        rows: the dataset in the files.
    """

    def __init__(self, layout: DatasetLayout, grid: Grid, rows: DatasetRows) -> None:
        stored = np.dtype(layout.dtype)
        self.values = np.empty(layout.shape, stored)
        self._rows = rows
        self._grid = grid
        self._there = np.zeros(int(grid.cell(layout.rows - 1)) + 1, bool)
        self._delivery = Delivery(Column(layout.name, layout.row_shape, layout.dtype, stored.str))
        self._loading = threading.Lock()

    def jobs(self, rows: WantedRows, outputs: Outputs) -> Sequence[Task]:
        """Return the job that loads the missing rows and delivers from memory. Remote rows are prefetched."""
        files = self._rows.files
        needed = np.unique(self._grid.cell(rows.numbers))
        if files.remote and len(needed):  # of each file in one range: what lies between will be needed too
            numbers = files.numbers(self._grid.bounds(needed)[0])
            first = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]])
            last = np.r_[first[1:], len(needed)] - 1
            needed = ranges(needed[first], needed[last] - needed[first] + 1)
        missing = needed[~self._there[needed]]
        runs = []
        for cells in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            if len(cells):
                (start, _), (_, stop) = self._grid.bounds(int(cells[0])), self._grid.bounds(int(cells[-1]))
                stop = min(stop, len(self.values))
                runs.append(RowRun(start, stop, None, slice(start, stop)))
        jobs = self._rows.run_jobs(runs, [(self._delivery, self.values)])
        prefetch(jobs)
        return [functools.partial(self._deliver, jobs, rows, outputs)]

    def _deliver(self, missing: Sequence[Job], rows: WantedRows, outputs: Outputs, scratch: Scratch) -> Places:
        """Run the jobs of missing rows, unless another thread has run such jobs meanwhile, and deliver."""
        with self._loading:
            for job in missing:
                places = job.run.places
                assert isinstance(places, slice)
                cells = slice(int(self._grid.cell(places.start)), int(self._grid.cell(places.stop - 1)) + 1)
                if not self._there[cells].all():
                    job(scratch)
                    self._there[cells] = True
        for delivery, target in outputs:
            delivery.put(self.values, rows.numbers, target, rows.places, scratch)
        return rows.places
