"""The files of a data set, as many open at a time as the system allows for, and its rows through all of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.grid import Grid, ranges
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout
from kerasmem.hdf5.format.urls import is_url, proves_version, scheme_of
from kerasmem.hdf5.io.fetcher import RangeFetcher, Traffic
from kerasmem.hdf5.io.ranges import Claim
from kerasmem.hdf5.rows.delivery import Delivery, Places, RowRun, ScatterRead, part_of
from kerasmem.hdf5.rows.opened import OpenFile
from kerasmem.hdf5.rows.settings import Access
from kerasmem.hdf5.rows.sources import Outputs

_MOST_OPEN = 256
_SHARE = 8  # one part in so many of the file descriptors that the process may have; each file takes two
CLOSED = "the data was closed while it was being read; end the loop or fit first"

Claims = Sequence[Claim | None]
"""What a task will read of remote files, by the files it lies in; None for a file of this machine."""


class OpenFiles:
    """The files of a data set, as many of them open at a time as the system allows for.

    Args:
        layout: what they looked like when the sequence was made.
        access: what may be read.

    Attributes:
        remote: whether any of them is behind a URL.
        proves_versions: whether each answer of their stores says which version it is of.
        traffic: traffic of remote files so far.
    """

    def __init__(self, layout: DataLayout, access: Access) -> None:
        self._access = access
        self._fetcher: RangeFetcher | None = None
        self._layout = layout
        self._files: dict[int, OpenFile] = {}  # those used so far
        urls = {scheme_of(file.path): file.path for file in layout.files if is_url(file.path)}
        self.remote = bool(urls)
        self.proves_versions = all(proves_version(url) for url in urls.values())
        self.traffic = Traffic()
        self._most = most_open()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._closed = False
        self._unchecked: set[OpenFile] = set()  # remote files put to rest since the last check
        self._open: OrderedDict[OpenFile, int] = OrderedDict()  # how many tasks read from each, the latest used last

    @property
    def bytes_read(self) -> int:
        """Bytes taken from all files so far."""
        return self.traffic.received + sum(file.bytes_read for file in list(self._files.values()))

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[OpenFile]:
        """Open a file unless it is, and keep it open meanwhile.

        Args:
            number: which of the files that are counted through.

        Raises:
            DataError: If it cannot be opened, or is not what it was.
            UsageError: If the files are closed.
        """
        file = self._files.get(number) or self._make(number)
        with self._free:
            if self._closed:
                raise UsageError(CLOSED)
            while file not in self._open and len(self._open) >= self._most and not self._rest_one():
                self._free.wait()
            self._open[file] = self._open.get(file, 0) + 1
            self._open.move_to_end(file)
        try:
            file.open()
            yield file
        finally:
            with self._free:
                self._open[file] -= 1
                self._free.notify_all()

    def check(self) -> None:
        """Raise if an open file was changed."""
        with self._lock:
            files = [*self._open, *self._unchecked]
            self._unchecked.clear()
        for file in files:
            file.check()

    def break_off(self) -> None:
        """Make everyone who waits for a remote file fail at once."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def close(self) -> None:
        """Close all files for good, after the tasks that read from them."""
        self.break_off()
        with self._free:
            self._closed = True
            while any(self._open.values()):
                self._free.wait()
            self._open.clear()
            for file in self._files.values():
                file.close()
        self.break_off()

    def _make(self, number: int) -> OpenFile:
        layout = self._layout
        file, start = layout.files[number], layout.starts[number]
        indexed = None if layout.index is None else layout.index.file(number)
        fetcher = self._start_fetcher if is_url(file.path) else None
        first = start if len(layout.files) > 1 else None
        made = OpenFile(file, self._access, first, fetcher, indexed, self.traffic)
        with self._lock:
            return self._files.setdefault(number, made)

    def _start_fetcher(self) -> RangeFetcher:
        with self._lock:
            if self._fetcher is None:
                self._fetcher = RangeFetcher(self._access.remote)
            return self._fetcher

    def _rest_one(self) -> bool:
        file = next((file for file, users in self._open.items() if not users), None)
        if file is None:
            return False
        del self._open[file]
        if file.is_remote:
            self._unchecked.add(file)  # a request under the lock would hold up `close`
        else:
            file.check()
        file.rest()
        return True


