"""Contestants in rotation, so that other work on the machine hits all of them; and what raw reads and decodes take."""

from __future__ import annotations

import importlib
import os
import statistics
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from streaming_data import BATCH, MIB, Stored, bytes_read_so_far

Contestant = Callable[[], float]
"""Does its work once and returns bytes a second."""

_PIECE = MIB
CORES = len(os.sched_getaffinity(0))


def rotate(
    contestants: dict[str, Contestant],
    repeats: int,
    before: Callable[[], object] | None = None,
    at_least: float = 0.0,
) -> dict[str, list[float]]:
    """Return each contestant's rates, one a round; every round begins with another of them.

    Args:
        contestants: by name.
        repeats: rounds.
        before: called before each measurement, such as to empty the cache.
        at_least: seconds of a measurement; what is over sooner is done again, and its rate is that of all.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            if before is not None:
                before()
            rates[name].append(_measure(contestants[name], at_least))
    return rates


def _measure(contestant: Contestant, at_least: float) -> float:
    begin, inverse = time.perf_counter(), [1 / contestant()]
    while time.perf_counter() - begin < at_least:
        inverse.append(1 / contestant())
    return 1 / statistics.mean(inverse)


def ratio(ours: list[float], base: list[float], times: float = 1.0) -> dict[str, float]:
    """Return ours over `times` the other: of medians, of the best, and the median of the rounds' own ratios."""
    return {
        "median": round(statistics.median(ours) / statistics.median(base) / times, 4),
        "best": round(max(ours) / max(base) / times, 4),
        "paired": round(statistics.median(a / b for a, b in zip(ours, base, strict=True)) / times, 4),
    }


