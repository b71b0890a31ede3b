"""A remote file's bytes, as `FileHandle` gives those of a local one, fetched ahead where it was said what comes."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from kerasmem.errors import DataError
from kerasmem.hdf5.layout import shown
from kerasmem.hdf5.remote.access import RemoteAccess
from kerasmem.hdf5.remote.cache import cache_key
from kerasmem.hdf5.remote.failures import Changed, Final
from kerasmem.hdf5.remote.link import Link, Piece, Traffic, Wanted
from kerasmem.hdf5.remote.objects import Look, refuse_changed
from kerasmem.hdf5.remote.ranges import MOST, Extent, join_extents
from kerasmem.hdf5.remote.stores import insist
from kerasmem.hdf5.remote.urls import identity

_mine = threading.local()  # the claim that a thread reads under


class Claim:
    """What one task will read of one file: fetched ahead, and kept in memory until the task is done or dropped.

    Args:
        link: fetches it.
        pieces: the ranges, rising.
    """

    def __init__(self, link: Link, pieces: Sequence[Piece]) -> None:
        self._link = link
        self._pieces = list(pieces)
        self._starts = [piece.start for piece in self._pieces]
        for piece in self._pieces:
            piece.users += 1

    def find(self, at: int) -> Piece | None:
        """Return the range that holds a byte."""
        number = bisect.bisect_right(self._starts, at) - 1
        return self._pieces[number] if number >= 0 and at < self._pieces[number].stop else None

    def release(self) -> None:
        """Let go of the ranges."""
        pieces, self._pieces, self._starts = self._pieces, [], []
        self._link.release(pieces)

    def __enter__(self) -> Claim:
        _mine.claim = self
        return self

    def __exit__(self, *error: object) -> None:
        _mine.claim = None
        self.release()

    def __del__(self) -> None:
        if self._pieces:  # of a task that was dropped
            self._link.drop(self._pieces)


class RemoteHandle:
    """A remote file that any number of threads read at given places.

    Args:
        url: the file.
        known: the version to read; another one is refused.
        link: fetches its bytes.
        access: the settings.
    """

    scatters = False

    def __init__(self, url: str, known: Look, link: Link, access: RemoteAccess) -> None:
        self.path = url
        self.size = self.length = known.size
        self.sample = b""
        self.traffic = Traffic()
        self._link = link
        self._known = known
        self._most = max(1, min(MOST, access.ahead_bytes // 4))
        self._changed = ""
        self._proved = 0  # bytes received up to the last time the version was looked at
        self._wanted = Wanted(link.stores.find(url), known, self.traffic, cache_folder(url, known, access))

    @property
    def bytes_read(self) -> int:
        """Bytes received so far, those of answers that broke off too."""
        return self.traffic.received

    def open(self) -> None:
        """Nothing is to be opened: each range is a request of its own."""

    def close(self) -> None:
        """Nothing is to be closed."""

    def claims(self, needs: Sequence[Sequence[Extent]]) -> list[Claim]:
        """Announce what tasks will read, in their order; return a claim for each.

        Ranges close to one another become one, and tasks that need the same share it.
        """
        pieces = [Piece(self._wanted, low, high) for low, high, _ in join_extents(needs, most=self._most)]
        by_start = sorted(pieces, key=lambda piece: piece.start)
        starts = [piece.start for piece in by_start]
        claims = []
        for need in needs:
            mine = {}
            for start, size in need:
                number = max(0, bisect.bisect_right(starts, start) - 1)
                while size and number < len(by_start) and by_start[number].start < start + size:
                    mine[number] = by_start[number]
                    number += 1
            claims.append(Claim(self._link, [mine[number] for number in sorted(mine)]))
        self._link.announce(pieces)
        return claims

    def read(self, views: Sequence[memoryview], offset: int, size: int) -> None:
        """Fill the views, `size` bytes in all, with what follows `offset`.

        Raises:
            DataError: the store fails, or has another version now.
            EOFError: the file ends before that.
        """
        if offset + size > self.length:
            raise EOFError(f"the file ends at byte {self.length:,}, and {offset + size:,} are needed")
        claim = getattr(_mine, "claim", None)
        at, stop = offset, offset + size
        view, filled, numbers = memoryview(b""), 0, iter(views)
        while at < stop:
            piece = claim.find(at) if claim is not None else None
            # A thread's claim is on one file; whatever was not foreseen is fetched by itself.
            alone = None
            if piece is None or piece.wanted is not self._wanted:
                piece = Piece(self._wanted, at, min(stop, at + self._most))
                alone = Claim(self._link, [piece])
            try:
                data = self._take(piece)[at - piece.start : stop - piece.start]
                at += len(data)
                while len(data):
                    if filled == len(view):
                        view, filled = next(numbers), 0
                    count = min(len(view) - filled, len(data))
                    view[filled : filled + count] = data[:count]
                    filled += count
                    data = data[count:]
            finally:
                if alone is not None:
                    alone.release()

    def scatter(
        self, target: np.ndarray, vectors: np.ndarray, pieces: Iterable[tuple[int, int, int]], row_bytes: int
    ) -> NoReturn:
        """Not for remote files: no kernel puts their rows into place."""
        raise NotImplementedError

    def changed(self) -> str:
        """Return in words what makes the file unfit to be read on; "" where it is as it was."""
        if not self._changed and not self._wanted.seen.proves and self.traffic.received > self._proved:
            received = self.traffic.received
            try:
                self._link.run(insist(lambda: refuse_changed(self._wanted.seen, self._known)))
                self._proved = received
            except Changed as error:
                self._note_change(error)
            except Final as error:
                return f"whether it is still what it was cannot be found out: {error}"
        return self._changed

    def written(self) -> bool:
        """Return False: a remote object does not grow, it is replaced."""
        return False

    def _take(self, piece: Piece) -> memoryview:
        try:
            return self._link.take(piece)
        except Changed as error:
            self._note_change(error)
            raise DataError(f"{shown(self.path)}: {self._changed}") from None
        except Final as error:
            raise DataError(f"{shown(self.path)}: {error}") from None

    def _note_change(self, error: Changed) -> None:
        self._changed = f"the file was replaced or written anew while in use ({error}); make the sequence again"


def cache_folder(url: str, known: Look, access: RemoteAccess) -> str | None:
    """Return the name of a file's folder in the cache; None where there is none, or no version to know it by."""
    if access.cache is None or known.tag is None:
        return None
    options = access.storage_options
    endpoint = options.get("endpoint_url") or dict(options.get("client_kwargs") or {}).get("endpoint_url") or ""
    return cache_key(identity(url), known.tag, known.size, str(endpoint))
