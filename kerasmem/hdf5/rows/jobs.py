"""Read rows of a dataset through all files, as jobs for any number of threads."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.layout import DatasetLayout
from kerasmem.hdf5.io.handle import CAN_SCATTER
from kerasmem.hdf5.io.ranges import Claim
from kerasmem.hdf5.rows.delivery import SCATTER_BYTES, Delivery, Places, RowRun, ScatterRead, WantedRows, part_of
from kerasmem.hdf5.rows.open_files import OpenFile, OpenFiles
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
        return self.run_jobs(rows.runs(), outputs) if scattered is None else scattered

    def run_jobs(self, runs: Sequence[RowRun], outputs: Outputs) -> list[Job]:
        """Return a job for each run of rows. Each run lies in one file."""
        jobs = []
        for run in runs:
            number = int(self.files.numbers(run.start))
            first = int(self.files.starts[number])
            here = RowRun(run.start - first, run.stop - first, run.picked, run.places)
            jobs.append(Job(self.files, self.files[number], self.name, here, outputs))
        return jobs

    def _scattered(self, rows: WantedRows, delivery: Delivery, target: np.ndarray) -> list[Task] | None:
        """Return jobs for rows that lie in the files as they are delivered; None if they do not."""
        if not delivery.plain or not CAN_SCATTER or target[0].nbytes < SCATTER_BYTES:
            return None
        wanted = rows.numbers()
        numbers = self.files.numbers(wanted)
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        jobs: list[Task] = []
        for first, last in itertools.pairwise(bounds):
            number = int(numbers[first])
            file, here = self.files[number], wanted[first:last] - self.files.starts[number]
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
    """A dataset in memory as stored. The part in a file is read as a whole when one of its rows is needed.

    Args:
        layout: the dataset through all files.
        rows: the dataset in the files.
    """

    def __init__(self, layout: DatasetLayout, rows: DatasetRows) -> None:
        stored = np.dtype(layout.dtype)
        self.values = np.empty(layout.shape, stored)
        self._rows = rows
        self._there = np.zeros(len(rows.files.starts) - 1, bool)
        self._delivery = Delivery(Column(layout.name, layout.row_shape, layout.dtype, stored.str))
        self._loading = threading.Lock()

    def jobs(self, rows: WantedRows, outputs: Outputs) -> Sequence[Task]:
        """Return the job that reads missing parts and delivers from memory. Remote parts are prefetched."""
        files = self._rows.files
        needed = np.unique(files.numbers(rows.numbers()))
        missing = needed[~self._there[needed]].tolist()
        parts = [slice(int(files.starts[number]), int(files.starts[number + 1])) for number in missing]
        runs = [RowRun(part.start, part.stop, None, part) for part in parts]
        jobs = self._rows.run_jobs(runs, [(self._delivery, self.values)])
        prefetch(jobs)
        return [functools.partial(self._deliver, dict(zip(missing, jobs, strict=True)), rows, outputs)]

    def _deliver(self, missing: Mapping[int, Job], rows: WantedRows, outputs: Outputs, scratch: Scratch) -> Places:
        """Read missing parts, unless another thread has read them meanwhile, and deliver."""
        with self._loading:
            for number, job in missing.items():
                if not self._there[number]:
                    job(scratch)
                    self._there[number] = True
        for delivery, target in outputs:
            delivery.put(self.values, rows.numbers(), target, rows.places, scratch)
        return rows.places
