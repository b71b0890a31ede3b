#!/usr/bin/env python3
"""Make the plans of 1,000 workers for 50,000 files with 10,000,000,000 rows.

    python scripts/bench/cluster_plan.py [--quick]

The functions that training uses make the plans from an index; the files do not exist. Measured are the time and memory
of a plan, requests and files of an epoch, bytes read twice, and how far rows lie from their position in the files,
against a uniform shuffle. `--quick` makes a smaller plan and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import environment, write_results

from kerasmem.hdf5.format.columns import read_parts
from kerasmem.hdf5.format.layout import DataLayout, DatasetLayout, FileLayout, ranges
from kerasmem.hdf5.rows.paths import Access, read_files, write_index
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.streaming.stream_plan import StreamSettings, make_plan

FEATURES = 32
LOOKED_AT = 12  # ranks of the large plan that are made
SAMPLE = 200_000  # rows looked at for how far they travel


class Scale(NamedTuple):
    """How large: files and rows of each, workers, rows of a chunk and of a worker's batch, and a worker's memory."""

    files: int
    rows: int
    ranks: int
    chunk: int = 8192
    budget: int = 256 << 20
    batch: int = 64

    @property
    def total(self) -> int:
        return self.files * self.rows


LARGE = Scale(50_000, 200_000, 1000)
QUICK = Scale(1000, 20_000, 20, chunk=512, budget=8 << 20)


def write_layouts(path: Path, scale: Scale) -> None:
    """Write the index of files that do not exist, each of gzip chunks."""
    chunks = -(-scale.rows // scale.chunk)
    shape, chunk = (scale.rows, FEATURES), (scale.chunk, FEATURES)
    dataset = DatasetLayout("x", shape, "<f4", "chunked", chunk, ("gzip",), chunks * 900_000)
    urls = (f"https://127.0.0.1/bucket/part-{number:05}.h5" for number in range(scale.files))
    tags = (f'"{number:032x}"' for number in range(scale.files))
    files = [FileLayout(url, chunks * 1_000_000, (dataset,), tag) for url, tag in zip(urls, tags, strict=True)]
    write_index(str(path), files)


def look_at(layout: DataLayout, scale: Scale) -> dict[str, Any]:
    """Return the figures of some ranks of a plan that is too large to be made as a whole."""
    parts = read_parts("x", None, None)
    ranks = np.linspace(0, scale.ranks - 1, min(LOOKED_AT, scale.ranks)).astype(int).tolist()
    seconds, rows, read, requests, files, travel = [], [], [], [], [], []
    for rank in ranks:
        start = time.perf_counter()
        shard = (rank, scale.ranks)
        settings = StreamSettings(batch_size=scale.batch, shard=shard, memory_budget=scale.budget, remainder="drop")
        plan = make_plan(layout, parts, settings)
        order = plan.order(0)
        seconds.append(time.perf_counter() - start)
        runs = np.array([order.blocks.run(block)[:2] for block in range(order.blocks.count)])
        number, first = np.divmod(runs[:, 0], scale.rows)
        last = (runs[:, 1] - 1) % scale.rows // scale.chunk
        first //= scale.chunk
        chunks = np.unique(np.repeat(number << 32 | first, last - first + 1) + ranges(first * 0, last - first + 1))
        read.append(int(np.minimum(scale.chunk, scale.rows - (chunks & 0xFFFFFFFF) * scale.chunk).sum()))
        requests.append(len(runs))
        rows.append(plan.num_rows)
        files.append(len(np.unique(number)))
        travel.append(travelled(order, scale.total))
    needed = np.array(rows)
    return {
        "ranks_looked_at": len(ranks),
        "plan_seconds": round(float(np.median(seconds)), 3),
        "rows_of_a_rank": [int(needed.min()), int(needed.max())],
        "requests_of_a_rank": [min(requests), max(requests)],
        "files_of_a_rank": [min(files), max(files)],
        "rows_read_for_one_needed": round(float(np.mean(np.array(read) / needed)), 4),
        "travel_of_uniform": round(float(np.mean(travel)), 3),
    }


def travelled(order: Any, total: int) -> float:
    """Return how far rows lie from their place in the files, the mean against that of a uniform shuffle (a third)."""
    step = max(1, order.windows // 8)
    far = []
    for window in range(0, order.windows, step):
        rows = order.blocks.rows(order.window_order(window))[:: max(1, order.window_rows(window) // (SAMPLE // 8))]
        far.append(np.abs(rows / total - (window + 0.5) / order.windows))
    return float(np.concatenate(far).mean() * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="make a smaller plan and write nothing")
    options = parser.parse_args()
    large = QUICK if options.quick else LARGE
    results: dict[str, Any] = {"environment": environment("numpy"), "scale": large._asdict(), "plans": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.index"
        write_layouts(path, large)
        before, start = _peak(), time.perf_counter()
        layout = scan_files(read_files(str(path)), ["x"], Access())
        results["open_index_seconds"] = round(time.perf_counter() - start, 2)
        results["index_bytes"] = path.stat().st_size
        results["plans"].append(look_at(layout, large))
        results["peak_bytes_of_index_and_plans"] = _peak() - before
    print(json.dumps(results, indent=1))
    if not options.quick:
        write_results("cluster_plan", results)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
