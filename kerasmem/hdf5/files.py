"""The files of a data set, as many of them open at a time as the system allows for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kerasmem.hdf5.direct.runs import RowRun
from kerasmem.hdf5.direct.sources import Source
from kerasmem.hdf5.layout import DataLayout, FileLayout, JoinedLayout
from kerasmem.hdf5.opened import OpenFile
from kerasmem.hdf5.remote.fetcher import RangeFetcher, Traffic
from kerasmem.hdf5.remote.handle import Claim
from kerasmem.hdf5.remote.urls import is_url
from kerasmem.hdf5.settings import Access

_MOST_OPEN = 256
_SHARE = 8  # one part in so many of the file descriptors that the process may have; each file takes two


class JoinedFile:
    """Files whose datasets lie beside one another, with the face of one `OpenFile`.

    Args:
        files: the files.
        layout: of all of them.
    """

    def __init__(self, files: Sequence[OpenFile | JoinedFile], layout: JoinedLayout) -> None:
        self._files = files
        parts = zip(files, layout.parts, strict=True)
        self._by_name = {dataset.name: file for file, part in parts for dataset in part.datasets}

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far."""
        return sum(file.bytes_read for file in self._files)

    @property
    def traffic(self) -> Traffic:
        """What came of remote files so far."""
        return sum((file.traffic for file in self._files), Traffic())

    def claims(self, name: str, runs: Sequence[RowRun]) -> Sequence[Claim | None]:
        """See `OpenFile`."""
        return self._by_name[name].claims(name, runs)

    def source(self, name: str) -> Source:
        """Return what reads a dataset of the open files."""
        return self._by_name[name].source(name)

    def open(self) -> None:
        """Open the files."""
        for file in self._files:
            file.open()

    def check(self) -> None:
        """Raise if a file is no longer what it was."""
        for file in self._files:
            file.check()

    def rest(self) -> None:
        """Give the file descriptors back."""
        for file in self._files:
            file.rest()

    def close(self) -> None:
        """Close the files and forget them."""
        for file in self._files:
            file.close()


def _parts(layout: FileLayout) -> tuple[FileLayout, ...]:
    return layout.parts if isinstance(layout, JoinedLayout) else (layout,)


class OpenFiles:
    """The files of a data set, as many of them open at a time as the system allows for.

    Args:
        layout: what they looked like when the sequence was made.
        access: what may be read.

    Attributes:
        remote: whether any of them is behind a URL.
    """

    def __init__(self, layout: DataLayout, access: Access) -> None:
        several = len(layout.files) > 1
        self.remote = any(is_url(part.path) for file in layout.files for part in _parts(file))
        self._access = access
        self._fetcher: RangeFetcher | None = None
        self._files: list[OpenFile | JoinedFile] = [
            self._make(file, first if several else None)
            for file, first in zip(layout.files, layout.starts, strict=False)
        ]
        self._most = most_open()
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._open: OrderedDict[int, int] = OrderedDict()  # how many tasks read from each, the latest used last

    def _make(self, layout: FileLayout, first: int | None) -> OpenFile | JoinedFile:
        if isinstance(layout, JoinedLayout):
            return JoinedFile([self._make(part, first) for part in layout.parts], layout)
        return OpenFile(layout, self._access, first, self._start_fetcher if is_url(layout.path) else None)

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
    def use(self, number: int) -> Iterator[OpenFile | JoinedFile]:
        """Open a file unless it is, and keep it open meanwhile.

        Raises:
            DataError: it cannot be opened, or is not what it was.
        """
        with self._free:
            while number not in self._open and len(self._open) >= self._most and not self._rest_one():
                self._free.wait()
            self._open[number] = self._open.get(number, 0) + 1
            self._open.move_to_end(number)
        try:
            self._files[number].open()
            yield self._files[number]
        finally:
            with self._free:
                self._open[number] -= 1
                self._free.notify()

    def check(self) -> None:
        """Raise if a file that is open is no longer what it was."""
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self._files[number].check()

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
        for number, users in self._open.items():
            if not users:
                del self._open[number]
                self._files[number].check()
                self._files[number].rest()
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
