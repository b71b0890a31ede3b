"""All rows of datasets in file order, a window at a time, read and checked as `H5ChunkSequence` reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.columns import Column, make_columns, read_dtype, read_part
from kerasmem.hdf5.format.filters import Scratch
from kerasmem.hdf5.format.layout import DataLayout
from kerasmem.hdf5.rows.scan import scan_files
from kerasmem.hdf5.rows.settings import Access
from kerasmem.streaming.budget import MemoryPlan, plan_memory
from kerasmem.streaming.order import Blocks, EpochOrder
from kerasmem.streaming.reader import RowReader, Task
from kerasmem.units import MIB

WINDOW_BUDGET = 64 * MIB
_DOUBLINGS = 6  # of the budget, where chunks are larger


def read_windows(
    paths: Sequence[str],
    names: Sequence[str],
    *,
    start: int = 0,
    stop: int | None = None,
    access: Access | None = None,
    dtype: str = "stored",
    budget: int = WINDOW_BUDGET,
    threads: int | None = None,
    rows: np.ndarray | None = None,
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the first row and the arrays of each window, in file order.

    Args:
        paths: the files, counted through, as in `scan_files`.
        names: the datasets, of equally many rows.
        start: first row.
        stop: row after the last; None for all.
        access: what may be read.
        dtype: "stored", or a type to convert to.
        budget: bytes that a window and the buffers to read it may take, more where a single chunk needs it.
        threads: that read and unpack; None for as many as the plan has.
        rows: only these, rising; then the number yielded counts the rows yielded so far.

    Raises:
        DataError: If the file or its data cannot be used.
    """
    access = access or Access()
    layout = scan_files(paths, list(names), access)
    columns = plain_columns(layout, dtype)
    selection = range(start, layout.datasets[0].rows if stop is None else stop) if rows is None else rows
    if not len(selection):
        return
    plan = _plan(layout, columns, selection, budget)
    order = EpochOrder(Blocks(selection, layout.block_grid(plan.block_rows)), plan.window_blocks, None, 0)
    reader = RowReader(layout, columns, resident=plan.cache_bytes, access=access)
    first = start if rows is None else 0
    try:
        with ThreadPoolExecutor(threads or plan.threads, "kerasmem-read") as pool:
            local = threading.local()
            for window in range(order.windows):
                count = order.window_rows(window)
                arrays = [np.empty((count, *column.row_shape), column.dtype) for column in columns]
                tasks = reader.tasks(order, window, arrays, in_file_order=True)
                for done in [pool.submit(_do, task, local) for task in tasks]:
                    done.result()
                reader.check()
                yield first, {column.name: array for column, array in zip(columns, arrays, strict=True)}
                first += count
    finally:
        reader.close()


def plain_columns(layout: DataLayout, dtype: str) -> tuple[Column, ...]:
    """Return every dataset as a column of one type, or of the type it is stored as."""
    names = [dataset.name for dataset in layout.datasets]
    by_name = {dataset.name: dataset for dataset in layout.datasets}
    return tuple(make_columns(read_part("x", names), by_name, read_dtype(dtype, names), {}))


def _plan(layout: DataLayout, columns: Sequence[Column], selection: range | np.ndarray, budget: int) -> MemoryPlan:
    for doubling in range(_DOUBLINGS + 1):
        try:
            return plan_memory(
                layout.datasets, columns, selection=selection, batch_size=1, ahead=0, workers=0,
                budget=budget << doubling, ordered=True, grid=layout.block_grid,
            )  # fmt: skip
        except UsageError:
            if doubling == _DOUBLINGS:
                raise
    raise AssertionError


def _do(task: Task, local: threading.local) -> None:
    if not hasattr(local, "scratch"):
        local.scratch = Scratch()
    task(local.scratch)
