"""One loader in a process of its own: iterates shuffled float32 batches of a file each time it is told to.

streaming_peers.py starts it with one argument of JSON. It answers with a line of JSON: its versions, then a pass for
every line that it reads. It imports nothing of the bench, because it runs in other environments.
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

WINDOW = 8  # blocks that are shuffled together
WORKERS = 2

Spec = dict[str, Any]
Epoch = Callable[[], Iterable[Any]]


class Blocks:
    """Blocks of contiguous rows, `WINDOW` of them shuffled together. Each process opens its own file."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.epoch = 0
        self._file: h5py.File | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "epoch": self.epoch, "_file": None}

    @property
    def data(self) -> h5py.Dataset:
        """The dataset, open in this process."""
        if self._file is None:
            self._file = h5py.File(self.spec["path"], "r")
        return self._file["x"]

    def window(self, blocks: np.ndarray) -> np.ndarray:
        """Return the rows of some blocks, each read at once, shuffled together."""
        size, rows = self.spec["chunk_rows"], self.spec["rows"]
        spans = [(block * size, min((block + 1) * size, rows)) for block in blocks.tolist()]
        data, filled = self.data, 0
        out = np.empty((sum(stop - start for start, stop in spans), *data.shape[1:]), data.dtype)
        for start, stop in spans:
            data.read_direct(out, np.s_[start:stop], np.s_[filled : filled + stop - start])
            filled += stop - start
        return out[np.random.default_rng().permutation(len(out))].astype(np.float32, copy=False)

    def windows(self, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """Yield blocks by windows in random order, all of them or one worker's part."""
        self.epoch += 1  # the same in all workers
        count = -(-self.spec["rows"] // self.spec["chunk_rows"])
        order = np.random.default_rng(self.epoch).permutation(count)[part::parts]
        for first in range(0, len(order), WINDOW):
            yield order[first : first + WINDOW]

    def batches(self, part: int, parts: int) -> Iterator[np.ndarray]:
        """Yield shuffled batches. The last one of a window may be smaller."""
        for blocks in self.windows(part, parts):
            rows = self.window(blocks)
            for first in range(0, len(rows), self.spec["batch"]):
                yield rows[first : first + self.spec["batch"]]


def kerasmem(spec: Spec) -> Epoch:
    sys.path.insert(0, spec["root"])
    from kerasmem import H5ChunkSequence

    sequence = H5ChunkSequence(spec["path"], "x", None, batch_size=spec["batch"], memory_budget=spec["budget"])
    return lambda: (batch for (batch,) in sequence.next_epoch())


def tf_data(spec: Spec) -> Epoch:
    import tensorflow as tf

    blocks = Blocks(spec)
    shape = blocks.data.shape[1:]
    count = -(-spec["rows"] // spec["chunk_rows"])

    def load(numbers: Any) -> Any:
        loaded = tf.numpy_function(blocks.window, [numbers], tf.float32, stateful=False)
        return tf.ensure_shape(loaded, (None, *shape))

    data = tf.data.Dataset.range(count).shuffle(count).batch(WINDOW)
    data = data.map(load, num_parallel_calls=WORKERS, deterministic=False).rebatch(spec["batch"])
    data = data.prefetch(tf.data.AUTOTUNE)
    return lambda: data


def torch(spec: Spec) -> Epoch:
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    blocks = Blocks(spec)

    class Batches(IterableDataset):
        def __iter__(self) -> Iterator[np.ndarray]:
            worker = get_worker_info()
            return blocks.batches(worker.id, worker.num_workers)

    loader = DataLoader(Batches(), batch_size=None, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: loader


class Windows:
    """Windows of blocks by number: the records that Grain is given."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._windows = list(blocks.windows())

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._blocks.window(self._windows[index])


def grain(spec: Spec) -> Epoch:
    import grain as library

    class Cut(library.experimental.FlatMapTransform):
        max_fan_out = -(-WINDOW * spec["chunk_rows"] // spec["batch"])

        def flat_map(self, element: np.ndarray) -> list[np.ndarray]:
            return [element[first : first + spec["batch"]] for first in range(0, len(element), spec["batch"])]

    data = library.MapDataset.source(Windows(Blocks(spec))).shuffle(seed=1)
    data = data.to_iter_dataset(library.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2))
    data = library.experimental.FlatMapIterDataset(data, Cut())
    return lambda: data


def tensorflow_io(spec: Spec) -> Epoch:
    import tensorflow as tf
    import tensorflow_io as library

    data = library.IODataset.from_hdf5(spec["path"], "/x").map(lambda row: tf.cast(row, tf.float32))
    data = data.shuffle(WINDOW * spec["chunk_rows"]).batch(spec["batch"]).prefetch(tf.data.AUTOTUNE)
    return lambda: data


LOADERS = {
    "kerasmem": (kerasmem, "tensorflow"),
    "tf.data": (tf_data, "tensorflow"),
    "torch": (torch, "torch"),
    "grain": (grain, "grain"),
    "tensorflow-io": (tensorflow_io, "tensorflow-io"),
}


def bytes_per_second(epoch: Epoch, seconds: float) -> float:
    """Iterate an epoch, or as much of it as the time allows."""
    begin = tenth = time.perf_counter()
    batches = size = 0
    for batch in epoch():
        array = batch if isinstance(batch, np.ndarray) else batch.numpy()  # a view of a torch or TensorFlow tensor
        batches, size = batches + 1, size + array.nbytes
        now = time.perf_counter()
        if batches == 10:
            tenth = now
        if batches >= 14 and now - tenth > seconds:
            break
    return size / (time.perf_counter() - begin)


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to the standard error stream
    make, package = LOADERS[spec["peer"].partition(":")[0]]
    epoch = make(spec)
    bytes_per_second(epoch, spec["seconds"])
    print(json.dumps({"python": sys.version.split()[0], package: metadata.version(package)}), file=answers, flush=True)
    for _ in sys.stdin:
        rate = bytes_per_second(epoch, spec["seconds"])
        print(json.dumps({"bytes_per_second": rate}), file=answers, flush=True)


if __name__ == "__main__":
    main()
