"""Shuffled batches of a file, ours against other loaders, each in a process of its own and in its best form.

- kerasmem: `next_epoch()`, and `as_tf_dataset()` beside it.
- tf.data over h5py: rows one by one in `numpy_function`; blocks of contiguous rows, eight of them shuffled together,
  from a generator, and in `numpy_function` with two parallel calls and `rebatch`.
- torch: `DataLoader` with 2 workers, over rows one by one, and over such shuffled blocks.
- grain: rows one by one by 2 threads and in 2 processes; such blocks likewise.
- tensorflow-io: `IODataset.from_hdf5` with a shuffle buffer of as many rows. It reads in file order, so that this is no
  shuffle of the whole file, and less work.

All are given what they gain from: blocks are whole chunks, shuffled eight together, which is a worse shuffle than
kerasmem's and a smaller buffer, and all rows are delivered or the pass is broken off `--seconds` after its tenth
batch. The rate is that of the whole pass from the first request; where processes start again for each pass, which is
Grain's way, that from the tenth batch on, which is more than it can keep up where much was prefetched by then. A peer's
best form is that with the best median. The file is in the page cache.
`--quick` leaves out rows one by one, the slowest by far on chunks, and all files but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from environment import ROOT
from streaming_data import BATCH, NARROW, WIDE, Stored, load, make
from streaming_rows import goal
from streaming_timing import ratio, rounded

FORMS = {
    "kerasmem": ("next_epoch", "as_tf_dataset"),
    "tf.data": ("rows, numpy_function", "blocks, from_generator", "blocks, numpy_function"),
    "torch": ("rows", "blocks"),
    "grain": ("rows, threads", "rows, processes", "blocks, threads", "blocks, processes"),
    "tensorflow-io": ("buffer",),
}
_MODULES = {"tf.data": "tensorflow", "torch": "torch", "grain": "grain", "tensorflow-io": "tensorflow_io"}
_FILES = (
    (NARROW, "chunked", "float32"), (NARROW, "contiguous", "float32"), (NARROW, "gzip", "uint8"),
    (WIDE, "chunked", "float32"),
)  # fmt: skip
_START = 120.0  # seconds


class Failed(Exception):
    """A loader did not answer; the text says why."""


class Loader:
    """A child process with one loader.

    Args:
        python: which runs it.
        spec: what it is to do, as streaming_peers_child.py has it.
    """

    def __init__(self, python: str, spec: dict[str, Any]) -> None:
        self._limit = 4 * spec["seconds"] + 60
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        child = Path(__file__).with_name("streaming_peers_child.py")
        self._process = subprocess.Popen(
            [python, str(child), json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        self.results: list[dict[str, Any]] = []

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return its next answer.

        Raises:
            Failed: there is none in that time.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise Failed(self._why() if ready else f"no answer in {seconds:.0f} s")
        return dict(json.loads(line))

    def started(self) -> dict[str, Any]:
        """Wait until it has gone through its data once; return what it is."""
        return self.answer(_START)

    def round(self) -> None:
        """Have it go through its data once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(self._why()) from error
        self.results.append(self.answer(self._limit))

    def end(self) -> None:
        """End it and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def _why(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return next((line.strip() for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it ended")


def peers(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all loaders on some files; with `--quick` on the first only."""
    pythons, missing = _find(options.peers)
    yield from missing
    for shape, layout, dtype in _FILES[: 1 if options.quick else None]:
        stored = make(folder, shape, layout, options.megabytes // (2 if layout == "gzip" else 1), dtype)
        load(stored.path)
        yield _measure(stored, pythons, options)
        Path(stored.path).unlink()


def _find(others: list[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return each loader's Python, the first that can import it, and rows for those that have none."""
    pythons, missing = {"kerasmem": sys.executable}, []
    for peer, module in _MODULES.items():
        reasons = []
        for python in [sys.executable, *others] if peer == "tf.data" else others:
            tried = subprocess.run([python, "-c", f"import {module}, h5py"], capture_output=True, text=True)
            if tried.returncode == 0:
                pythons[peer] = python
                break
            reasons.append((tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1])
        else:
            missing.append({"peer": peer, "skipped": "; ".join(reasons) or "no Python with it was given (--peers)"})
    return pythons, missing


def _measure(stored: Stored, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    loaders: dict[tuple[str, str], Loader] = {}
    versions: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for peer, python in pythons.items():
        for form in FORMS[peer]:
            if options.quick and form.startswith("rows"):
                continue
            spec = {
                "peer": peer, "form": form, "path": stored.path, "rows": stored.rows, "batch": BATCH,
                "chunk_rows": stored.shape.chunk_rows, "budget": stored.budget, "seconds": options.seconds,
                "root": str(ROOT),
            }  # fmt: skip
            loaders[peer, form] = Loader(python, spec)
    try:
        for key in list(loaders):
            _unless_failed(loaders, failed, key, lambda key=key: versions.update({key[0]: loaders[key].started()}))
        time.sleep(1)  # for workers to fall idle
        for turn in range(options.repeats):
            keys = list(loaders)
            at = turn % len(keys)
            for key in keys[at:] + keys[:at]:
                _unless_failed(loaders, failed, key, loaders[key].round)
    finally:
        for loader in loaders.values():
            loader.end()
    return _row(stored, {key: loader.results for key, loader in loaders.items()}, versions, failed)


def _unless_failed(
    loaders: dict[tuple[str, str], Loader], failed: dict[str, str], key: tuple[str, str], do: Any
) -> None:
    try:
        do()
    except Failed as error:
        failed[": ".join(key)] = str(error)
        loaders.pop(key).end()


def _row(
    stored: Stored,
    results: dict[tuple[str, str], list[dict[str, Any]]],
    versions: dict[str, Any],
    failed: dict[str, str],
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {}
    best: dict[str, str] = {}
    for (peer, form), passes in results.items():
        name = f"{peer}: {form}"
        rate = "steady_bytes_per_second" if form.endswith("processes") else "bytes_per_second"
        rates[name] = [each[rate] or each["bytes_per_second"] for each in passes]
        if peer not in best or statistics.median(rates[name]) > statistics.median(rates[best[peer]]):
            best[peer] = name
    ours = "kerasmem: next_epoch"
    ratios = {name: ratio(rates[ours], each) for name, each in rates.items() if name != ours} if ours in rates else {}
    rivals = [name for peer, name in best.items() if peer != "kerasmem"]
    row: dict[str, Any] = {
        **stored.to_dict(), "cache": "warm", "versions": {peer: each["versions"] for peer, each in versions.items()},
        "gb_per_second": rounded(rates), "ratios": {ours: ratios}, "best_forms": best, "failed": failed,
        "passes": {": ".join(key): passes for key, passes in results.items()},
        "warnings": [f"{name} failed: {why}" for name, why in failed.items()],
    }  # fmt: skip
    if ratios and rivals:
        strongest = min(rivals, key=lambda name: ratios[name]["median"])
        what = f"{stored.layout} {stored.dtype}, rows of {stored.shape.name}, warm: ours / {strongest}, the best peer"
        row["summary"] = [goal(what, ratios[strongest], 1.5)]
        whole = [name for name in rivals if not name.startswith("tensorflow-io")]
        if strongest not in whole and whole:
            strongest = min(whole, key=lambda name: ratios[name]["median"])
            what = what.split(":")[0] + f": ours / {strongest}, the best peer that shuffles the whole file"
            row["summary"].append(goal(what, ratios[strongest], 1.5))
    return row
