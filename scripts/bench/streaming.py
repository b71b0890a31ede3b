#!/usr/bin/env python3
"""Streaming from HDF5 against the limits of the machine and against other loaders, everything in one run.

    python scripts/bench/streaming.py [--quick] [--megabytes 512] [--repeats 5] [--only PART …] [--folder DIR]
                                      [--peers PYTHON …] [--seconds 3] [--json FILE]

Files are written by h5py into a temporary folder (in `--folder`), of about `--megabytes` of float32 rows of 3 KB and
of 150 KB each, read with a `memory_budget` of a quarter of that (or of 12 batches), and removed. Batches have 64 rows.
Whoever is compared takes turns: each round measures all of them once, every round begins with another one. A ratio is
given of the medians, of the best rounds, and as the median of the rounds' own ratios; goals are held against the first.
"Ours" is one `H5ChunkSequence`, opened and checked (every row once) before, whose epochs are gone through with
`next_epoch()` from the first request to the last batch, so the wait for the first window counts.

Warm: the file is in the page cache. Cold: `posix_fadvise(DONTNEED)` after `fsync` before each measurement;
`cached_share_before` is the share of 256 sampled pages that were cached nevertheless. In a virtual machine the
host's cache stays out of reach.

- contiguous, chunked: float32 as it is, against one thread's `os.preadv` of the same bytes in order, 1 MiB at a time.
  The goals' baseline, "raw", reads round and round into one buffer that is used again, as large as a window (half the
  budget): rows that wait to be delivered have to lie somewhere. Beside it stand a buffer of 1 MiB, which never leaves
  the processor's cache, fresh memory for each piece (kept until a window's worth is held), and a thread a core.
- packed: gzip(4)+shuffle, zstd(3)+shuffle and blosc(lz4)+shuffle, against cores × one thread's decoding of the same
  chunks, in memory, with the decoder kerasmem uses and the fastest unshuffling there is; also without unshuffling,
  and as measured with a thread a core. Cold, the disk counts for one side only, so there is no goal.
- fancy: against h5py's `data[sorted random rows]`, for `--seconds` a round, the rate extrapolated.
- peers: see streaming_peers.py. `--peers` are Pythons with torch, grain and h5py, or tensorflow-io; tf.data is
  measured with the Python that runs this.
- mixing: label entropy of batches, and accuracy over seeds, on class-sorted data with a tenth of it as budget.
- fit: what `fit` takes beyond the train step of a small CNN.
- Bytes read an epoch (`rchar` of /proc/self/io) over bytes stored: in contiguous, chunked and packed.

Results go to results/streaming.json after a full run, and those of any run to `--json FILE`. The small files of
`--quick` and the raw reads of them stay in large processor caches: such ratios to raw reads say little.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from environment import ROOT, environment, write_results
from streaming_data import BATCH

sys.path.insert(0, str(ROOT))

PARTS = ("contiguous", "chunked", "packed", "fancy", "peers", "mixing", "fit")


def measurements(folder: Path, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """Return the parts by name; TensorFlow is loaded here."""
    from streaming_learning import fit, mixing
    from streaming_peers import peers
    from streaming_rows import fancy, packed, plain

    return {
        "contiguous": partial(plain, "contiguous", folder, options),
        "chunked": partial(plain, "chunked", folder, options),
        "packed": partial(packed, folder, options),
        "fancy": partial(fancy, folder, options),
        "peers": partial(peers, folder, options),
        "mixing": partial(mixing, folder, options),
        "fit": partial(fit, folder, options),
    }


def installed(*packages: str) -> list[str]:
    """Return which of some packages there are."""
    return [name for name in packages if importlib.util.find_spec(name) is not None]


def say(row: dict[str, Any]) -> None:
    """Print what a row says of the goals, and what was skipped or looks wrong."""
    for line in row.get("summary", []):
        mark = "met   " if line["met"] else "MISSED"
        ways = ", ".join(f"{way} {line[way]:.3f}" for way in ("best", "paired") if way in line)
        print(f"{mark} {line['value']:8.3f}  {line['goal']:8} {line['what']}{ways and f' ({ways})'}", flush=True)
    if "skipped" in row:
        named = " ".join(str(row[key]) for key in ("layout", "dtype", "shape", "peer") if key in row)
        print(f"skipped {named}: {row['skipped']}", flush=True)
    for name, correct in row.get("every_row_once", {}).items():
        if not correct:
            print(f"WRONG {name}: not every row came exactly once", flush=True)
    for text in row.get("warnings", []):
        print(f"note: {text}", flush=True)
    if row.get("cache") == "cold":
        print(f"         cold: at most {row['cached_share_before']} of the file was cached before", flush=True)
    for name, rates in row.get("gb_per_second", {}).items():
        print(f"         {statistics.median(rates):8.3f} GB/s, {max(rates):8.3f} at best: {name}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: small files, 2 rounds, fewer files")
    parser.add_argument("--megabytes", type=int, help="of a file (512; 64 with --quick)")
    parser.add_argument("--repeats", type=int, help="rounds (5; 2 with --quick); half as many cold")
    parser.add_argument("--seconds", type=float, help="limit of a round of what is slow (3; 0.7 with --quick)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts only")
    parser.add_argument("--folder", type=Path, help="where the files are written (the system's temporary folder)")
    parser.add_argument("--peers", nargs="+", default=[], metavar="PYTHON", help="with torch, grain or tensorflow-io")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of this run there as well")
    options = parser.parse_args()
    options.megabytes = options.megabytes or (64 if options.quick else 512)
    options.repeats = options.repeats or (2 if options.quick else 5)
    options.seconds = options.seconds or (0.7 if options.quick else 3.0)
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the folder is removed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = options.only or list(PARTS)
    rows: list[dict[str, Any]] = []
    begin, load = time.monotonic(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="kerasmem-streaming-", dir=options.folder) as folder:
        parts = measurements(Path(folder), options)
        for part in PARTS:
            if part not in wanted:
                continue
            print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
            try:
                for row in parts[part]():
                    rows.append({"part": part, **row})
                    say(row)
            except Exception as error:  # the other parts may take hours more, and are worth having
                traceback.print_exc()
                rows.append({"part": part, "failed": f"{type(error).__name__}: {error}"})
            load.append(os.getloadavg()[0])
    summary = [line for row in rows for line in row.get("summary", [])]
    failed = [row["part"] for row in rows if isinstance(row.get("failed"), str)]
    print(f"{sum(line['met'] for line in summary)} of {len(summary)} goals met; {time.monotonic() - begin:.0f} s")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    packages = installed("tensorflow", "keras", "numpy", "h5py", "deflate", "imagecodecs", "hdf5plugin")
    data = {
        "environment": environment(*packages),
        "settings": {
            "megabytes": options.megabytes, "repeats": options.repeats, "seconds": options.seconds,
            "batch_size": BATCH, "quick": options.quick, "parts": wanted,
            "baseline": "raw: preadv in order, one thread, 1 MiB at a time, reused buffer of half the budget",
        },
        "load_average": [round(each, 2) for each in load],
        "summary": summary,
        "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if not options.quick and not options.only and not failed:
        write_results("streaming", data)


if __name__ == "__main__":
    main()
