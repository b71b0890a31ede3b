"""What a sequence says about itself before training: its plan in words, and how well it shuffles."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.columns import Column, Part
from kerasmem.hdf5.layout import DataLayout, shown
from kerasmem.hdf5.remote.fetcher import Traffic
from kerasmem.hdf5.remote.ranges import advise_blocks
from kerasmem.hdf5.remote.urls import is_url
from kerasmem.hdf5.settings import Access
from kerasmem.streaming.budget import MemoryPlan, is_plain
from kerasmem.streaming.description import advise, describe_quality, describe_stream
from kerasmem.streaming.live import Live
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.quality import (
    GOOD,
    ShuffleQuality,
    batch_entropy,
    block_purity,
    choose_runs,
    count_bytes,
    uniform_entropy,
)

_MOST_ROWS = 1 << 22  # looked at; of more rows, some
_DOUBLINGS = 8  # of the memory, tried


class Reports:
    """The part of a sequence that describes it; not to be made by itself."""

    batch_size: int
    num_rows: int
    seed: int
    shuffle: bool
    layout: DataLayout
    plan: MemoryPlan
    transform: Any
    _parts: tuple[Part, ...]
    _columns: tuple[Column, ...]
    _uses: Sequence[Sequence[int]]
    _blocks: Any
    _access: Access
    _live: Live | None

    if TYPE_CHECKING:  # what the sequence has to have

        def __len__(self) -> Any: ...
        def _bounds(self, place: int) -> Any: ...
        def _ahead_text(self) -> Any: ...
        def _beside(self, labels: str, rows: np.ndarray) -> Any: ...
        def _order_within(self, budget: int) -> Any: ...

    def describe(self, labels: str | None = None) -> str:
        """Return a few lines on rows, batches, types, blocks, windows and memory.

        Args:
            labels: name of a dataset with class labels: then how well they are mixed is said too, for which
                they are read.
        """
        lines = describe_stream(
            title=self.layout.title,
            parts=self._parts,
            columns=[[self._columns[use] for use in uses] for uses in self._uses],
            layouts={layout.name: layout for layout in self.layout.datasets},
            plan=self.plan,
            blocks=self._blocks.count,
            rows=self.num_rows,
            batches=len(self),
            batch_size=self.batch_size,
            seed=self.seed if self.shuffle else None,
            ahead=self._ahead_text(),
        )
        if self._is_remote:
            lines += "\n" + self._traffic().describe(self._access.remote)
        return lines if labels is None else f"{lines}\n{describe_quality(self._examine(labels), shuffle=self.shuffle)}"

    @property
    def read_bytes(self) -> int:
        """Bytes taken from the files so far, or received where they are remote; `close()` begins anew.

        Divided by the bytes of the files and by the epochs delivered it is the read amplification.
        """
        return self._live.reader.bytes_read if self._live is not None and self._live.is_here else 0

    @property
    def _is_remote(self) -> bool:
        return any(is_url(file.path) for file in self.layout.files)

    def _traffic(self) -> Traffic:
        return self._live.reader.files.traffic if self._live is not None and self._live.is_here else Traffic()

    def _warn_of_small_requests(self) -> None:
        if self._is_remote and self.shuffle:
            stored = sum(layout.stored_bytes / max(layout.rows, 1) for layout in self.layout.datasets)
            advice = advise_blocks(self.plan.block_rows, stored, self._blocks.count)
            if advice:
                warnings.warn(f"H5ChunkSequence: {advice}", stacklevel=3)

    def quality(self, labels: str | None = None) -> ShuffleQuality:
        """Return how well epoch 0 mixes class labels, against a uniform shuffle, and how much is read for it.

        In a file sorted by class, blocks are homogeneous, and where few of them are shuffled together batches
        hold few classes. Then this warns, with the `memory_budget` that would do. Up to 4 million rows are
        looked at, of larger data some stretches of the epoch.

        Args:
            labels: dataset with one label a row, whole numbers, or one-hot; by default that of the targets.

        Raises:
            UsageError: these are no labels.

        Example:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/labels.h5", "w") as f:
            ...     f["x"], f["y"] = np.zeros((1000, 8)), np.repeat(range(10), 100)
            >>> from kerasmem import H5ChunkSequence
            >>> H5ChunkSequence("/tmp/labels.h5").quality().good
            True
        """
        if labels is None:
            targets = [name for part in self._parts if part.role == "y" for name in part.names]
            if len(targets) != 1:
                raise UsageError("labels: name the dataset of the labels, as there is no single one of targets")
            labels = targets[0]
        quality = self._examine(labels)
        if not quality.good:
            warnings.warn(f"H5ChunkSequence: {advise(quality, shuffle=self.shuffle)}", stacklevel=2)
        return quality

    def _examine(self, labels: str) -> ShuffleQuality:
        seed = self.seed if self.shuffle else None
        order = EpochOrder(self._blocks, self.plan.window_blocks, seed, 0)
        rows, codes, classes, entropy, uniform = self._mix(order, labels)
        ratio = entropy / uniform if uniform > 0 else None
        enough = None
        if ratio is not None and ratio < GOOD and self.shuffle and order.windows > 1:
            for doubling in range(1, _DOUBLINGS + 1):
                budget = self.plan.total_bytes << doubling
                larger = self._order_within(budget)
                _, _, _, reached, expected = self._mix(larger, labels)
                if reached >= GOOD * expected or larger.windows == 1:
                    enough = budget
                    break
        needed, read = count_bytes(
            self.layout.datasets,
            self._blocks,
            resident=self.plan.cache_bytes,
            part_by_part={layout.name for layout in self.layout.datasets if is_plain(layout)},
            chunks=self.layout.chunk_grid,
        )
        return ShuffleQuality(
            labels=labels,
            classes=classes,
            rows_examined=len(rows),
            entropy_bits=entropy,
            uniform_bits=uniform,
            ratio=ratio,
            block_purity=block_purity(rows, codes, self._blocks.grid),
            blocks=self._blocks.count,
            window_blocks=-(-self._blocks.count // order.windows),
            window_rows=max(order.window_rows(window) for window in range(order.windows)),
            bytes_needed=needed,
            bytes_read=read,
            enough_memory=enough,
        )

    def _mix(self, order: EpochOrder, labels: str) -> tuple[np.ndarray, np.ndarray, int, float, float]:
        """Return rows of an order, their labels as numbers from 0, how many there are, and both mean entropies."""
        runs = choose_runs(len(self), self.num_rows, _MOST_ROWS)
        bounds = [[self._bounds(place) for place in range(first, last)] for first, last in runs]
        rows = np.concatenate([order.rows(run[0][0], run[-1][1]) for run in bounds])
        rising = np.argsort(rows)
        with self._beside(labels, rows[rising]) as beside:
            values = np.concatenate([_one_a_row(batch[0], labels) for batch in beside])
        found, codes = np.unique(values, return_inverse=True)
        codes = codes.reshape(-1)[np.argsort(rising)]
        lengths = np.array([stop - start for run in bounds for start, stop in run])
        entropy = batch_entropy(codes, np.r_[0, np.cumsum(lengths)])
        class_rows = np.bincount(codes)
        sizes, batches = np.unique(lengths, return_counts=True)
        uniform = [uniform_entropy(class_rows, size) for size in sizes.tolist()]
        return rows, codes, len(found), float(entropy.mean()), float(np.average(uniform, weights=batches))


def _one_a_row(values: np.ndarray, name: str) -> np.ndarray:
    """Return one number a row for labels that are numbers or one-hot."""
    if values.ndim == 2 and values.shape[1] > 1:
        return values.argmax(axis=1)
    if values.ndim > 2 or (values.dtype.kind == "f" and (values != np.round(values)).any()):
        raise UsageError(f"labels: {shown(name)} holds no class labels, one whole number a row or one-hot")
    return values.reshape(len(values))
