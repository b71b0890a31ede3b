"""Rows into chunks: filled one after another, summed up, compressed in threads, in the order of the rows."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.archives import open_archive
from kerasmem.datatools.converting.chunk_store import PackedStore, PlainStore
from kerasmem.datatools.converting.encoding import Compression
from kerasmem.datatools.converting.fields import Target
from kerasmem.files import open_kept, replacing


class ChunkWriter:
    """Writes rows to several datasets; what is not at a checkpoint is written again after a kill.

    Args:
        store: where chunks go.
        targets: the datasets.
        compression: what is done to chunks.
        threads: that compress.
    """

    def __init__(
        self, store: PlainStore | PackedStore, targets: Sequence[Target], compression: Compression, threads: int
    ) -> None:
        self._store, self._targets = store, targets
        self._chunks = [np.zeros((target.chunk_rows, *target.field.shape), target.field.dtype) for target in targets]
        self._filled = [0] * len(targets)
        self._done = [0] * len(targets)
        self.sums = [0] * len(targets)
        self._encode = compression.encode
        self._pool = ThreadPoolExecutor(threads, "kerasmem-pack") if compression.packs else None
        self._most = threads + 2
        self._waiting: deque[tuple[int, int, Future[bytes]]] = deque()

    def append(self, target: int, rows: np.ndarray) -> None:
        """Take rows of a dataset."""
        chunk, size = self._chunks[target], self._targets[target].chunk_rows
        at = 0
        while at < len(rows):
            filled = self._filled[target]
            taken = min(size - filled, len(rows) - at)
            chunk[filled : filled + taken] = rows[at : at + taken]
            self._filled[target] += taken
            at += taken
            if self._filled[target] == size:
                self._emit(target)

    def finish(self) -> None:
        """Write the chunks that are not full, and make the files whole."""
        for target, filled in enumerate(self._filled):
            if filled:
                self._chunks[target][filled:] = 0
                self._emit(target)
        self._drain(0)
        self._store.finish()

    def state(self, path: str) -> dict[str, Any]:
        """Write what is in memory to a file; return what else has to be known to go on from here."""
        self._drain(0)
        with replacing(path, durable=True) as file:
            np.savez(file, *(chunk[:filled] for chunk, filled in zip(self._chunks, self._filled, strict=True)))
        return {"done": self._done.copy(), "sums": self.sums.copy(), "store": self._store.sync()}

    def restore(self, path: str, state: Mapping[str, Any]) -> None:
        """Go on from what `state` wrote and returned."""
        self._done, self.sums = list(state["done"]), list(state["sums"])
        with open_kept(path) as file, open_archive(file) as tails:
            for number, chunk in enumerate(self._chunks):
                rows = tails[f"arr_{number}"]
                self._filled[number] = len(rows)
                chunk[: len(rows)] = rows

    def close(self) -> None:
        """End the threads and close the files, whatever was done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _emit(self, target: int) -> None:
        chunk, filled, number = self._chunks[target], self._filled[target], self._done[target]
        self.sums[target] = zlib.crc32(chunk[:filled].reshape(-1).view(np.uint8).data, self.sums[target])
        if self._pool is None:
            self._store.put(target, number, chunk.reshape(-1).view(np.uint8).data)
        else:
            self._waiting.append((target, number, self._pool.submit(self._encode, chunk.copy())))
            self._drain(self._most)
        self._filled[target] = 0
        self._done[target] += 1

    def _drain(self, most: int) -> None:
        while len(self._waiting) > most:
            target, number, done = self._waiting.popleft()
            self._store.put(target, number, done.result())
