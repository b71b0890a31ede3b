"""What `H5ChunkSequence` would do with a file: its order, memory and mixing, without Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from kerasmem.datatools.inspecting.rows import read_windows
from kerasmem.hdf5.columns import make_columns, read_dtype, read_part
from kerasmem.hdf5.layout import DataLayout
from kerasmem.hdf5.scan import scan_files
from kerasmem.hdf5.settings import Access
from kerasmem.streaming.budget import MemoryPlan, is_plain, plan_memory
from kerasmem.streaming.description import advise
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.quality import ShuffleQuality, count_bytes
from kerasmem.streaming.reports import Reports


class Preview(Reports):
    """A stream that is described and never read: `H5ChunkSequence(path, x, y)` with its other settings as they are.

    Args:
        path: the file.
        x: the features.
        y: the targets; None for none, and then rows come in file order.
        batch_size: rows a batch.
        access: what may be read.
        layout: how the datasets are stored, in place of what the file says: for files that are yet to be written.

    Raises:
        DataError: the datasets cannot be trained from.
        UsageError: no memory budget of the usual size will do.
    """

    def __init__(
        self,
        path: str,
        x: str,
        y: str | None,
        *,
        batch_size: int,
        access: Access | None = None,
        layout: DataLayout | None = None,
    ) -> None:
        names = [x] if y is None else [x, y]
        self._path, self._access = path, access or Access()
        self.layout = layout or scan_files([path], names, self._access)
        by_name = {dataset.name: dataset for dataset in self.layout.datasets}
        self._parts = tuple(read_part(role, name) for role, name in zip("xy", names, strict=False))
        wanted = [make_columns(part, by_name, read_dtype("float32", names), {}) for part in self._parts]
        self._columns = tuple(dict.fromkeys(column for columns in wanted for column in columns))
        self._uses = [[self._columns.index(column) for column in columns] for columns in wanted]
        self.batch_size, self.seed, self.shuffle, self.transform = batch_size, 0, y is not None, None
        self.num_rows = self.layout.datasets[0].rows
        self.plan = self._plan(None)
        self._blocks = self._cut(self.plan)

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        return -(-self.num_rows // self.batch_size)

    def reading(self) -> tuple[int, int]:
        """Return the bytes that an epoch needs, and those it reads at most."""
        return count_bytes(
            self.layout.datasets,
            self._blocks,
            resident=self.plan.cache_bytes,
            part_by_part={dataset.name for dataset in self.layout.datasets if is_plain(dataset)},
            chunks=self.layout.chunk_grid,
        )

    def mixing(self, labels: str) -> tuple[ShuffleQuality, str]:
        """Return how well labels are mixed, and what to do where they are not."""
        quality = self._examine(labels)
        return quality, "" if quality.good else advise(quality, shuffle=self.shuffle)

    def _bounds(self, place: int) -> tuple[int, int]:
        return place * self.batch_size, min((place + 1) * self.batch_size, self.num_rows)

    def _ahead_text(self) -> str:
        return ""

    @contextlib.contextmanager
    def _beside(self, labels: str, rows: np.ndarray) -> Iterator[Iterator[list[np.ndarray]]]:
        windows = read_windows([self._path], [labels], access=self._access, rows=rows)
        yield ([window[labels]] for _, window in windows)

    def _order_within(self, budget: int) -> EpochOrder:
        plan = self._plan(budget)
        return EpochOrder(self._cut(plan), plan.window_blocks, self.seed, 0)

    def _cut(self, plan: MemoryPlan) -> Blocks:
        return Blocks(range(self.num_rows), self.layout.block_grid(plan.block_rows))

    def _plan(self, budget: int | None) -> MemoryPlan:
        return plan_memory(
            self.layout.datasets,
            self._columns,
            selection=range(self.num_rows),
            batch_size=self.batch_size,
            ahead=0,
            workers=1,
            budget=budget,
            ordered=not self.shuffle,
            grid=self.layout.block_grid,
        )
