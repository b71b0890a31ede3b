"""How well the order of a plan mixes class labels, found by reading the labels in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import shown
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.plan import StreamPlan
from kerasmem.streaming.quality import (
    GOOD,
    ShuffleQuality,
    batch_entropy,
    block_purity,
    choose_runs,
    uniform_entropy,
)

_MOST_ROWS = 1 << 22  # looked at; of more rows, some
_DOUBLINGS = 8  # of the memory, tried

ReadLabels = Callable[[np.ndarray], Iterable[np.ndarray]]
"""Returns the labels of some rows, whose numbers rise, array after array."""


@dataclass(frozen=True)
class _Mixing:
    """Rows in the order delivered, their labels as numbers from 0, how many there are, and the mean entropies."""

    rows: np.ndarray
    codes: np.ndarray
    classes: int
    entropy: float
    uniform: float


def examine(plan: StreamPlan, labels: str, read: ReadLabels) -> ShuffleQuality:
    """Return how well epoch 0 of a plan mixes labels, and how much is read for it.

    Args:
        plan: the plan.
        labels: name of the dataset with the labels.
        read: reads it.

    Raises:
        UsageError: these are no class labels.
    """
    order = plan.order(0)
    mixing = _mix(plan, order, labels, read)
    ratio = mixing.entropy / mixing.uniform if mixing.uniform > 0 else None
    poor = ratio is not None and ratio < GOOD and plan.settings.shuffle and order.windows > 1
    needed, read_bytes = plan.bytes_per_epoch()
    return ShuffleQuality(
        labels=labels,
        classes=mixing.classes,
        rows_examined=len(mixing.rows),
        entropy_bits=mixing.entropy,
        uniform_bits=mixing.uniform,
        ratio=ratio,
        block_purity=block_purity(mixing.rows, mixing.codes, plan.blocks.grid),
        blocks=plan.blocks.count,
        window_blocks=-(-plan.blocks.count // order.windows),
        window_rows=max(order.window_rows(window) for window in range(order.windows)),
        bytes_needed=needed,
        bytes_read=read_bytes,
        enough_memory=_enough_memory(plan, labels, read) if poor else None,
    )


def _enough_memory(plan: StreamPlan, labels: str, read: ReadLabels) -> int | None:
    """Return the smallest memory budget tried that mixes well; None where none does."""
    for doubling in range(1, _DOUBLINGS + 1):
        budget = plan.memory.total_bytes << doubling
        order = plan.with_budget(budget).order(0)
        mixing = _mix(plan, order, labels, read)
        if mixing.entropy >= GOOD * mixing.uniform or order.windows == 1:
            return budget
    return None


def _mix(plan: StreamPlan, order: EpochOrder, labels: str, read: ReadLabels) -> _Mixing:
    runs = choose_runs(plan.num_batches, plan.num_rows, _MOST_ROWS)
    bounds = [[plan.bounds(batch) for batch in range(first, last)] for first, last in runs]
    rows = np.concatenate([order.rows(run[0][0], run[-1][1]) for run in bounds])
    rising = np.argsort(rows)
    values = np.concatenate([_one_per_row(some, labels) for some in read(rows[rising])])
    found, codes = np.unique(values, return_inverse=True)
    codes = codes.reshape(-1)[np.argsort(rising)]
    lengths = np.array([stop - start for run in bounds for start, stop in run])
    entropy = batch_entropy(codes, np.r_[0, np.cumsum(lengths)])
    class_rows = np.bincount(codes)
    sizes, batches = np.unique(lengths, return_counts=True)
    uniform = [uniform_entropy(class_rows, size) for size in sizes.tolist()]
    return _Mixing(rows, codes, len(found), float(entropy.mean()), float(np.average(uniform, weights=batches)))


def _one_per_row(values: np.ndarray, name: str) -> np.ndarray:
    """Return one number a row for labels that are numbers or one-hot."""
    if values.ndim == 2 and values.shape[1] > 1:
        return values.argmax(axis=1)
    if values.ndim > 2 or (values.dtype.kind == "f" and (values != np.round(values)).any()):
        raise UsageError(f"labels: {shown(name)} holds no class labels, one whole number a row or one-hot")
    return values.reshape(len(values))
