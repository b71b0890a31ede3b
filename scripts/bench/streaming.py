#!/usr/bin/env python3
"""Measure streaming from HDF5 against raw reads, decoders, h5py and other loaders, all in one run.

    python scripts/bench/streaming.py [--megabytes 512] [--repeats 5] [--seconds 3] [--only PART …] [--folder DIR]
                                      [--peers PYTHON …]

h5py writes files of about `--megabytes` of float32 rows of 3 KB and of 150 KB into a temporary folder. They are read
with a `memory_budget` of a quarter of that (or of 12 batches). Batches have 64 rows. Contestants take turns, each round
beginning with another one, and ratios are of medians. "Ours" is one open `H5ChunkSequence` whose epochs are iterated
with `next_epoch()` from the first request to the last batch, so that the wait for the first window counts.

Warm: the file is in the page cache. Cold: `posix_fadvise(DONTNEED)` after `fsync` before each measurement; the cache of
a virtual machine's host stays.

- contiguous, chunked: float32 against one thread's `os.preadv` of the same bytes in order, 1 MiB at a time, into a
  reused buffer of half the budget.
- packed: gzip(4)+shuffle, zstd(3)+shuffle and blosc(lz4)+shuffle against cores × one thread's decoding of the same
  chunks in memory, with the decoder that kerasmem uses.
- fancy: against h5py's `data[sorted random rows]`, for `--seconds` a round.
- peers: against other loaders, see streaming_peers.py. `--peers` are Pythons with torch, grain or tensorflow-io.
- mixing: label entropy of batches and accuracy over seeds, on class-sorted data with a tenth of it as the budget.
- fit: the time of a batch in `fit` beyond the train step of a small CNN.

A full run writes results/streaming.json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import h5py
import numpy as np
from common import MIB, environment, write_results
from streaming_data import (
    BATCH,
    NARROW,
    WIDE,
    Contestant,
    Stored,
    bytes_read_so_far,
    evict,
    gigabytes,
    goal,
    load,
    make,
    ratio,
    rotate,
)

PARTS = ("contiguous", "chunked", "packed", "fancy", "peers", "mixing", "fit")
CORES = len(os.sched_getaffinity(0))
SHUFFLED, IN_ORDER = "ours, shuffled", "ours, in order"
PIECE = MIB
DECODED = 64 * MIB  # of a file's chunks are decoded to time a decoder
PACKED = (
    (NARROW, "gzip", "float32"), (NARROW, "gzip", "uint8"), (NARROW, "zstd", "float32"), (NARROW, "blosc", "float32"),
    (WIDE, "gzip", "float32"), (WIDE, "zstd", "float32"),
)  # fmt: skip
Row = dict[str, Any]


class Ours:
    """An `H5ChunkSequence` over a file, kept open from epoch to epoch as `fit` keeps it."""

    def __init__(self, stored: Stored, shuffle: bool = True) -> None:
        from kerasmem import H5ChunkSequence

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing targets
            self.sequence = H5ChunkSequence(
                stored.path, "x", None, batch_size=BATCH, shuffle=shuffle, memory_budget=stored.budget
            )
        self.stored, self.shuffle = stored, shuffle
        self.read_ratio: list[float] = []

    def epoch(self) -> float:
        """Iterate one epoch and return the bytes delivered a second."""
        before, begin, rows = bytes_read_so_far(), time.perf_counter(), 0
        for (batch,) in self.sequence.next_epoch():
            rows += len(batch)
        seconds = time.perf_counter() - begin
        self.read_ratio.append(round((bytes_read_so_far() - before) / self.stored.stored_bytes, 4))
        if rows != self.stored.rows:
            raise RuntimeError(f"{rows} rows were delivered of {self.stored.rows}")
        return self.stored.delivered_bytes / seconds

    def check(self) -> None:
        """Iterate one epoch as a warm-up and check that every row comes once.

        Raises:
            RuntimeError: If rows are missing or repeated.
        """
        numbers = np.concatenate([batch[:, 0, 0, 0].copy() for (batch,) in self.sequence.next_epoch()])
        every = np.arange(self.stored.rows)
        if len(numbers) != len(every) or (
            self.stored.dtype == "float32" and not np.array_equal(np.sort(numbers) if self.shuffle else numbers, every)
        ):
            raise RuntimeError(f"{self.stored.name}: not every row came exactly once")

    def close(self) -> None:
        """Close the file."""
        self.sequence.close()


def raw_reads(stored: Stored) -> Contestant:
    """Return a contestant that reads the stored bytes in order with one thread into a reused buffer."""
    pieces = [
        (offset + start, min(PIECE, size - start))
        for offset, size in sorted(stored.extents)
        for start in range(0, size, PIECE)
    ]
    buffer = memoryview(bytearray(max(stored.budget // 2, *(size for _, size in pieces))))

    def run() -> float:
        begin, position = time.perf_counter(), 0
        number = os.open(stored.path, os.O_RDONLY)
        for offset, size in pieces:
            position = position if position + size <= len(buffer) else 0
            view = buffer[position : position + size]
            read = os.preadv(number, [view], offset)
            while read < size:
                read += os.preadv(number, [view[read:]], offset + read)
            position += size
        os.close(number)
        return stored.stored_bytes / (time.perf_counter() - begin)

    return run


def decoding(stored: Stored) -> Contestant:
    """Return a contestant that decodes and unshuffles the file's chunks in memory with one thread."""
    codecs = importlib.import_module("imagecodecs")
    itemsize = np.dtype(stored.dtype).itemsize
    delivered = stored.shape.chunk_rows * stored.shape.row_bytes
    size = delivered // 4 * itemsize
    with h5py.File(stored.path, "r") as file:
        chunks = file["x"].id
        count = min(chunks.get_num_chunks(), max(8, DECODED // delivered))
        packed = [chunks.read_direct_chunk(chunks.get_chunk_info(number).chunk_offset)[1] for number in range(count)]
    out, unshuffled = np.empty(size, np.uint8), np.empty(size, np.uint8)
    decode: Callable[[bytes], Any] = {
        "gzip": lambda data: importlib.import_module("deflate").zlib_decompress(data, size),
        "zstd": lambda data: codecs.zstd_decode(data, out=out),
        "blosc": lambda data: codecs.blosc_decode(data, numthreads=1, out=out),
    }[stored.layout]
    shuffled_size = itemsize if stored.layout != "blosc" else 1  # blosc unshuffles itself

    def run() -> float:
        begin = time.perf_counter()
        for chunk in packed:
            data = np.frombuffer(decode(chunk), np.uint8)
            if shuffled_size > 1:
                codecs.byteshuffle_decode(data.view(f"u{itemsize}"), out=unshuffled.view(f"u{itemsize}"))
        return len(packed) * delivered / (time.perf_counter() - begin)

    return run


def plain(layout: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure uncompressed float32 against raw reads."""
    for shape in (NARROW, WIDE):
        stored = make(folder, shape, layout, options.megabytes)
        ours = {SHUFFLED: Ours(stored)}
        wanted = {SHUFFLED: 0.9}
        if layout == "contiguous":
            ours[IN_ORDER] = Ours(stored, shuffle=False)
            wanted[IN_ORDER] = 0.95
        yield from _compare(stored, ours, "raw preadv", raw_reads(stored), wanted, options)


def packed(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure compressed data against as many one-core decoders as there are cores."""
    for shape, layout, dtype in PACKED:
        stored = make(folder, shape, layout, max(32, options.megabytes // 4), dtype)
        ours = {SHUFFLED: Ours(stored)}
        yield from _compare(stored, ours, "decode", decoding(stored), {SHUFFLED: 0.8}, options, times=CORES)


def _compare(
    stored: Stored,
    ours: dict[str, Ours],
    base: str,
    contestant: Contestant,
    wanted: dict[str, float],
    options: argparse.Namespace,
    times: int = 1,
) -> Iterator[Row]:
    """Measure our epochs against another contestant, also from a cold cache if that one reads the file."""
    for sequence in ours.values():
        sequence.check()
    contestants = {base: contestant, **{name: sequence.epoch for name, sequence in ours.items()}}
    load(stored.path)
    for cache in ("warm", "cold") if times == 1 else ("warm",):
        if cache == "warm":
            rates = rotate(contestants, options.repeats, at_least=min(0.3, options.seconds / 5))
        else:
            rates = rotate(contestants, max(2, options.repeats // 2), before=lambda: evict(stored.path))
        name = f"{stored.name}, {cache}"
        against = base if times == 1 else f"{times} cores × {base}"
        lines = [goal(f"{name}: {one} / {against}", ratio(rates[one], rates[base], times), wanted[one]) for one in ours]
        for one, sequence in ours.items():
            read = statistics.median(sequence.read_ratio[-len(rates[one]) :])
            lines.append(goal(f"{name}: {one}, bytes read / stored", read, 1.05, most=True))
        yield {"file": name, "gb_per_second": gigabytes(rates), "summary": lines}
    for sequence in ours.values():
        sequence.close()
    Path(stored.path).unlink()


def fancy(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Measure shuffled epochs against h5py's fancy indexing of random rows."""
    for layout, wanted in (("chunked", 30.0), ("contiguous", 5.0)):
        for shape in (NARROW, WIDE):
            stored = make(folder, shape, layout, options.megabytes)
            with closing(Ours(stored)) as ours, h5py.File(stored.path, "r") as file:
                ours.check()
                load(stored.path)
                contestants = {SHUFFLED: ours.epoch, "h5py": _fancy(file["x"], options.seconds)}
                rates = rotate(contestants, options.repeats, at_least=min(0.3, options.seconds / 5))
            what = f"{stored.name}, warm: {SHUFFLED} / h5py fancy indexing"
            lines = [goal(what, ratio(rates[SHUFFLED], rates["h5py"]), wanted)]
            yield {"file": f"{stored.name}, warm", "gb_per_second": gigabytes(rates), "summary": lines}
            Path(stored.path).unlink()


def _fancy(data: h5py.Dataset, seconds: float) -> Contestant:
    random = np.random.default_rng(0)

    def run() -> float:
        begin, size = time.perf_counter(), 0
        while not size or time.perf_counter() - begin < seconds:
            size += data[np.sort(random.choice(len(data), BATCH, replace=False))].nbytes
        return size / (time.perf_counter() - begin)

    return run


def measurements(part: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    if part in ("contiguous", "chunked"):
        return plain(part, folder, options)
    if part == "packed":
        return packed(folder, options)
    if part == "fancy":
        return fancy(folder, options)
    if part == "peers":
        from streaming_peers import peers

        return peers(folder, options)
    import streaming_training

    return getattr(streaming_training, part)(folder, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--megabytes", type=int, default=512, help="size of a file. Defaults to 512")
    add("--repeats", type=int, default=5, help="rounds, half as many with a cold cache. Defaults to 5")
    add("--seconds", type=float, default=3.0, help="time limit of a round of slow contestants. Defaults to 3")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these parts. Defaults to all", metavar="PART")
    add("--folder", type=Path, help="folder for the files. Defaults to a temporary one")
    add("--peers", nargs="+", default=[], metavar="PYTHON", help="Pythons with torch, grain or tensorflow-io")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kerasmem-streaming-", dir=options.folder) as folder:
        for part in options.only:
            for row in measurements(part, Path(folder), options):
                rows.append({"part": part, **row, "load_average": round(os.getloadavg()[0], 1)})
                for line in row["summary"]:
                    mark = "met   " if line["met"] else "MISSED"
                    print(f"{mark} {line['value']:8.3f}  {line['goal']:8} {line['what']}", flush=True)
                for name, rates in row.get("gb_per_second", {}).items():
                    print(f"         {statistics.median(rates):8.3f} GB/s: {name}", flush=True)
    data = {
        "environment": environment("tensorflow", "keras", "numpy", "h5py"),
        "settings": {
            "megabytes": options.megabytes, "repeats": options.repeats, "seconds": options.seconds, "batch_size": BATCH
        },
        "rows": rows,
    }  # fmt: skip
    if options.only == PARTS:
        write_results("streaming", data)
    missed = sum(not line["met"] for row in rows for line in row["summary"])
    print(f"{missed} goals missed", file=sys.stderr)


if __name__ == "__main__":
    main()
