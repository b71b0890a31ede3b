"""The files of a data set, as many open at a time as the system allows for."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.layout import DataLayout
from kerasmem.hdf5.format.urls import is_url
from kerasmem.hdf5.io.fetcher import RangeFetcher, Traffic
from kerasmem.hdf5.rows.opened import OpenFile
from kerasmem.hdf5.rows.settings import Access

_MOST_OPEN = 256
_SHARE = 8  # one part in so many of the file descriptors that the process may have; each file takes two
CLOSED = "the data was closed while it was being read; end the loop or fit first"


class OpenFiles:
    """The files of a data set, as many of them open at a time as the system allows for.

    Args:
        layout: what they looked like when the sequence was made.
        access: what may be read.

    Attributes:
        starts: the first row of each, and last the number of all rows.
        remote: whether any of them is behind a URL.
        traffic: traffic of remote files so far.
    """

    def __init__(self, layout: DataLayout, access: Access) -> None:
        self._access = access
        self._fetcher: RangeFetcher | None = None
        self._layout = layout
        self.starts = np.asarray(layout.starts)
        self._files: dict[int, OpenFile] = {}  # those used so far
        self.remote = any(is_url(file.path) for file in layout.files)
        self.traffic = Traffic()
        self._most = most_open()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._closed = False
        self._open: OrderedDict[OpenFile, int] = OrderedDict()  # how many tasks read from each, the latest used last

    @property
    def bytes_read(self) -> int:
        """Bytes taken from all files so far."""
        return self.traffic.received + sum(file.bytes_read for file in list(self._files.values()))

    def __getitem__(self, number: int) -> OpenFile:
        """Return the handle of a file, open or closed."""
        if number not in self._files:
            layout = self._layout
            file, first = layout.files[number], layout.starts[number] if len(layout.files) > 1 else None
            fetcher = self._start_fetcher if is_url(file.path) else None
            opened = OpenFile(file, self._access, first, fetcher, self.traffic)
            with self._lock:
                self._files.setdefault(number, opened)
        return self._files[number]

    def numbers(self, rows: Any) -> Any:
        """Return the number of the file that each row lies in."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    @contextlib.contextmanager
    def use(self, file: OpenFile) -> Iterator[None]:
        """Open a file unless it is, and keep it open meanwhile.

        Raises:
            DataError: If it cannot be opened, or is not what it was.
            UsageError: If the files are closed.
        """
        with self._free:
            if self._closed:
                raise UsageError(CLOSED)
            while file not in self._open and len(self._open) >= self._most and not self._rest_one():
                self._free.wait()
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
        """Raise if an open file was changed: any, or one of those with these numbers."""
        with self._lock:
            files = set(self._open)
            if numbers is not None:
                files &= {self._files[number] for number in numbers if number in self._files}
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
                file.rest()
        self.break_off()

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
        file.check()
        file.rest()
        return True


def most_open() -> int:
    """Return how many files of a data set are kept open at a time."""
    try:
        import resource
    except ImportError:  # Windows
        return _MOST_OPEN // _SHARE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit < 0 else max(16, min(_MOST_OPEN, limit // _SHARE))
