"""Open the files of a data set, within a limit, and the sources of their datasets."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.filters import DecodeError
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, one_line, quote
from kerasmem.hdf5.format.links import DAMAGED
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.fetcher import RangeFetcher, Traffic
from kerasmem.hdf5.io.handle import FileHandle, Handle
from kerasmem.hdf5.io.objects import ObjectInfo
from kerasmem.hdf5.io.ranges import Claim, RemoteHandle
from kerasmem.hdf5.rows.delivery import RowRun
from kerasmem.hdf5.rows.paths import Access
from kerasmem.hdf5.rows.safe_reading import open_source
from kerasmem.hdf5.rows.scan import close_file, find_dataset, open_file, refuse_no_file, rows_of
from kerasmem.hdf5.rows.sources import Source, UnreadableRowsError

_MOST_OPEN = 256
_DESCRIPTOR_SHARE = 8  # 1/8 of the process's file descriptors may be files of one data set; each takes two
CLOSED = "the data was closed while it was being read; end the loop or fit first"
_DAMAGE = "The data is damaged there, or a filter is missing; `rows` can leave these rows out"


@dataclass(eq=False)
class OpenFile:
    """One file and the sources of its datasets. It can be suspended and reopened.

    Args:
        layout: layout of the file when it was scanned. Rows appended later are not read.
        access: access settings.
        first: number of its first row across files; None if it is the only file.
        fetcher: function that returns the fetcher of a remote file; None for a local file.
        traffic: counter of bytes received from stores.
    """

    layout: FileLayout
    access: Access
    first: int | None
    fetcher: Callable[[], RangeFetcher] | None
    traffic: Traffic

    def __post_init__(self) -> None:
        self.is_remote = self.fetcher is not None
        self._known = ObjectInfo(self.layout.size, self.layout.tag)  # version of a remote file
        self._lock = threading.RLock()
        self._file: h5py.File | None = None
        self._handle: Handle | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._sources: dict[str, Source] = {}
        self._change = ""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the local file so far. Rows read through HDF5 count uncompressed."""
        return 0 if self._handle is None else self._handle.bytes_read

    def claims(self, needs: Sequence[tuple[str, RowRun]]) -> list[Claim]:
        """Prefetch runs of rows from an open remote file. Return one claim per run."""
        assert isinstance(self._handle, RemoteHandle)
        return self._handle.claims([list(self.source(name).extents(run)) for name, run in needs])

    def read(self, name: str, work: Callable[[Source], None]) -> None:
        """Call a function that reads rows with the source of a dataset. The file must be open.

        Raises:
            DataError: If the rows cannot be read, or the file has changed.
        """
        try:
            work(self.source(name))
        except UnreadableRowsError as error:
            raise self._refusal(name, error.start, error.stop, str(error)) from error.__cause__

    def source(self, name: str) -> Source:
        """Return the source of a dataset. The file must be open.

        Raises:
            DataError: If the file has changed.
        """
        with self._lock:  # another thread may be checking the file
            if self._change:
                raise DataError(f"{quote(self.layout.path)}: {self._change}")
            return self._sources[name]

    def open(self) -> None:
        """Open the file, or reopen it after `suspend`.

        Raises:
            DataError: If it cannot be opened, or has changed.
        """
        with self._lock:
            if self._handle is None:
                self._open_first()
            elif not self._handle.is_open:
                self._handle.open()
                self.check()

    def check(self) -> None:
        """Refuse a changed file. HDF5 itself returns zeros for missing bytes.

        Raises:
            DataError: If the file was truncated, replaced or written to since it was opened.
        """
        with self._lock:
            handle = self._handle
            if handle is None or not handle.is_open:
                return
            self._change = self._change or handle.changed()
            if self._change:
                raise DataError(f"{quote(self.layout.path)}: {self._change}")

    def suspend(self) -> None:
        """Close the file but keep its sources. No job may be reading from it."""
        with self._lock:
            self._close_file()
            if self._handle is not None:
                self._handle.close()

    def _close_file(self) -> None:
        self._datasets = {}
        file, self._file = self._file, None
        if file is not None:
            close_file(file)

    def _open_first(self) -> None:
        try:
            handle = self._handle = self._open_handle()
            now = (handle.length, handle.status.st_mtime_ns) if isinstance(handle, FileHandle) else None
            if self.layout.time and now != (self.layout.size, self.layout.time):
                raise DataError(
                    f"{quote(self.layout.path)}: the file was changed after its index was made; "
                    "make the index again with `kerasmem data index`"
                )
            file = self._hdf5()
            self.check()  # HDF5 may have opened a newer file of the same name
            for layout in self.layout.datasets:
                self._sources[layout.name] = self._open_source(file, layout, handle)
        except BaseException:
            self.suspend()
            self._handle, self._sources, self._change = None, {}, ""
            raise
        if self.fetcher is not None:
            self._close_file()  # closes HDF5's connection; ranges are fetched without it

    def _open_handle(self) -> Handle:
        if self.fetcher is None:
            refuse_no_file(self.layout.path)
            return FileHandle(self.layout.path, self.layout.size)
        return RemoteHandle(self.layout.path, self._known, self.fetcher(), self.access.remote, self.traffic)

    def _hdf5(self) -> h5py.File:
        if self._file is None:
            path, remote = self.layout.path, self.access.remote
            # Chunks are read as a whole; HDF5's chunk cache would only add a copy.
            self._file = open_file(path, remote, self._known, self.traffic, rdcc_nbytes=0)
        return self._file

    def _dataset(self, layout: DatasetLayout) -> h5py.Dataset:
        """Open a dataset in h5py, and refuse changes other than appended rows."""
        with self._lock:
            if layout.name in self._datasets:
                return self._datasets[layout.name]
            file = self._hdf5()
            dataset = find_dataset(file, layout.name, trust_file=self.access.trust_file)
            try:
                shape, dtype = rows_of(dataset)
                most = layout.rows if dataset.maxshape[0] is not None else shape[0]
                stored = (shape[1:], dtype.str, dataset.chunks)
                same = layout.rows <= shape[0] <= most and stored == (layout.row_shape, layout.dtype, layout.chunks)
            except (TypeError, IndexError):  # no shape, or no NumPy type
                shape, dtype, same = dataset.shape, np.dtype("V"), False
            if not same:
                raise DataError(
                    f"{quote(self.layout.path)}: dataset {quote(layout.name)} has changed since the sequence "
                    f"was made: it was {layout.shape} {layout.dtype} and is {shape} {dtype.str}; "
                    "make the sequence again"
                )
            self._datasets[layout.name] = dataset
            return dataset

    def _open_source(self, file: h5py.File, layout: DatasetLayout, handle: Handle) -> Source:
        find = functools.partial(self._dataset, layout)
        try:
            return open_source(file, find, layout, handle, trust_file=self.access.trust_file)
        except DataError:
            raise
        except (DecodeError, *DAMAGED) as error:
            raise self._refusal(layout.name, 0, layout.rows, one_line(str(error))) from error

    def _refusal(self, name: str, start: int, stop: int, reason: str) -> DataError:
        changed = self._handle.changed() if self._handle is not None else ""
        first = self.first
        whole = "" if first is None else f" (rows {first + start:,} to {first + stop:,} of all files)"
        return DataError(
            f"{quote(self.layout.path)}: rows {start:,} to {stop:,} of dataset {quote(name)}{whole} "
            f"cannot be read: {reason}. {changed or _DAMAGE}"
        )


