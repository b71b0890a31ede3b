"""Read the bytes of a remote file from prefetched ranges."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import quote
from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.io.fetcher import RangeFetcher, RangeRequest, Traffic
from kerasmem.hdf5.io.handle import Handle
from kerasmem.hdf5.io.objects import ChangedError, ObjectInfo, PermanentError
from kerasmem.units import KIB, MIB

GAP = 64 * KIB
"""Longest gap that is fetched along in bytes. With 16 concurrent requests of 20 ms at 50 MB/s, an additional request
costs as much."""
GAP_SHARE = 32
"""A gap must also be at most 1/32 of the needed bytes before it. Otherwise gaps add up, and bytes are fetched several
times per epoch."""
MOST = 8 * MIB
"""Maximum size of a range in bytes. Longer ones are split, so that their parts are fetched concurrently."""

Extent = tuple[int, int]
"""Offset and size of bytes in a file."""


class Claim:
    """The ranges that one job reads from one file, kept until the job is done or dropped.

    Args:
        fetcher: fetcher of the ranges.
        requests: the ranges, by offset.
        handle: the file. Defaults to None: `read` cannot be called.
    """

    def __init__(
        self, fetcher: RangeFetcher, requests: Sequence[RangeRequest], handle: RemoteHandle | None = None
    ) -> None:
        self._fetcher = fetcher
        self._handle = handle
        self._requests = list(requests)
        for request in self._requests:
            request.users += 1

    def find(self, offset: int) -> RangeRequest | None:
        """Return the range that holds the byte at an offset, or None."""
        number = bisect.bisect_right(self._requests, offset, key=lambda request: request.start) - 1
        return self._requests[number] if number >= 0 and offset < self._requests[number].stop else None

    def release(self) -> None:
        """Release the ranges."""
        requests, self._requests = self._requests, []
        if requests:
            self._fetcher.release(requests)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on. Bytes outside the ranges are fetched separately."""
        assert self._handle is not None
        self._handle.read(view, offset, self)

    def __del__(self) -> None:
        self.release()  # the job was dropped


class RemoteHandle(Handle):
    """A remote file that any number of threads can read at once.

    Args:
        url: URL of the file.
        known: the version to read. Another version is refused.
        fetcher: fetcher of its ranges.
        access: settings for remote files.
        traffic: counter of received bytes.
    """

    def __init__(
        self, url: str, known: ObjectInfo, fetcher: RangeFetcher, access: RemoteAccess, traffic: Traffic
    ) -> None:
        super().__init__(url, known.size)
        self._fetcher = fetcher
        self._most = max(1, min(MOST, access.ahead_bytes // 4))
        self._changed = ""
        self._reader = fetcher.reader(url, known, traffic)

    def claims(self, needs: Sequence[Sequence[Extent]]) -> list[Claim]:
        """Prefetch the extents of jobs, in their order. Return one claim per job.

        Close ranges are joined, and jobs share a range that several need.
        """
        requests: list[RangeRequest] = []
        by_need: list[list[RangeRequest]] = [[] for _ in needs]
        for low, high, users in join_extents(needs, most=self._most):
            requests.append(RangeRequest(self._reader, low, high))
            for user in users:
                by_need[user].append(requests[-1])
        claims = [Claim(self._fetcher, sorted(mine, key=lambda request: request.start), self) for mine in by_need]
        try:
            self._fetcher.prefetch(requests)
        except PermanentError as error:  # closed by another thread
            raise DataError(f"{quote(self.path)}: {error}") from None
        return claims

    def read(self, view: memoryview, offset: int, claim: Claim | None = None) -> None:
        """Fill a view with the bytes from `offset` on, using the ranges of a claim.

        Raises:
            DataError: If the store fails, or has another version.
            EOFError: If the file ends before the last byte.
        """
        position, stop = offset, offset + len(view)
        if stop > self.length:
            raise EOFError(f"the file ends at byte {self.length:,}, and {stop:,} are needed")
        while position < stop:
            request = None if claim is None else claim.find(position)
            if request is None:
                request = RangeRequest(self._reader, position, min(stop, position + self._most))
                claim = Claim(self._fetcher, [request])  # released with its last reference
            data = self._result(request)[position - request.start : stop - request.start]
            view[position - offset :][: len(data)] = data
            position += len(data)

    def changed(self) -> str:
        """Return the reason to stop reading the file, or "" if it is unchanged."""
        return self._changed

    def _result(self, request: RangeRequest) -> memoryview:
        try:
            return self._fetcher.result(request)
        except PermanentError as error:
            if isinstance(error, ChangedError):
                self._changed = str(error)
            raise DataError(f"{quote(self.path)}: {error}") from None


def join_extents(
    needs: Sequence[Sequence[Extent]], *, gap: int = GAP, most: int = MOST
) -> list[tuple[int, int, set[int]]]:
    """Join extents into ranges. Return (first byte, stop, numbers of the needs) for each, in order of need.

    Args:
        needs: extents of each job, in the order in which the jobs run.
        gap: longest gap within a range in bytes. Defaults to 64 KiB.
        most: maximum size of a range in bytes; longer ones are split. Defaults to 8 MiB.

    Examples:
        >>> join_extents([[(0, 100), (102, 8)], [(500, 5)], [(110, 5)]], gap=4, most=1000)
        [(0, 115, {0, 2}), (500, 505, {1})]
    """
    extents = sorted((start, start + size, user) for user, need in enumerate(needs) for start, size in need if size)
    joined: list[tuple[int, int, set[int]]] = []
    needed = 0  # bytes of the last range without its gaps
    for start, stop, user in extents:
        for _, high, users in reversed(joined):
            if high <= start:
                break
            users.add(user)
        if joined:
            low, high, users = joined[-1]
            longer = max(stop, high)
            if start - high <= min(gap, needed // GAP_SHARE) and longer - low <= most:
                joined[-1] = (low, longer, users | {user})
                needed += longer - max(start, high)
                continue
            start = max(start, high)  # overlapping extents that together are too long
        for low in range(start, stop, most):
            joined.append((low, min(low + most, stop), {user}))
            needed = joined[-1][1] - low
    return sorted(joined, key=lambda part: (min(part[2]), part[0]))
