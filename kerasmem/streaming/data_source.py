"""H5DataSource: rows of HDF5 files by their numbers, and windows of rows in file order."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column, read_dtype, read_part, read_parts, read_rows, read_scale
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.layout import DataLayout
from kerasmem.hdf5.rows.paths import Access, read_data
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.streaming.budget import MemoryPlan, plan_memory
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.reader import RowReader
from kerasmem.streaming.stream_plan import build_batch, choose_columns, dataset_names
from kerasmem.streaming.workers import ForkLocal
from kerasmem.units import MIB, format_count

_RESIDENT_BYTES = 64 * MIB  # for datasets that stay in memory, such as labels, but never the heaviest one
WINDOW_BUDGET = 64 * MIB


class H5DataSource:
    """Random access to the rows of HDF5 files: `source[i]` is row `i`, and `len(source)` the number of rows.

    Use it with loaders that choose the order of rows themselves: PyTorch's `DataLoader` with a `DistributedSampler`,
    Grain's `MapDataset.source` and `DataLoader`, or Ray Data. It can be pickled, and each process opens the files on
    first use.

    Rows of one request, such as `source[[3, 1, 2]]`, are read together, each chunk once. A single row of compressed
    chunks costs its whole chunk. If a loader requests single rows, store the data uncompressed or in small chunks, or
    let `H5ChunkSequence` choose the order.

    Args:
        path: files, a pattern, URLs or an index, as for `H5ChunkSequence`.
        x: dataset name of the features, or a list or dict of names, as for `H5ChunkSequence`. Defaults to "x".
        y: the same for the targets; None if there are none. Defaults to "y".
        sample_weight: the same for weights.
        rows: rows to use, as for `H5ChunkSequence`. `source[0]` is the first selected row. Defaults to all.
        dtype: type of the features, as for `H5ChunkSequence`. Defaults to "float32".
        scale: factor, or (factor, offset), as for `H5ChunkSequence`.
        trust_file: as for `H5ChunkSequence`. Defaults to False.
        remote: as for `H5ChunkSequence`.

    Raises:
        DataError: If the files or their data cannot be used.
        UsageError: If a setting is wrong.

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/rows.h5", "w") as f:
        ...     f["x"], f["y"] = np.arange(20.0).reshape(10, 2), np.arange(10)
        >>> from kerasmem import H5DataSource
        >>> source = H5DataSource("/tmp/rows.h5")
        >>> x, y = source[3]
        >>> len(source), x.tolist(), int(y), [int(y) for x, y in source[[7, 2]]]
        (10, [6.0, 7.0], 3, [7, 2])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        x: Any = "x",
        y: Any = "y",
        *,
        sample_weight: Any = None,
        rows: Any = None,
        dtype: Any = "float32",
        scale: Any = None,
        trust_file: bool = False,
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        files, self._access = read_data(path, trust_file, remote)
        self._parts = read_parts(x, y, sample_weight)
        names = dataset_names(self._parts)
        self._layout = scan_files(files, names, self._access)
        dtypes, scales = read_dtype(dtype, names), read_scale(scale, names)
        self._columns, self._uses = choose_columns(self._layout, self._parts, dtypes, scales)
        self._rows = read_rows(rows, self._layout.datasets[0].rows, ordered=True)
        heaviest = max(self._layout.datasets, key=lambda dataset: dataset.row_bytes)
        self._grid = self._layout.block_grid(heaviest.chunk_rows)  # computed once, because it reads every file's layout
        self._reader: ForkLocal[RowReader] = ForkLocal()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a list of rows for a slice, list, tuple or array of row numbers.

        Returns:
            Each row is x, (x, y) or (x, y, sample_weight), in the structure of the names passed.
        """
        if isinstance(index, slice):
            return self.__getitems__(range(*index.indices(len(self))))
        if isinstance(index, (list, tuple, np.ndarray)):
            return self.__getitems__(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> list[Any]:
        """Return rows in the order of `indices`. PyTorch's `DataLoader` calls this for each batch."""
        arrays = self._read(indices)
        return [self._build([array[row] for array in arrays]) for row in range(len(indices))]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Any:
        """Return some rows as one batch of arrays, in the order of `indices`.

        Examples:
            >>> import h5py, numpy as np
            >>> with h5py.File("/tmp/batch.h5", "w") as f:
            ...     f["x"], f["y"] = np.arange(20.0).reshape(10, 2), np.arange(10)
            >>> from kerasmem import H5DataSource
            >>> H5DataSource("/tmp/batch.h5").batch([5, 1])[1].tolist()
            [5, 1]
        """
        return self._build(self._read(indices))

    def close(self) -> None:
        """Close the files. The next request opens them again. A request in progress in another thread may fail."""
        reader = self._reader.take()
        if reader is not None:
            reader.close()

    def __repr__(self) -> str:
        return f"<H5DataSource {self._layout.title}: {format_count(len(self), 'row')}>"

    def _check_index(self, index: Any) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} does not exist; there are {len(self):,}, 0 to {len(self) - 1:,}")
        return number % len(self)

    def _build(self, arrays: Sequence[Any]) -> Any:
        batch = build_batch(self._parts, self._uses, arrays)
        return batch if len(batch) > 1 else batch[0]

    def _read(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return some rows, one array per column."""
        numbers = np.array([self._check_index(index) for index in indices], np.int64)
        rows = self._rows.start + numbers if isinstance(self._rows, range) else self._rows[numbers]
        return self._reader.get(self._open).read(rows, self._grid)

    def _open(self) -> RowReader:
        datasets = self._layout.datasets
        heaviest = max(datasets, key=lambda dataset: dataset.row_bytes)
        small = [
            dataset.name
            for dataset in datasets
            if dataset.rows * dataset.row_bytes <= _RESIDENT_BYTES and dataset is not heaviest
        ]
        return RowReader(self._layout, self._columns, resident=small, access=self._access)


def read_windows(
    paths: Sequence[str],
    names: Sequence[str],
    *,
    start: int = 0,
    stop: int | None = None,
    access: Access | None = None,
    budget: int = WINDOW_BUDGET,
    threads: int | None = None,
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the first row and the arrays of each window, in file order.

    Args:
        paths: the files, read as one.
        names: datasets with equally many rows.
        start: first row.
        stop: row after the last. Defaults to all.
        access: trust in the files, and access to URLs.
        budget: bytes for a window and the buffers to read it. It is exceeded if a single chunk needs more.
        threads: number of threads that read and decode. Defaults to that of the plan.

    Raises:
        DataError: If the file or its data cannot be used.
    """
    access = access or Access()
    part = read_part("x", names)
    layout = scan_files(paths, list(part.names), access)
    columns = choose_columns(layout, [part], read_dtype("stored", part.names), {})[0]
    selection = range(start, layout.datasets[0].rows if stop is None else stop)
    if not len(selection):
        return
    plan = _plan(layout, columns, selection, budget)
    order = EpochOrder(Blocks(selection, layout.block_grid(plan.block_rows)), plan.window_blocks, None, 0)
    reader = RowReader(layout, columns, resident=plan.cache_bytes, access=access)
    try:
        thread = threading.local()  # buffers of each thread
        with ThreadPoolExecutor(
            threads or plan.threads, initializer=lambda: setattr(thread, "scratch", Scratch())
        ) as pool:
            for window in range(order.windows):
                count = order.window_rows(window)
                arrays = [np.empty((count, *column.row_shape), column.dtype) for column in columns]
                tasks = reader.tasks(order, window, arrays, in_file_order=True)
                list(pool.map(lambda task: task(thread.scratch), tasks))
                reader.check()
                yield start, {column.name: array for column, array in zip(columns, arrays, strict=True)}
                start += count
    finally:
        reader.close()


def _plan(
    layout: DataLayout, columns: Sequence[Column], selection: range, budget: int, doublings: int = 6
) -> MemoryPlan:
    """Return a plan within the budget, doubling it if a chunk does not fit."""
    try:
        return plan_memory(
            layout.datasets, columns, selection=selection, batch_size=1, ahead=0, workers=0,
            budget=budget, ordered=True, grid=layout.block_grid,
        )  # fmt: skip
    except UsageError:
        if not doublings:
            raise
        return _plan(layout, columns, selection, 2 * budget, doublings - 1)