class OpenFiles:
    """The files of a data set. The number of open ones is limited.

    Args:
        layout: layout of the files when they were scanned.
        access: access settings.

    Attributes:
        starts: first row of each file, followed by the total number of rows.
        remote: whether any file is remote.
        traffic: counter of bytes received from stores.
    """

    def __init__(self, layout: DataLayout, access: Access) -> None:
        self._access = access
        self._fetcher: RangeFetcher | None = None
        self._layout = layout
        self.starts = np.asarray(layout.starts)
        self._files: dict[int, OpenFile] = {}  # files used so far
        self.remote = any(is_url(file.path) for file in layout.files)
        self.traffic = Traffic()
        self._most = most_open()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._closed = False
        self._open: OrderedDict[OpenFile, int] = OrderedDict()  # number of users, the most recently used file last

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files so far."""
        return self.traffic.received + sum(file.bytes_read for file in list(self._files.values()))

    def __getitem__(self, number: int) -> OpenFile:
        """Return a file by number, open or not."""
        if number not in self._files:
            layout = self._layout
            file, first = layout.files[number], layout.starts[number] if len(layout.files) > 1 else None
            fetcher = self._start_fetcher if is_url(file.path) else None
            opened = OpenFile(file, self._access, first, fetcher, self.traffic)
            with self._lock:
                self._files.setdefault(number, opened)
        return self._files[number]

    def numbers(self, rows: Any) -> Any:
        """Return the file number of each row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    @contextlib.contextmanager
    def use(self, file: OpenFile) -> Iterator[None]:
        """Keep a file open within the context.

        Raises:
            DataError: If it cannot be opened, or has changed.
            UsageError: If the data set is closed.
        """
        with self._free:
            while file not in self._open and len(self._open) >= self._most and not self._suspend_one():
                self._free.wait()
            if self._closed:
                raise UsageError(CLOSED)
            self._open[file] = self._open.get(file, 0) + 1
            self._open.move_to_end(file)
        try:
            file.open()
            yield
        finally:
            with self._free:
                self._open[file] -= 1
                self._free.notify_all()

    def check(self, numbers: Sequence[int] | None = None) -> None:
        """Refuse changes to open files, or to the open ones of some file numbers.

        Raises:
            DataError: If a file was truncated, replaced or written to since it was opened.
        """
        with self._lock:
            files = set(self._open)
            if numbers is not None:
                files &= {self._files[number] for number in numbers if number in self._files}
        for file in files:
            file.check()

    def break_off(self) -> None:
        """Make all pending reads of remote files fail immediately."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def close(self) -> None:
        """Wait for jobs in progress and close all files for good."""
        self.break_off()
        with self._free:
            self._closed = True
            while any(self._open.values()):
                self._free.wait()
            self._open.clear()
            for file in self._files.values():
                file.suspend()
        self.break_off()

    def _start_fetcher(self) -> RangeFetcher:
        with self._lock:
            if self._fetcher is None:
                self._fetcher = RangeFetcher(self._access.remote)
            return self._fetcher

    def _suspend_one(self) -> bool:
        file = next((file for file, users in self._open.items() if not users), None)
        if file is None:
            return False
        del self._open[file]
        file.check()
        file.suspend()
        return True


def most_open() -> int:
    """Return the maximum number of open files of a data set."""
    try:
        import resource
    except ImportError:  # Windows
        return _MOST_OPEN // _DESCRIPTOR_SHARE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit < 0 else max(16, min(_MOST_OPEN, limit // _DESCRIPTOR_SHARE))
