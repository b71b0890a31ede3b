"""Train from a file that is larger than the memory limit.

    python examples/train_from_large_file.py [--size 1.5GB] [--limit 600MB] [--keep DIR]

The script writes an HDF5 file, then starts two processes. Each may allocate `--limit` bytes after TensorFlow has
started (RLIMIT_DATA). One loads the file as an array and fails. The other streams it with `H5ChunkSequence` and trains.

`--size 4GB --limit 1.5GB` is a longer run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

FEATURES = 1024
CHUNK_ROWS = 1024
DIED = "the process ran out of memory"


def main() -> int:
    """Write the file, try both ways, report."""
    arguments = read_arguments()
    from kerasmem.units import format_size, parse_size

    size, limit = parse_size(arguments.size), parse_size(arguments.limit)
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="kerasmem-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "large.h5"
    try:
        started = time.perf_counter()
        rows = write_file(path, size)
        took = time.perf_counter() - started
        print(f"Wrote {format_size(path.stat().st_size)}: {rows:,} rows of {FEATURES} float32, in {took:.0f} s.")
        print(f"Each process may allocate {format_size(limit)} beyond TensorFlow's own start.\n")

        print("Loading the file as one array:")
        loading = run_limited("load", path, limit)
        print(f"  {loading.get('outcome', DIED)}\n")

        print("Streaming it with H5ChunkSequence:")
        training = run_limited("train", path, limit)
        if "rows_per_second" not in training:
            print(f"  {DIED}")
            return 1
        print(indented(training["description"]))
        print(f"  trained one epoch on {training['rows']:,} rows in {training['seconds']:.0f} s", end="")
        print(f" ({training['rows_per_second']:,.0f} rows/s, {training['bytes_per_second'] / 1e6:,.0f} MB/s)")
        print(f"  validation accuracy {training['accuracy']:.3f}")
        print(f"  memory grew by {format_size(training['grown'])} at its peak, training included,")
        print(f"  for a file of {format_size(path.stat().st_size)}")
        if loading.get("loaded"):
            print("\nThe array fits: choose a --limit below --size.")
        return 0
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def write_file(path: Path, size: int) -> int:
    """Write a class-sorted data set chunk by chunk; return its number of rows."""
    import h5py
    import numpy as np

    rows = max(1, size // (4 * FEATURES * CHUNK_ROWS)) * CHUNK_ROWS
    random = np.random.default_rng(0)
    noise = random.standard_normal((CHUNK_ROWS + 64, FEATURES), dtype="f4")
    patterns = random.standard_normal((10, FEATURES), dtype="f4") * 0.2
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (rows, FEATURES), "f4", chunks=(CHUNK_ROWS, FEATURES))
        labels = file.create_dataset("labels", (rows,), "u1", chunks=(CHUNK_ROWS,))
        for start in range(0, rows, CHUNK_ROWS):
            label = start * 10 // rows  # sorted by class, so training needs a shuffle
            shift = int(random.integers(64))
            features[start : start + CHUNK_ROWS] = noise[shift : shift + CHUNK_ROWS] + patterns[label]
            labels[start : start + CHUNK_ROWS] = label
    return rows


def train_from_file(path: Path, limit: int) -> dict:
    """Stream the file and train one epoch."""
    import h5py
    import numpy as np

    from kerasmem import H5ChunkSequence

    with h5py.File(path) as file:
        rows = len(file["labels"])
    held_out = np.arange(0, rows, 50)
    training = np.setdiff1d(np.arange(rows), held_out)
    names = {"x": "features", "y": "labels"}
    model = build_model()
    with (
        H5ChunkSequence(path, **names, rows=training, batch_size=256, memory_budget=limit // 2) as train,
        H5ChunkSequence(path, **names, rows=held_out, batch_size=256, shuffle=False, memory_budget="32MiB") as valid,
    ):
        started = time.perf_counter()
        model.fit(train, epochs=1, verbose=0)
        seconds = time.perf_counter() - started
        _, accuracy = model.evaluate(valid, verbose=0)
        return {
            "description": train.describe(),
            "rows": train.num_rows,
            "seconds": seconds,
            "rows_per_second": len(training) / seconds,
            "bytes_per_second": len(training) * 4 * FEATURES / seconds,
            "accuracy": accuracy,
        }


def load_as_array(path: Path, limit: int) -> dict:
    """Read the whole file as an array, which exceeds the limit."""
    import h5py

    try:
        with h5py.File(path) as file:
            features = file["features"][:]
    except MemoryError as error:
        return {"loaded": False, "outcome": f"MemoryError: {error}"}
    return {"loaded": True, "outcome": f"loaded {features.nbytes:,} bytes"}


def build_model():
    """Return a small compiled classifier."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run_limited(task: str, path: Path, limit: int) -> dict:
    """Run this script in a limited subprocess and return its result."""
    command = [sys.executable, __file__, "--task", task, "--limit", str(limit), "--keep", str(path)]
    here = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(indented(done.stderr[-2000:]), file=sys.stderr)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {}


def run_task(task: str, path: Path, limit: int) -> None:
    """Start TensorFlow, limit this process, run the task, and print the result as JSON."""
    import numpy as np

    model = build_model()
    model.fit(np.zeros((64, FEATURES), "f4"), np.zeros(64), verbose=0)
    allowed = own_memory("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    before = own_memory("VmRSS")
    result = {"load": load_as_array, "train": train_from_file}[task](path, limit)
    print(json.dumps({**result, "grown": own_memory("VmHWM") - before}))


def indented(text: str) -> str:
    """Return the text, indented by two spaces."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def own_memory(field: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.5GB", help="size of the file (default: %(default)s)")
    parser.add_argument("--limit", default="600MB", help="memory each process may allocate (default: %(default)s)")
    parser.add_argument("--keep", metavar="DIR", help="keep the file in this folder")
    parser.add_argument("--task", choices=["load", "train"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = read_arguments()
    if arguments.task:
        run_task(arguments.task, Path(arguments.keep), int(arguments.limit))
    else:
        sys.exit(main())
