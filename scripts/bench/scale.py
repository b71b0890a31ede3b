#!/usr/bin/env python3
"""What streaming costs as workers and files grow: rows a second, bytes read, and resident memory.

    python scripts/bench/scale.py [--quick] [--gigabytes 1 2 4 8] [--workers 1 2 4] [--repeats 3] [--folder DIR]
                                  [--peers PYTHON …] [--json FILE]

Files are float32 rows of 3 KB in chunks of 256, written by h5py into a temporary folder and removed one by one. Where
the disk has no room for one with a tenth to spare, it is left out, and the results say so. The sizes asked for are
those of the file; 16 and 32 may be named too, and take their time.

- workers: the smallest file, gone through once by 1, 2, 4 processes that start together, each with its own shard; the
  rate is that of all rows from the start to the last one's end, `bytes_read` what all of them read (`rchar` of
  /proc/self/io) over the file's bytes. On a machine with fewer cores than workers the rate cannot grow any more; it
  is the bytes that must not. h5py beside it: each process takes slices of its part of the rows in file order, in
  batches, which is no shuffle.
- sizes: one process goes through each file, with the same `memory_budget` of 128 MB for all; nanoseconds a row, and by
  how much resident memory had grown at its peak (VmHWM, reset before the pass). Cold: the system has dropped the file
  from its cache before the pass, so it comes from the disk; whatever caches the disk itself has stay as they are.
  Warm: it is in the cache, which holds for files of up to a quarter of the memory. Peers beside it are h5py slices in
  file order, and what `--peers` have of streaming_peers_child.py's loaders in blocks. A peer's pass is broken off after
  `--seconds`.

Each loader is a process of its own. A warm one goes through its data once before it is measured.
`cached_before` is the share of some pages that were in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from environment import ROOT, environment, write_results
from streaming_data import BATCH, MIB, NARROW, Stored, cached_share, evict, load, make

BUDGET = 128 * 10**6
_MUCH = 4 * 1024 * MIB  # larger files are gone through once, not several times
_PEERS = {"grain": "grain", "tf.data": "tensorflow"}
_START = 180.0


class Reader:
    """A child process that goes through its part of a file each time it is told to."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        child = Path(__file__).with_name("scale_child.py")
        self.process = subprocess.Popen(
            [python, str(child), json.dumps({**spec, "root": str(ROOT)})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Return its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a reader ended with exit status {self.process.wait()}")
        return dict(json.loads(line))

    def go(self) -> None:
        """Have it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def specify(stored: Stored, loader: str, options: argparse.Namespace, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Return what a child has to know."""
    return {
        "loader": loader, "path": stored.path, "rows": stored.rows, "batch": BATCH, "index": index, "count": count,
        "chunk_rows": NARROW.chunk_rows, "budget": options.budget, "seconds": options.seconds,
    }  # fmt: skip


def by_workers(stored: Stored, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure how much several processes deliver together, and what they read for it."""
    load(stored.path)
    for loader in ("kerasmem", "h5py"):
        for count in options.workers:
            with ExitStack() as stack:
                readers = [
                    stack.enter_context(Reader(sys.executable, specify(stored, loader, options, index, count)))
                    for index in range(count)
                ]
                ready = [reader.answer() for reader in readers]
                rounds = []
                for _ in range(options.repeats + 1):  # the first is not counted
                    begin = time.perf_counter()
                    for reader in readers:
                        reader.go()
                    answers = [reader.answer() for reader in readers]
                    rounds.append((time.perf_counter() - begin, answers))
            seconds = [took for took, _ in rounds[1:]]
            delivered = [sum(answer["rows"] for answer in answers) for _, answers in rounds[1:]]
            rates = [rows / took for rows, took in zip(delivered, seconds, strict=True)]
            read = sum(answer["bytes_read"] for answer in rounds[-1][1])
            yield {
                "part": "workers", "loader": loader, "workers": count, "seconds": seconds, "rows": stored.rows,
                "file_bytes": os.path.getsize(stored.path), "bytes_read": read, "versions": ready[0]["versions"],
                "rows_delivered": delivered, "rows_per_second": statistics.median(rates), "rates": rates,
                "read_over_file": read / os.path.getsize(stored.path),
            }  # fmt: skip


def by_size(stored: Stored, loaders: dict[str, str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure what a row costs in a file of this size, from the disk and from the cache."""
    size = os.path.getsize(stored.path)
    fits = size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    for state in ("cold", "warm") if fits else ("cold",):
        for loader, python in loaders.items():
            passes = []
            with Reader(python, specify(stored, loader, options)) as reader:
                versions = reader.answer()["versions"]
                if state == "warm":
                    load(stored.path)
                    reader.go()
                    reader.answer()
                for _ in range(options.repeats):
                    if state == "cold":
                        evict(stored.path)
                    cached = cached_share(stored.path)
                    reader.go()
                    passes.append(reader.answer() | {"cached_before": cached})
                    if size > _MUCH:
                        break
            each = [answer["seconds"] / answer["rows"] * 1e9 for answer in passes]
            yield {
                "part": "sizes", "state": state, "loader": loader, "file_bytes": size, "rows": stored.rows,
                "cached_before": [answer["cached_before"] for answer in passes],
                "nanoseconds_per_row": each, "median_nanoseconds_per_row": statistics.median(each),
                "rows_delivered": [answer["rows"] for answer in passes],
                "grown_bytes": [answer["grown_bytes"] for answer in passes],
                "bytes_read": [answer["bytes_read"] for answer in passes], "versions": versions,
            }  # fmt: skip


def find_peers(pythons: list[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the Pythons of the peers there are, and rows for the others."""
    found, missing = {}, []
    for peer, module in _PEERS.items():
        for python in pythons:
            if not subprocess.run(
                [python, "-c", f"import {module}, h5py"], capture_output=True, check=False
            ).returncode:
                found[peer] = python
                break
        else:
            missing.append({"part": "sizes", "loader": peer, "skipped": "no Python with it was given (--peers)"})
    return found, missing


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals and whether they are met: bytes within 5 % of the file, time and memory flat within a fifth.

    Memory is that of a process's first pass, in which it takes what it needs.
    """
    lines = []
    for row in rows:
        if row["part"] == "workers" and row.get("loader") == "kerasmem":
            what = f"bytes read over the file's, {row['workers']} workers"
            lines.append({"what": what, "value": row["read_over_file"], "met": row["read_over_file"] <= 1.05})
    sizes = [row for row in rows if row["part"] == "sizes" and row.get("loader") == "kerasmem"]
    for state in ("cold", "warm"):
        for key, what in (("median_nanoseconds_per_row", "time a row"), ("grown_bytes", "memory grown")):
            there = [row[key] for row in sizes if row["state"] == state]
            values = [max(value) if isinstance(value, list) else value for value in there]
            if len(values) > 1 and (state == "cold" or key != "grown_bytes"):
                value = max(values) / min(values)
                text = f"{what}, {state}, largest over smallest of all file sizes"
                lines.append({"what": text, "value": value, "met": value < 1.2})
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="files of 32 and 64 MB, 1 and 2 workers, 1 round")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 2, 4, 8], help="sizes of the files")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="limit of a peer's pass (5)")
    parser.add_argument("--folder", type=Path, help="where the files are written (the system's temporary folder)")
    parser.add_argument("--peers", nargs="+", default=[], metavar="PYTHON", help="with grain, TensorFlow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this run there as well")
    options = parser.parse_args()
    options.budget = BUDGET
    if options.quick:
        options.gigabytes, options.workers, options.repeats, options.seconds = [1 / 32, 1 / 16], [1, 2], 1, 0.5
        options.budget //= 16  # a file that fits in it is read once and for all
    return options


def main() -> None:
    options = arguments()
    peers, rows = find_peers(options.peers)
    begin, loads, left_out = time.monotonic(), [os.getloadavg()[0]], []
    with tempfile.TemporaryDirectory(prefix="kerasmem-scale-", dir=options.folder) as folder:
        for number, gigabytes in enumerate(sorted(options.gigabytes)):
            megabytes = round(gigabytes * 1024)
            if shutil.disk_usage(folder).free < 1.1 * megabytes * MIB:
                left_out.append({"gigabytes": gigabytes, "why": "no room on the disk"})
                continue
            stored = make(Path(folder), NARROW, "chunked", megabytes)
            loaders = {"kerasmem": sys.executable, "h5py": sys.executable, **peers}
            measured = list(by_size(stored, loaders, options))
            if not number:
                measured += by_workers(stored, options)
            for row in measured:
                rows.append(row)
                say(row)
            Path(stored.path).unlink()
            loads.append(os.getloadavg()[0])
    summary = summarise(rows)
    for line in summary:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['value']:8.3f}  {line['what']}")
    data = {
        "environment": environment("tensorflow", "keras", "numpy", "h5py"),
        "settings": {
            "gigabytes": sorted(options.gigabytes), "workers": options.workers, "repeats": options.repeats,
            "seconds": options.seconds, "memory_budget": options.budget, "batch_size": BATCH, "quick": options.quick,
        },
        "left_out": left_out, "took_seconds": round(time.monotonic() - begin),
        "load_average": [round(each, 2) for each in loads], "summary": summary, "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if not options.quick:
        write_results("scale", data)


def say(row: dict[str, Any]) -> None:
    """Print a row."""
    if "skipped" in row:
        print(f"skipped {row['loader']}: {row['skipped']}", flush=True)
    elif row["part"] == "workers":
        rate, read = row["rows_per_second"], row["read_over_file"]
        print(
            f"{row['loader']:>10}, {row['workers']} workers: {rate:12,.0f} rows/s, read {read:.3f} × file", flush=True
        )
    else:
        size, each = row["file_bytes"] / 2**30, row["median_nanoseconds_per_row"]
        grown = max(row["grown_bytes"]) / 1e6
        print(
            f"{row['loader']:>10}, {size:6.2f} GiB {row['state']}: {each:8,.0f} ns a row, memory + {grown:,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
