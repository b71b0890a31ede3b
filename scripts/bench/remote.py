#!/usr/bin/env python3
"""What of a link H5ChunkSequence turns into rows, against h5py over fsspec and against downloading first.

    python scripts/bench/remote.py [--rates 50 100] [--latency 20] [--megabytes 96] [--repeats 3] [--quick]

A web server on loopback sends one file (64 × 64 × 3 bytes a row, chunks of 64 rows) at so many MB/s in all, each
request after so many milliseconds. Every way delivers each row once, as float32 batches of 64; a run is one epoch,
opening included. The link's share is the file's bytes over the time, divided by the rate. Peers read the chunks in
the same shuffled order, or in file order, one `dataset[a:b]` at a time, as their users would; h5py's own ros3 driver is
there only if the build has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from environment import ROOT, environment, write_results

sys.path.insert(0, str(ROOT))
SHAPE, CHUNK, BATCH, BUDGET = (64, 64, 3), 64, 64, "128MiB"


def write_file(path: Path, megabytes: int) -> int:
    import h5py
    import numpy as np

    rows = megabytes * 10**6 // (64 * 64 * 3) // CHUNK * CHUNK
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (rows, *SHAPE), "u1", chunks=(CHUNK, *SHAPE))
        for start in range(0, rows, CHUNK):
            x[start : start + CHUNK] = generator.integers(0, 256, (CHUNK, *SHAPE), "u1")
        file["y"] = generator.integers(0, 10, rows)
    return rows


def kerasmem_epoch(path: str, shuffle: bool, **settings: Any) -> tuple[int, int]:
    from kerasmem import H5ChunkSequence

    with H5ChunkSequence(path, batch_size=BATCH, shuffle=shuffle, memory_budget=BUDGET, **settings) as train:
        return sum(len(y) for _, y in train.next_epoch()), train.stream_plan.blocks.count


def h5py_epoch(open_file: Callable[[], Any], shuffle: bool) -> tuple[int, int]:
    import h5py
    import numpy as np

    with open_file() as source, h5py.File(source, "r") as file:
        x, y = file["x"], file["y"]
        starts = np.arange(0, len(x), CHUNK)
        if shuffle:
            np.random.default_rng(0).shuffle(starts)
        rows = 0
        for start in starts.tolist():
            images, labels = x[start : start + CHUNK].astype("float32"), y[start : start + CHUNK]
            assert images.shape[1:] == SHAPE
            rows += len(labels)
        return rows, len(starts)


def download_first(url: str, shuffle: bool) -> tuple[int, int]:
    import fsspec

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "train.h5")
        fsspec.filesystem("http").get_file(url, path)
        return kerasmem_epoch(path, shuffle)


def ways(url: str, cache: str) -> dict[str, Callable[[bool], tuple[int, int]]]:
    import fsspec
    import h5py

    def opened(**settings: Any) -> Callable[[], Any]:
        return lambda: fsspec.open(url, "rb", **settings).open()

    found = {
        "H5ChunkSequence": lambda shuffle: kerasmem_epoch(url, shuffle),
        "H5ChunkSequence, cache filled": lambda shuffle: kerasmem_epoch(url, shuffle, remote={"cache": cache}),
        "download first": lambda shuffle: download_first(url, shuffle),
        "h5py over fsspec": lambda shuffle: h5py_epoch(opened(), shuffle),
        "h5py over fsspec, readahead": lambda shuffle: h5py_epoch(opened(cache_type="readahead"), shuffle),
    }
    if "ros3" in h5py.registered_drivers():
        found["h5py ros3"] = lambda shuffle: h5py_epoch(lambda: h5py.File(url, driver="ros3"), shuffle)
    return found


def measure(path: Path, rows: int, rate: float, latency: float, repeats: int) -> list[dict[str, Any]]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("remote_link.py")), str(path), str(rate * 1e6), str(latency)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    results = []
    try:
        base = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        size = path.stat().st_size
        with tempfile.TemporaryDirectory() as cache:
            kerasmem_epoch(
                f"{base}/train.h5", True, remote={"cache": cache}
            )  # fills the cache, and loads what is to be loaded
            for repeat in range(repeats):
                for name, run in ways(f"{base}/train.h5", cache).items():
                    for shuffle in (True, False):
                        urllib.request.urlopen(f"{base}/stats").read()
                        start = time.perf_counter()
                        got, blocks = run(shuffle)
                        seconds = time.perf_counter() - start
                        assert got == rows, (name, got)
                        sent = json.loads(urllib.request.urlopen(f"{base}/stats").read())
                        row = {
                            "way": name,
                            "order": "shuffled" if shuffle else "file order",
                            "link_bytes_per_second": rate * 1e6,
                            "latency_seconds": latency,
                            "repeat": repeat,
                            "seconds": round(seconds, 4),
                            "rows_per_second": round(rows / seconds, 1),
                            "link_share": round(size / seconds / (rate * 1e6), 4),
                            "requests": sent["requests"],
                            "requests_per_block": round(sent["requests"] / blocks, 3),
                            "read_amplification": round(sent["sent"] / size, 4),
                        }
                        results.append(row)
                        print(
                            f"{rate:g} MB/s {name:<30} {row['order']:<10} {row['rows_per_second']:>9,.0f} rows/s, "
                            f"{row['link_share']:.1%} of the link, {row['requests']} requests, "
                            f"{row['read_amplification']:.3f} × the file",
                            file=sys.stderr,
                        )
    finally:
        server.terminate()
        server.wait()
    return results


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["link_bytes_per_second"], row["way"], row["order"]), []).append(row)
    figures = ("rows_per_second", "link_share", "requests", "requests_per_block", "read_amplification")
    return [
        {
            "link_bytes_per_second": rate,
            "way": way,
            "order": order,
            **{name: statistics.median(row[name] for row in rows) for name in figures},
        }
        for (rate, way, order), rows in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 100.0], help="MB/s")
    parser.add_argument("--latency", type=float, default=20.0, help="milliseconds a request")
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small file, one repeat, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.megabytes, options.repeats = [100.0], 4, 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.h5"
        rows = write_file(path, options.megabytes)
        results = []
        for rate in options.rates:
            results += measure(path, rows, rate, options.latency / 1000, options.repeats)
        data = {
            "format_version": 1,
            "environment": environment("h5py", "fsspec", "aiohttp", "numpy", "keras"),
            "settings": {
                "file_bytes": path.stat().st_size,
                "rows": rows,
                "row_shape": SHAPE,
                "chunk_rows": CHUNK,
                "batch_rows": BATCH,
                "memory_budget": BUDGET,
                "load_average": [round(each, 1) for each in os.getloadavg()],
            },
            "summary": summary(results),
            "rows": results,
        }
    if options.quick:
        print(json.dumps(data["summary"]))
    else:
        write_results("remote", data)


if __name__ == "__main__":
    main()
