"""How well a plan shuffles, and how much it reads, said before training: found by reading labels in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kerasmem.errors import UsageError
from kerasmem.hdf5.format.grid import Grid
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.settings import Access
from kerasmem.records import Record
from kerasmem.streaming.order import EpochOrder
from kerasmem.streaming.plan import StreamPlan
from kerasmem.units import KIB, MIB, format_count, format_size

GOOD = 0.99  # of the entropy of a uniform shuffle
_MOST_ROWS = 1 << 22  # looked at; of more rows, some
_MOST_PLACED = 1 << 24  # rows of windows that a run lies in: the order of a window is drawn as a whole
_LEAST_RUNS, _RUNS = 4, 16
_DOUBLINGS = 8  # of the memory, tried

ReadLabels = Callable[[np.ndarray], Iterable[np.ndarray]]
"""Returns the labels of some rows, whose numbers rise, array after array."""


@dataclass(frozen=True)
class ShuffleQuality(Record, what="shuffle quality", version=1):
    """Mixing of batches against a uniform shuffle of all rows, and the bytes read for them.

    Args:
        labels: the dataset whose values were looked at.
        classes: different values.
        rows_examined: rows of the planned order that were looked at.
        entropy_bits: label entropy of a batch, the mean over those examined.
        uniform_bits: what it would be expected to be, had all rows been shuffled uniformly.
        ratio: the first of the second; None if there is one class.
        block_purity: share of a block's commonest label, the mean over blocks; 1 if blocks are homogeneous.
        blocks: blocks an epoch.
        window_blocks: blocks shuffled together.
        window_rows: rows shuffled together.
        bytes_needed: bytes that the rows used take in the file.
        bytes_read: bytes read in an epoch, at most.
        enough_memory: the smallest `memory_budget` tried that gets to 99 % of a uniform shuffle, in bytes; None
            where this one does, or none is known to.
    """

    labels: str
    classes: int
    rows_examined: int
    entropy_bits: float
    uniform_bits: float
    ratio: float | None
    block_purity: float
    blocks: int
    window_blocks: int
    window_rows: int
    bytes_needed: int
    bytes_read: int
    enough_memory: int | None = None

    @property
    def good(self) -> bool:
        """Whether batches are as mixed as a uniform shuffle's, but for 1 %."""
        return self.ratio is None or self.ratio >= GOOD

    @property
    def read_amplification(self) -> float:
        """Bytes read in an epoch for each byte that is needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


def batch_entropy(codes: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the label entropy of each batch, in bits.

    Args:
        codes: labels in the order of delivery, whole numbers from 0.
        edges: where batches begin, and where the last one ends.

    Examples:
        >>> batch_entropy(np.array([0, 0, 0, 1]), np.array([0, 2, 4])).tolist()
        [0.0, 1.0]
    """
    lengths = np.diff(edges)
    classes = int(codes.max()) + 1
    batch = np.repeat(np.arange(len(lengths)), lengths)
    found, counts = np.unique(batch * classes + codes[edges[0] : edges[-1]], return_counts=True)
    share = counts / lengths[found // classes]
    return np.bincount(found // classes, -share * np.log2(share), len(lengths)) + 0.0


def uniform_entropy(class_rows: np.ndarray, batch: int) -> float:
    """Return the label entropy to be expected of `batch` rows drawn at random from all, in bits.

    The number of a class's rows in the batch is hypergeometric; the mean is exact.

    Args:
        class_rows: rows of each class.
        batch: rows drawn, at most all.
    """
    rows = int(class_rows.sum())
    of_size, classes = np.unique(class_rows[class_rows > 0], return_counts=True)
    logs = np.r_[0.0, np.cumsum(np.log(np.arange(1, rows + 1)))]  # of the factorials
    drawn = np.arange(1, batch + 1)
    term = -(drawn / batch) * np.log2(drawn / batch)
    total = 0.0
    for size, count in zip(of_size.tolist(), classes.tolist(), strict=True):
        k = drawn[(drawn <= size) & (batch - drawn <= rows - size)]
        chance = np.exp(
            (logs[size] - logs[k] - logs[size - k])
            + (logs[rows - size] - logs[batch - k] - logs[rows - size - batch + k])
            - (logs[rows] - logs[batch] - logs[rows - batch])
        )
        total += count * float(chance @ term[k - 1])
    return total


def block_purity(rows: np.ndarray, codes: np.ndarray, grid: Grid) -> float:
    """Return the share of the commonest label in a block, the mean over blocks."""
    blocks, number = np.unique(grid.cell(rows), return_inverse=True)
    classes = int(codes.max()) + 1
    found, counts = np.unique(number * classes + codes, return_counts=True)
    most = np.zeros(len(blocks))
    np.maximum.at(most, found // classes, counts)
    return float(np.mean(most / np.bincount(number)))


def choose_runs(batches: int, rows: int, most: int, runs: int = _RUNS) -> list[tuple[int, int]]:
    """Return runs of batches to look at, first and stop: all, or some spread over the epoch.

    Args:
        batches: batches of an epoch.
        rows: its rows.
        most: rows to look at.
        runs: how many runs, where not all batches are looked at.
    """
    if rows <= most or batches <= runs:
        return [(0, batches)]
    length = max(1, batches * most // rows // runs)
    starts = np.linspace(0, batches - length, runs).astype(int)
    return [(int(start), int(start) + length) for start in starts]


@dataclass(frozen=True)
class _Mixing:
    """Rows in the order delivered, their labels as numbers from 0, how many there are, and the mean entropies."""

    rows: np.ndarray
    codes: np.ndarray
    classes: int
    entropy: float
    uniform: float


def examine(plan: StreamPlan, labels: str, files: Sequence[str], access: Access | None = None) -> ShuffleQuality:
    """Return how well epoch 0 of a plan mixes labels, and how much is read for it.

    Args:
        plan: the plan.
        labels: name of the dataset with the labels.
        files: the files, counted through, as in `scan_files`.
        access: what of them may be read.

    Raises:
        UsageError: If these are no class labels.
    """
    from kerasmem.streaming.data_source import read_windows

    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        return (window[labels] for _, window in read_windows(files, [labels], access=access, rows=rows))

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
    """Return the smallest memory budget tried that mixes well, or None."""
    for doubling in range(1, _DOUBLINGS + 1):
        budget = plan.memory.total_bytes << doubling
        order = replace(plan, settings=replace(plan.settings, memory_budget=budget)).order(0)
        mixing = _mix(plan, order, labels, read)
        if mixing.entropy >= GOOD * mixing.uniform or order.windows == 1:
            return budget
    return None


def _mix(plan: StreamPlan, order: EpochOrder, labels: str, read: ReadLabels) -> _Mixing:
    widest = max(order.window_rows(window) for window in range(order.windows))
    runs = choose_runs(
        plan.num_batches, plan.num_rows, _MOST_ROWS, max(_LEAST_RUNS, min(_RUNS, _MOST_PLACED // widest))
    )
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


def describe_quality(quality: ShuffleQuality, *, shuffle: bool) -> str:
    """Return how well labels are mixed and how much is read, one fact a line."""
    lines = []
    if quality.ratio is None:
        lines.append(f"  mixing        all rows have one label in {shown(quality.labels)}")
    else:
        lines.append(
            f"  mixing        {quality.entropy_bits:.3f} bits of label entropy a batch "
            f"({format_count(quality.classes, 'different label')} in {shown(quality.labels)}), "
            f"{_percent(quality.ratio)} of a uniform shuffle's; a block is {_percent(quality.block_purity)} one label"
        )
    lines.append(
        f"  reading       {quality.read_amplification:.2f} bytes an epoch for each byte stored "
        f"({format_size(quality.bytes_needed)})"
    )
    if not quality.good:
        lines.append(f"  advice        {advise(quality, shuffle=shuffle)}")
    return "\n".join(lines)


def advise(quality: ShuffleQuality, *, shuffle: bool) -> str:
    """Return why labels are mixed badly, and the remedy."""
    assert quality.ratio is not None
    wrong = f"batches have {_percent(quality.ratio)} of the label entropy of a uniform shuffle"
    if not shuffle:
        return f"{wrong}, because rows come in file order; pass shuffle=True to train"
    why = (
        f"{wrong}: a block of rows is {_percent(quality.block_purity)} one label, and "
        f"{format_count(quality.window_blocks, 'block')} are shuffled together"
    )
    rewrite = "write the file again with its rows shuffled, or in smaller chunks"
    if quality.enough_memory is None:
        return f"{why}; {rewrite}"
    size = quality.enough_memory
    budget = f"{-(-size // MIB)}MiB" if size >= 8 * MIB else f"{-(-size // KIB)}KiB"
    return f"{why}; memory_budget={budget!r} is enough for 99 %, or {rewrite}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