def most_open() -> int:
    """Return how many files of a data set are kept open at a time."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return _MOST_OPEN // _SHARE
    return _MOST_OPEN if limit < 0 else max(16, min(_MOST_OPEN, limit // _SHARE))


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
        """Read rows, counted through the files, into the windows, with their `claims`."""
        for (number, here), claim in itertools.zip_longest(self._by_file(run), claims):
            with self._files.use(number) as file, claim or contextlib.nullcontext():
                file.source(self._name).read(here, outputs, scratch)

    def claims(self, runs: Sequence[RowRun]) -> list[Claims]:
        """Prefetch runs of remote files. Return the claims of each run, one a file."""
        parts = [list(self._by_file(run)) for run in runs]
        by_file: dict[int, list[RowRun]] = {}
        for number, here in itertools.chain.from_iterable(parts):
            by_file.setdefault(number, []).append(here)
        found: dict[int, Iterator[Claim | None]] = {}
        for number, there in by_file.items():
            with self._files.use(number) as file:
                found[number] = iter(file.claims(self._name, there))
        return [[next(found[number]) for number, _ in each] for each in parts]

    def file_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the file number of each row."""
        return np.searchsorted(self._starts, rows, side="right") - 1

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

        None if the rows do not lie there as they are.
        """
        files = self.file_of(rows)
        bounds = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(rows)]
        plans = []
        for first, last in itertools.pairwise(bounds):
            number = int(files[first])
            here, start = rows[first:last], int(self._starts[number])
            with self._files.use(number) as file:
                offsets = file.source(self._name).offsets(here - start)
            if offsets is None:
                return None
            plans.append(ScatterRead(offsets, part_of(places, first, last), target, here, start))
        return plans

    def read_scattered(self, plan: ScatterRead, share: tuple[int, int]) -> None:
        """Read a share of a plan."""
        number = int(np.searchsorted(self._starts, plan.start, side="right")) - 1
        with self._files.use(number) as file:
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

    def needs(self, rows: np.ndarray) -> list[tuple[RowRun, Claims]]:
        """Return the missing cells of some rows. Remote cells are prefetched."""
        needed = np.unique(self._grid.cell(rows))
        if self._rows.remote and len(needed):  # of each file in one range: what lies between will be needed too
            files = self._rows.file_of(self._grid.bounds(needed)[0])
            first = np.flatnonzero(np.r_[True, files[1:] != files[:-1]])
            last = np.r_[first[1:], len(needed)] - 1
            needed = ranges(needed[first], needed[last] - needed[first] + 1)
        missing = needed[~self._there[needed]]
        runs = []
        for cells in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            if len(cells):
                (start, _), (_, stop) = self._grid.bounds(int(cells[0])), self._grid.bounds(int(cells[-1]))
                stop = min(stop, len(self.values))
                runs.append(RowRun(start, stop, None, slice(start, stop)))
        claims = self._rows.claims(runs) if self._rows.remote else [()] * len(runs)
        return list(zip(runs, claims, strict=True))

    def load(self, needs: Sequence[tuple[RowRun, Claims]], scratch: Scratch) -> None:
        """Read the result of `needs`, unless it was read meanwhile."""
        with self._loading:
            for run, claims in needs:
                cells = slice(int(self._grid.cell(run.start)), int(self._grid.cell(run.stop - 1)) + 1)
                if not self._there[cells].all():
                    self._rows.read(run, [(self._delivery, self.values)], scratch, claims)
                    self._there[cells] = True
