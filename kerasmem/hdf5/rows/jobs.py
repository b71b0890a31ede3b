"""Split the reading of rows into jobs for any number of threads."""

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
from kerasmem.hdf5.rows.delivery import SCATTER_BYTES, Delivery, RowRun, ScatterRead, Slots, WantedRows, slice_slots
from kerasmem.hdf5.rows.open_files import OpenFile, OpenFiles
from kerasmem.hdf5.rows.sources import Outputs


@dataclass(eq=False)
class Job:
    """Reads rows of one dataset from one file, in any thread.

    Args:
        files: the files of the data set.
        file: the file. It stays open while the job runs.
        name: path of the dataset.
        run: the rows, counted within the file.
        outputs: deliveries and arrays.
        claim: claim on the prefetched ranges of a remote file. Defaults to None.
    """

    files: OpenFiles
    file: OpenFile
    name: str
    run: RowRun
    outputs: Outputs
    claim: Claim | None = None

    def __call__(self, scratch: Scratch) -> Slots:
        """Read the rows. Return their slots in the window.

        Raises:
            DataError: If the rows cannot be read.
        """
        try:
            with self.files.use(self.file):
                self.file.read(self.name, lambda source: source.read(self.run, self.outputs, scratch, self.claim))
        finally:
            if self.claim is not None:
                self.claim.release()
        return self.run.slots


Task = Callable[[Scratch], Slots | None]
"""A `Job` or a similar function. It takes the buffers of its thread and returns the slots that it filled."""


def prefetch(jobs: Sequence[Task]) -> None:
    """Queue the ranges of jobs on remote files, in the order of the jobs.

    Raises:
        DataError: If a file cannot be opened, or has changed.
    """
    by_file: dict[OpenFile, list[Job]] = {}
    for job in jobs:
        if isinstance(job, Job) and job.file.is_remote:
            by_file.setdefault(job.file, []).append(job)
    for file, file_jobs in by_file.items():
        with file_jobs[0].files.use(file):
            claims = file.claims([(job.name, job.run) for job in file_jobs])
        for job, claim in zip(file_jobs, claims, strict=True):
            job.claim = claim


@dataclass(eq=False)
class DatasetRows:
    """A dataset across files.

    Args:
        files: the files.
        name: path of the dataset.
    """

    files: OpenFiles
    name: str

    def jobs(self, rows: WantedRows, outputs: Outputs) -> Sequence[Task]:
        """Return jobs that read rows. They may run in any order and concurrently.

        Raises:
            DataError: If a file cannot be opened, or has changed.
        """
        scatter_jobs = self._plan_scatter(rows, *outputs[0]) if len(outputs) == 1 else None
        return self.run_jobs(rows.runs(), outputs) if scatter_jobs is None else scatter_jobs

    def run_jobs(self, runs: Sequence[RowRun], outputs: Outputs) -> list[Job]:
        """Return a job for each run of rows. No run spans two files."""
        jobs = []
        for run in runs:
            number = int(self.files.numbers(run.start))
            first = int(self.files.starts[number])
            here = RowRun(run.start - first, run.stop - first, run.picked, run.slots)
            jobs.append(Job(self.files, self.files[number], self.name, here, outputs))
        return jobs

    def _plan_scatter(self, rows: WantedRows, delivery: Delivery, target: np.ndarray) -> list[Task] | None:
        """Return jobs that read rows straight into the window, or None if the rows need conversion."""
        if not delivery.plain or not CAN_SCATTER or target[0].nbytes < SCATTER_BYTES:
            return None
        numbers = rows.numbers()
        file_numbers = self.files.numbers(numbers)
        bounds = [0, *(np.flatnonzero(np.diff(file_numbers)) + 1).tolist(), len(file_numbers)]
        jobs: list[Task] = []
        for first, last in itertools.pairwise(bounds):
            file_number = int(file_numbers[first])
            file, file_rows = self.files[file_number], numbers[first:last] - self.files.starts[file_number]
            with self.files.use(file):
                offsets = file.source(self.name).offsets(file_rows)
            if offsets is None:
                return None
            plan = ScatterRead(offsets, slice_slots(rows.slots, first, last), target, file_rows)
            jobs += [functools.partial(self._read_share, file, plan, share) for share in plan.shares()]
        return jobs

    def _read_share(self, file: OpenFile, plan: ScatterRead, share: tuple[int, int], scratch: Scratch) -> Slots:
        with self.files.use(file):
            file.read(self.name, lambda source: source.read_scattered(plan, share))
        return slice_slots(plan.slots, *share)


class ResidentRows:
    """A dataset kept in memory as stored. A file's part is read when one of its rows is first needed.

    Args:
        layout: the dataset across files.
        rows: reader of the dataset.
    """

    def __init__(self, layout: DatasetLayout, rows: DatasetRows) -> None:
        stored = np.dtype(layout.dtype)
        self.values = np.empty(layout.shape, stored)
        self._rows = rows
        self._is_loaded = np.zeros(len(rows.files.starts) - 1, bool)  # by file
        self._delivery = Delivery(Column(layout.name, layout.row_shape, layout.dtype, stored.str))
        self._loading = threading.Lock()

    def jobs(self, rows: WantedRows, outputs: Outputs) -> Sequence[Task]:
        """Return the task that reads missing parts and delivers rows from memory. Remote parts are prefetched."""
        files = self._rows.files
        needed = np.unique(files.numbers(rows.numbers()))
        missing = needed[~self._is_loaded[needed]].tolist()
        parts = [slice(int(files.starts[number]), int(files.starts[number + 1])) for number in missing]
        runs = [RowRun(part.start, part.stop, None, part) for part in parts]
        jobs = self._rows.run_jobs(runs, [(self._delivery, self.values)])
        prefetch(jobs)
        return [functools.partial(self._deliver, dict(zip(missing, jobs, strict=True)), rows, outputs)]

    def _deliver(self, missing: Mapping[int, Job], rows: WantedRows, outputs: Outputs, scratch: Scratch) -> Slots:
        with self._loading:
            for number, job in missing.items():
                if not self._is_loaded[number]:  # not read by another thread
                    job(scratch)
                    self._is_loaded[number] = True
        for delivery, target in outputs:
            delivery.put(self.values, rows.numbers(), target, rows.slots, scratch)
        return rows.slots
