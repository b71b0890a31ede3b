"""Shuffled batches of a file by kerasmem and by other loaders, each in a process of its own.

- tf.data over h5py: blocks of contiguous rows, eight of them shuffled together, in `numpy_function` with two parallel
  calls and `rebatch`.
- torch: `DataLoader` with two workers over such blocks.
- grain: such blocks by two threads.
- tensorflow-io: `IODataset.from_hdf5` with a shuffle buffer of as many rows. It reads in file order, so that it does
  not shuffle the whole file.

Blocks are whole chunks, the fastest form of each loader, although eight of them are a worse shuffle than kerasmem's.
A pass delivers all rows, or stops `--seconds` after its tenth batch; its rate counts from the first request. The file
is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT
from streaming_data import BATCH, NARROW, WIDE, Stored, gigabytes, goal, load, make, ratio, rotate

CHILD = Path(__file__).with_name("streaming_peers_child.py")
OURS = "kerasmem"
MODULES = {
    "tf.data: blocks, numpy_function": "tensorflow",
    "torch: blocks": "torch",
    "grain: blocks, threads": "grain",
    "tensorflow-io: buffer": "tensorflow_io",
}
FILES = (
    (NARROW, "chunked", "float32"), (NARROW, "contiguous", "float32"), (NARROW, "gzip", "uint8"),
    (WIDE, "chunked", "float32"),
)  # fmt: skip
START_SECONDS = 120.0


class Loader:
    """A child process with one loader, which iterates its data on request."""

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        self.limit = 4 * spec["seconds"] + 60
        environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [python, str(CHILD), json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environ},
        )  # fmt: skip
        self.versions = self.answer(START_SECONDS)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next line of the child.

        Raises:
            RuntimeError: If there is none in time.
        """
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"a loader gave no answer in {seconds:.0f} s, or ended")
        return json.loads(line)

    def run(self) -> float:
        """Iterate the data once and return bytes a second."""
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        return self.answer(self.limit)["bytes_per_second"]


def peers(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all loaders whose packages one of the Pythons has."""
    pythons = {OURS: sys.executable}
    for name, module in MODULES.items():
        for python in [sys.executable, *options.peers]:
            if subprocess.run([python, "-c", f"import {module}, h5py"], capture_output=True).returncode == 0:
                pythons[name] = python
                break
        else:
            print(f"skipped {name}: no Python of --peers has it", file=sys.stderr)
    for shape, layout, dtype in FILES:
        stored = make(folder, shape, layout, options.megabytes // (2 if layout == "gzip" else 1), dtype)
        load(stored.path)
        yield _measure(stored, pythons, options)
        Path(stored.path).unlink()


def _measure(stored: Stored, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    loaders: dict[str, Loader] = {}
    try:
        for name, python in pythons.items():
            spec = {
                "peer": name, "path": stored.path, "rows": stored.rows, "batch": BATCH, "root": str(ROOT),
                "chunk_rows": stored.shape.chunk_rows, "budget": stored.budget, "seconds": options.seconds,
            }  # fmt: skip
            loaders[name] = Loader(python, spec)
        rates = rotate({name: loader.run for name, loader in loaders.items()}, options.repeats)
    finally:
        for loader in loaders.values():
            loader.process.kill()
            loader.process.wait()
    lines = []
    rivals = {name: ratio(rates[OURS], rates[name]) for name in rates if name != OURS}
    shuffling = {name: value for name, value in rivals.items() if not name.startswith("tensorflow-io")}
    best = min(rivals, key=rivals.__getitem__)
    named = {best: "the best peer"}
    if best not in shuffling:
        named[min(shuffling, key=shuffling.__getitem__)] = "the best peer that shuffles the whole file"
    for name, what in named.items():
        lines.append(goal(f"{stored.name}, warm: ours / {name}, {what}", rivals[name], 1.5))
    return {
        "file": f"{stored.name}, warm",
        "versions": {name: loader.versions for name, loader in loaders.items()},
        "gb_per_second": gigabytes(rates),
        "summary": lines,
    }
