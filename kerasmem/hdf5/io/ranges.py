"""Read a remote file's bytes like a `FileHandle`, with prefetched ranges."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from kerasmem.errors import DataError
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.io.access import RemoteAccess
from kerasmem.hdf5.io.fetcher import RangeFetcher, RangeRequest, Traffic
from kerasmem.hdf5.io.handle import Handle
from kerasmem.hdf5.io.objects import ChangedError, ObjectInfo, PermanentError
from kerasmem.units import KIB, MIB

GAP = 64 * KIB
"""Bytes that nobody needs are fetched along up to here: with 16 requests at a time, 20 ms each and 50 MB/s, a request
more costs as much. That goes for short gaps between long stretches; where the gaps would add up to more than one byte
in `GAP_SHARE`, requests are the lesser evil, for every byte would come several times an epoch."""
GAP_SHARE = 32
MOST = 8 * MIB
"""Bytes of a range: larger ones are cut, so that several parts come at a time."""

Extent = tuple[int, int]
"""Where in a file bytes begin, and how many they are."""


class Claim:
    """The ranges that one task reads of one file, prefetched and kept until it is done or dropped.

    Args:
        fetcher: fetches it.
        requests: the ranges, rising.
        handle: the file.
    """

    def __init__(
        self, fetcher: RangeFetcher, requests: Sequence[RangeRequest], handle: RemoteHandle | None = None
    ) -> None:
        self._fetcher = fetcher
        self._handle = handle
        self._requests = list(requests)
        for request in self._requests:
            request.users += 1

    def find(self, at: int) -> RangeRequest | None:
        """Return the range that holds a byte."""
        number = bisect.bisect_right(self._requests, at, key=lambda request: request.start) - 1
        return self._requests[number] if number >= 0 and at < self._requests[number].stop else None

    def release(self) -> None:
        """Let go of the ranges."""
        requests, self._requests = self._requests, []
        if requests:
            self._fetcher.release(requests)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from `offset` on. Bytes outside the ranges are fetched by themselves."""
        assert self._handle is not None
        self._handle.read(view, offset, self)

    def __del__(self) -> None:
        self.release()  # of a task that was dropped


class RemoteHandle(Handle):
    """A remote file that any number of threads read at given places.

    Args:
        url: the file.
        known: the version to read; another one is refused.
        fetcher: fetches its bytes.
        access: the settings.
        traffic: what came is counted here.
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
        """Announce the needs of tasks in their order. Return a claim for each.

        Ranges close to one another become one, and tasks that need the same share it.
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
        except PermanentError as error:  # it was closed meanwhile
            raise DataError(f"{shown(self.path)}: {error}") from None
        return claims

    def read(self, view: memoryview, offset: int, claim: Claim | None = None) -> None:
        """Fill a view with the bytes from `offset` on, those of a claim if they are among them.

        Raises:
            DataError: If the store fails, or has another version now.
            EOFError: If the file ends before that.
        """
        at, stop = offset, offset + len(view)
        if stop > self.length:
            raise EOFError(f"the file ends at byte {self.length:,}, and {stop:,} are needed")
        while at < stop:
            request = None if claim is None else claim.find(at)
            if request is None:
                request = RangeRequest(self._reader, at, min(stop, at + self._most))
                claim = Claim(self._fetcher, [request])  # released with its last reference
            data = self._result(request)[at - request.start : stop - request.start]
            view[at - offset :][: len(data)] = data
            at += len(data)

    def changed(self) -> str:
        """Return the reason why the file must not be read on; "" if none."""
        return self._changed

    def _result(self, request: RangeRequest) -> memoryview:
        try:
            return self._fetcher.result(request)
        except PermanentError as error:
            if isinstance(error, ChangedError):
                self._changed = str(error)
            raise DataError(f"{shown(self.path)}: {error}") from None


def join_extents(
    needs: Sequence[Sequence[Extent]], *, gap: int = GAP, most: int = MOST
) -> list[tuple[int, int, set[int]]]:
    """Return the ranges to fetch, (first byte, stop, numbers of the needs), in the order of need.

    Args:
        needs: the extents of each need, in the order in which they will be read.
        gap: ranges so close together become one.
        most: bytes of the longest range; a longer one is cut.

    Examples:
        >>> join_extents([[(0, 100), (102, 8)], [(500, 5)], [(110, 5)]], gap=4, most=1000)
        [(0, 115, {0, 2}), (500, 505, {1})]
    """
    extents = sorted((start, start + size, who) for who, need in enumerate(needs) for start, size in need if size)
    joined: list[tuple[int, int, set[int]]] = []
    needed = 0  # bytes of the last range that somebody needs
    for start, stop, who in extents:
        for _, high, users in reversed(joined):
            if high <= start:
                break
            users.add(who)
        if joined:
            low, high, users = joined[-1]
            longer = max(stop, high)
            if start - high <= min(gap, needed // GAP_SHARE) and longer - low <= most:
                joined[-1] = (low, longer, users | {who})
                needed += longer - max(start, high)
                continue
            start = max(start, high)  # they may overlap, and together they would be too long
        for low in range(start, stop, most):
            joined.append((low, min(low + most, stop), {who}))
            needed = joined[-1][1] - low
    return sorted(joined, key=lambda part: (min(part[2]), part[0]))
