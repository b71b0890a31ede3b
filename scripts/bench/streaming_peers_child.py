"""One loader in a process of its own: goes through shuffled float32 batches of a file each time it is told to.

Started by streaming_peers.py with one argument of JSON: peer, form, path, rows, batch, chunk_rows, budget, seconds,
root. It answers on its original standard output, a line of JSON each: what it is, then, for every line it is sent, a
pass. Imports nothing of the bench, as it runs in other people's environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

import h5py
import numpy as np

WINDOW = 8  # blocks of rows that the two-level forms shuffle together: less than kerasmem does, and cheaper
WORKERS = 2

Epoch = Callable[[], Iterable[Any]]


class Rows:
    """Single rows of the file, at random; opened again in every process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self._file: h5py.File | None = None
        self._pid = self.epoch = 0

    @property
    def data(self) -> h5py.Dataset:
        """The dataset, open in this process."""
        if self._file is None or self._pid != os.getpid():
            self._file, self._pid = h5py.File(self.spec["path"], "r"), os.getpid()
        return self._file["x"]

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "_file": None, "_pid": 0, "epoch": self.epoch}

    def __len__(self) -> int:
        return int(self.spec["rows"])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.data[int(index)].astype(np.float32, copy=False)

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """Return a batch, read row by row, which in h5py is faster than a list of rows."""
        return np.stack([self[index] for index in indices])

    def window(self, blocks: np.ndarray) -> np.ndarray:
        """Return the rows of some blocks, each read in one go, shuffled together."""
        size, rows = self.spec["chunk_rows"], len(self)
        spans = [(block * size, min((block + 1) * size, rows)) for block in blocks.tolist()]
        data, at = self.data, 0
        out = np.empty((sum(stop - start for start, stop in spans), *data.shape[1:]), data.dtype)
        for start, stop in spans:
            data.read_direct(out, np.s_[start:stop], np.s_[at : at + stop - start])
            at += stop - start
        return out[np.random.default_rng().permutation(len(out))].astype(np.float32, copy=False)

    def windows(self, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """Return blocks' numbers by windows, all of them or one worker's part, in random order."""
        self.epoch += 1  # alike in all workers
        order = np.random.default_rng(self.epoch).permutation(-(-len(self) // self.spec["chunk_rows"]))[part::parts]
        for first in range(0, len(order), WINDOW):
            yield order[first : first + WINDOW]

    def batches(self, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """Return batches, shuffled on two levels; the last one of a window may be smaller."""
        for blocks in self.windows(part, parts):
            rows = self.window(blocks)
            for first in range(0, len(rows), self.spec["batch"]):
                yield rows[first : first + self.spec["batch"]]


def kerasmem(spec: dict[str, Any], form: str) -> Epoch:
    sys.path.insert(0, spec["root"])
    from kerasmem import H5ChunkSequence

    sequence = H5ChunkSequence(spec["path"], "x", None, batch_size=spec["batch"], memory_budget=spec["budget"])
    if form == "as_tf_dataset":
        data = sequence.as_tf_dataset()
        return lambda: data
    return lambda: (batch for (batch,) in sequence.next_epoch())


def tf_data(spec: dict[str, Any], form: str) -> Epoch:
    import tensorflow as tf

    rows = Rows(spec)
    shape = rows.data.shape[1:]
    if form == "blocks, from_generator":
        kind = tf.TensorSpec((None, *shape), tf.float32)
        data = tf.data.Dataset.from_generator(rows.batches, output_signature=kind).prefetch(tf.data.AUTOTUNE)
        return lambda: data
    if form == "blocks, numpy_function":
        count = -(-len(rows) // spec["chunk_rows"])
        numbers = tf.data.Dataset.range(count).shuffle(count).batch(WINDOW)
        read = rows.window
    else:
        numbers = tf.data.Dataset.range(len(rows)).shuffle(len(rows)).batch(spec["batch"])
        read = rows.batch

    def load(indices: Any) -> Any:
        loaded = tf.numpy_function(read, [indices], tf.float32, stateful=False)
        return tf.ensure_shape(loaded, (None, *shape))

    data = numbers.map(load, num_parallel_calls=WORKERS, deterministic=False)
    data = (data.rebatch(spec["batch"]) if read == rows.window else data).prefetch(tf.data.AUTOTUNE)
    return lambda: data


def torch(spec: dict[str, Any], form: str) -> Epoch:
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    rows = Rows(spec)
    if form == "rows":
        by_row = DataLoader(rows, spec["batch"], shuffle=True, num_workers=WORKERS, persistent_workers=True)
        return lambda: by_row

    class Blocks(IterableDataset):
        def __iter__(self) -> Iterator[np.ndarray]:
            worker = get_worker_info()
            return rows.batches(worker.id, worker.num_workers)

    loader = DataLoader(Blocks(), batch_size=None, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: loader


class Windows:
    """Blocks of rows, shuffled together, by number: what Grain is given as one record."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._windows = list(rows.windows())

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows.window(self._windows[index])


def grain(spec: dict[str, Any], form: str) -> Epoch:
    import grain as library

    rows = Rows(spec)
    if form.startswith("rows"):
        data = library.MapDataset.source(rows).shuffle(seed=1)
        data = data.to_iter_dataset(library.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=4 * spec["batch"]))
        data = data.batch(spec["batch"])
    else:
        most = -(-WINDOW * spec["chunk_rows"] // spec["batch"])

        class Cut(library.experimental.FlatMapTransform):
            max_fan_out = most

            def flat_map(self, element: np.ndarray) -> list[np.ndarray]:
                return [element[at : at + spec["batch"]] for at in range(0, len(element), spec["batch"])]

        data = library.MapDataset.source(Windows(rows)).shuffle(seed=1)
        data = data.to_iter_dataset(library.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2))
        data = library.experimental.FlatMapIterDataset(data, Cut())
    if form.endswith("processes"):
        data = data.mp_prefetch(library.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=4))
    return lambda: data


def tensorflow_io(spec: dict[str, Any], form: str) -> Epoch:
    import tensorflow as tf
    import tensorflow_io as library

    data = library.IODataset.from_hdf5(spec["path"], "/x").map(lambda row: tf.cast(row, tf.float32))
    data = data.shuffle(WINDOW * spec["chunk_rows"]).batch(spec["batch"]).prefetch(tf.data.AUTOTUNE)
    return lambda: data


PEERS = {
    "kerasmem": (kerasmem, ("kerasmem", "tensorflow", "keras", "h5py")),
    "tf.data": (tf_data, ("tensorflow", "h5py")),
    "torch": (torch, ("torch", "h5py")),
    "grain": (grain, ("grain", "h5py")),
    "tensorflow-io": (tensorflow_io, ("tensorflow-io", "tensorflow")),
}


def go_through(epoch: Epoch, rows: int, seconds: float) -> dict[str, Any]:
    """Go through an epoch or as much of it as fits in the time; return what was delivered and how long it took.

    `steady` is the rate from the tenth batch on, which leaves out the start of workers.
    """
    begin = time.perf_counter()
    batches = size = got = late_size = 0
    tenth = first = begin
    for batch in epoch():
        now = time.perf_counter()
        if not batches:
            first = now
        if not isinstance(batch, np.ndarray) and hasattr(batch, "numpy"):
            batch = batch.numpy()  # a view, for torch and TensorFlow
        elif isinstance(batch, tuple):
            batch = batch[0].numpy()
        if batches == 10:
            tenth = now
        elif batches > 10:
            late_size += batch.nbytes
        batches, size, got = batches + 1, size + batch.nbytes, got + len(batch)
        if batches >= 14 and now - tenth > seconds:
            break
    end = time.perf_counter()
    return {
        "batches": batches,
        "bytes_per_second": size / (end - begin),
        "steady_bytes_per_second": late_size / (end - tenth) if late_size else None,
        "first_batch_seconds": round(first - begin, 4),
        "whole": got == rows,
    }


def version(name: str) -> str:
    for known in (name, f"{name}-cpu"):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return "as it lies here"


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere

    def answer(data: dict[str, Any]) -> None:
        print(json.dumps(data), file=answers, flush=True)

    make, packages = PEERS[spec["peer"]]
    epoch = make(spec, spec["form"])
    go_through(epoch, spec["rows"], spec["seconds"])
    answer({"versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}}})
    for _ in sys.stdin:
        answer(go_through(epoch, spec["rows"], spec["seconds"]))


if __name__ == "__main__":
    main()