def rounded(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return rates as GB/s."""
    return {name: [round(rate / 1e9, 4) for rate in each] for name, each in rates.items()}


class Ours:
    """An `H5ChunkSequence` over a file, kept open from epoch to epoch as `fit` keeps it.

    Args:
        stored: the file.
        shuffle: whether in random order.
        settings: further settings of the sequence.
    """

    def __init__(self, stored: Stored, shuffle: bool, **settings: Any) -> None:
        from kerasmem import H5ChunkSequence

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no targets
            self.sequence = H5ChunkSequence(
                stored.path, "x", None, batch_size=BATCH, shuffle=shuffle, memory_budget=stored.budget, **settings
            )
        self._stored, self._shuffle = stored, shuffle
        self.read_ratio: list[float] = []
        self.first_batch: list[float] = []

    def epoch(self) -> float:
        """Go through an epoch; return the bytes delivered a second."""
        before, begin = bytes_read_so_far(), time.perf_counter()
        first, rows = 0.0, 0
        for (batch,) in self.sequence.next_epoch():
            if not rows:
                first = time.perf_counter() - begin
            rows += len(batch)
        seconds = time.perf_counter() - begin
        self.read_ratio.append(round((bytes_read_so_far() - before) / self._stored.stored_bytes, 4))
        self.first_batch.append(round(first, 5))
        if rows != self._stored.rows:
            raise RuntimeError(f"{rows} rows were delivered of {self._stored.rows}")
        return self._stored.delivered_bytes / seconds

    def check(self) -> bool:
        """Go through an epoch, which opens the file and touches all memory.

        Returns:
            Whether every row came once, in order or not as asked for.
        """
        numbers = [batch[:, 0, 0, 0].copy() for (batch,) in self.sequence.next_epoch()]
        if self._stored.dtype != "float32":
            return sum(map(len, numbers)) == self._stored.rows
        found = np.concatenate(numbers)
        every = np.arange(self._stored.rows)
        return np.array_equal(np.sort(found), every) and np.array_equal(found, every) != self._shuffle

    def counted(self) -> int | None:
        """Return the bytes that the reader itself counted, where it does."""
        reader = getattr(getattr(self.sequence, "_live", None), "reader", None)
        return getattr(reader, "bytes_read", None)

    def close(self) -> None:
        """Close the file."""
        self.sequence.close()


class Raw:
    """`os.preadv` of a file's stored bytes in order, nothing else done with them.

    Args:
        stored: the file.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._number = os.open(stored.path, os.O_RDONLY)
        self._pieces = [
            (offset + at, min(_PIECE, size - at))
            for offset, size in sorted(stored.extents)
            for at in range(0, size, _PIECE)
        ]
        largest = max(size for _, size in self._pieces)
        self._window = max(largest, stored.budget // 2)
        self._buffer = memoryview(bytearray(self._window))
        self._small = memoryview(bytearray(largest))

    def contestants(self) -> dict[str, Contestant]:
        """Return the ways to do it, by name."""
        return {
            "raw": self._timed(self._reused),
            "raw, small buffer": self._timed(self._in_cache),
            "raw, fresh memory": self._timed(self._fresh),
            f"raw, {CORES} threads": self._timed(self._threads),
        }

    def close(self) -> None:
        """Close the file."""
        os.close(self._number)

    def _timed(self, work: Callable[[], None]) -> Contestant:
        def run() -> float:
            begin = time.perf_counter()
            work()
            return self._stored.stored_bytes / (time.perf_counter() - begin)

        return run

    def _read(self, view: memoryview, offset: int) -> None:
        got = os.preadv(self._number, [view], offset)
        while got < len(view):
            got += os.preadv(self._number, [view[got:]], offset + got)

    def _reused(self) -> None:
        self._into(self._buffer, iter(self._pieces))

    def _in_cache(self) -> None:
        for offset, size in self._pieces:
            self._read(self._small[:size], offset)

    def _fresh(self) -> None:
        held: list[np.ndarray] = []
        total = 0
        for offset, size in self._pieces:
            if total + size > self._window:
                held, total = [], 0
            array = np.empty(size, np.uint8)
            self._read(memoryview(array), offset)
            held.append(array)
            total += size

    def _threads(self) -> None:
        share = len(self._buffer) // CORES
        pieces = iter(self._pieces)  # taking the next is one step under the interpreter's lock
        threads = [
            threading.Thread(target=self._into, args=(self._buffer[at * share : (at + 1) * share], pieces))
            for at in range(CORES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _into(self, buffer: memoryview, pieces: Iterator[tuple[int, int]]) -> None:
        at = 0
        for offset, size in pieces:
            if at + size > len(buffer):
                at = 0
            self._read(buffer[at : at + size], offset)
            at += size


class Decoding:
    """The decoding of a file's chunks, which are in memory, by one thread or one a core.

    Args:
        stored: a compressed file.
        most: bytes of decoded chunks to take of it.
    """

    def __init__(self, stored: Stored, most: int) -> None:
        self._size = stored.shape.chunk_rows * stored.shape.row_bytes // 4 * np.dtype(stored.dtype).itemsize
        self._itemsize = np.dtype(stored.dtype).itemsize if stored.layout != "blosc" else 1  # blosc shuffles itself
        delivered = stored.shape.chunk_rows * stored.shape.row_bytes
        self._delivered = delivered
        with h5py.File(stored.path, "r") as file:
            chunks = file["x"].id
            count = min(chunks.get_num_chunks(), max(8, most // delivered))
            infos = [chunks.get_chunk_info(number) for number in range(count)]
            self._chunks = [chunks.read_direct_chunk(info.chunk_offset)[1] for info in infos]
        self.library, self._decode = _decoder(stored.layout)
        try:
            self._unshuffle = importlib.import_module("imagecodecs").byteshuffle_decode
        except ImportError:
            self._unshuffle = None
        self.unshuffling = "none" if self._itemsize == 1 else "imagecodecs" if self._unshuffle else "numpy"

    def contestants(self) -> dict[str, Contestant]:
        """Return the ways to do it, by name."""
        return {
            "decode": lambda: self._run(1, unshuffled=True),
            "decode, still shuffled": lambda: self._run(1, unshuffled=False),
            f"decode, {CORES} threads": lambda: self._run(CORES, unshuffled=True),
        }

    def _run(self, count: int, unshuffled: bool) -> float:
        chunks = iter(self._chunks)
        buffers = [np.empty(self._size, np.uint8) for _ in range(2 * count)]

        def work(at: int) -> None:
            out, other = buffers[2 * at], buffers[2 * at + 1]
            for chunk in chunks:
                data = self._decode(chunk, out)
                if unshuffled and self._itemsize > 1:
                    self._unshuffled(np.frombuffer(data, np.uint8), other)

        begin = time.perf_counter()
        threads = [threading.Thread(target=work, args=(at,)) for at in range(1, count)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        return len(self._chunks) * self._delivered / (time.perf_counter() - begin)

    def _unshuffled(self, data: np.ndarray, out: np.ndarray) -> None:
        if self._unshuffle is not None:
            self._unshuffle(data.view(f"u{self._itemsize}"), out=out.view(f"u{self._itemsize}"))
        else:
            np.copyto(out.reshape(-1, self._itemsize), data.reshape(self._itemsize, -1).T)


def _decoder(layout: str) -> tuple[str, Callable[[bytes, np.ndarray], Any]]:
    """Return the decoder that kerasmem uses too, and its name."""
    if layout == "gzip":
        try:
            deflate = importlib.import_module("deflate")
        except ImportError:
            return "zlib", lambda data, out: zlib.decompress(data, bufsize=out.nbytes)
        return "libdeflate", lambda data, out: deflate.zlib_decompress(data, out.nbytes)
    codecs = importlib.import_module("imagecodecs")
    if layout == "zstd":
        return "imagecodecs", lambda data, out: codecs.zstd_decode(data, out=out)
    return "imagecodecs", lambda data, out: codecs.blosc_decode(data, numthreads=1, out=out)
