"""The files of a data set, as many of them open at a time as the system allows for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kerasmem.hdf5.layout import DataLayout, JoinedLayout
from kerasmem.hdf5.opened import OpenFile
from kerasmem.hdf5.remote.fetcher import RangeFetcher, Traffic
from kerasmem.hdf5.remote.urls import is_url
from kerasmem.hdf5.settings import Access

_MOST_OPEN = 256
_SHARE = 8  # one part in so many of the file descriptors that the process may have; each file takes two


class OpenFiles:
    """The files of a data set, as many of them open at a time as the system allows for.

    Args:
        layout: what they looked like when the sequence was made.
        access: what may be read.

    Attributes:
        remote: whether any of them is behind a URL.
    """

    def __init__(self, layout: DataLayout, access: Access) -> None:
        self._access = access
        self._fetcher: RangeFetcher | None = None
        self._files: list[OpenFile] = []
        self._by_name: list[dict[str, OpenFile]] = []  # the files of each layout, by the datasets that lie in them
        for file, start in zip(layout.files, layout.starts, strict=False):
            by_name: dict[str, OpenFile] = {}
            for part in file.parts if isinstance(file, JoinedLayout) else (file,):
                fetcher = self._start_fetcher if is_url(part.path) else None
                opened = OpenFile(part, access, start if len(layout.files) > 1 else None, fetcher)
                self._files.append(opened)
                by_name |= dict.fromkeys((dataset.name for dataset in part.datasets), opened)
            self._by_name.append(by_name)
        self.remote = any(file.is_remote for file in self._files)
        self._most = most_open()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._open: OrderedDict[OpenFile, int] = OrderedDict()  # how many tasks read from each, the latest used last

    @property
    def bytes_read(self) -> int:
        """Bytes taken from all files so far."""
        return sum(file.bytes_read for file in self._files)

    @property
    def traffic(self) -> Traffic:
        """What came of remote files so far."""
        return sum((file.traffic for file in self._files), Traffic())

    @property
    def open_now(self) -> int:
        """How many are open."""
        return len(self._open)

    @contextmanager
    def use(self, number: int, name: str | None = None) -> Iterator[OpenFile]:
        """Open a file unless it is, and keep it open meanwhile.

        Args:
            number: which of the files that are counted through.
            name: the dataset to be read; datasets may lie in different files beside one another.

        Raises:
            DataError: it cannot be opened, or is not what it was.
        """
        by_name = self._by_name[number]
        file = next(iter(by_name.values())) if name is None else by_name[name]
        with self._free:
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
                self._free.notify()

    def check(self) -> None:
        """Raise if a file that is open is no longer what it was."""
        with self._lock:
            files = list(self._open)
        for file in files:
            file.check()

    def break_off(self) -> None:
        """Have whoever waits for a remote file fail at once."""
        with self._lock:
            fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()

    def close(self) -> None:
        """Close all files. No task may be running."""
        with self._lock:
            self._open.clear()
            for file in self._files:
                file.close()
        self.break_off()

    def _start_fetcher(self) -> RangeFetcher:
        with self._lock:
            if self._fetcher is None:
                self._fetcher = RangeFetcher(self._access.remote)
            return self._fetcher

    def _rest_one(self) -> bool:
        for file, users in self._open.items():
            if not users:
                del self._open[file]
                file.check()
                file.rest()
                return True
        return False


def most_open() -> int:
    """Return how many files of a data set are kept open at a time."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return _MOST_OPEN // _SHARE
    return _MOST_OPEN if limit < 0 else max(16, min(_MOST_OPEN, limit // _SHARE))
