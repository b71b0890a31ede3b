"""Reports of inspections, conversions, statistics and indexes of data files, and of their progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerasmem.records import Record
from kerasmem.units import format_count, format_size

Progress = Callable[[str, int, int], None]
"""Called with the step, the rows done and all rows."""


def ignore_progress(step: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class DatasetReport:
    """One dataset of a file.

    Args:
        name: full path in the file.
        shape: shape, or None if it has none.
        dtype: type, in NumPy's words.
        storage: "contiguous", "chunked" and so on, or "" if it cannot be trained from.
        chunks: shape of a chunk, or None if there are none.
        filters: filters of a chunk.
        stored_bytes: bytes taken in the file.
        float32_bytes: bytes of its values as float32, or None if unknown.
        problem: why it cannot be trained from, or "".
        class_names: names of its classes.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    storage: str
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    stored_bytes: int
    float32_bytes: int | None
    problem: str = ""
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Inspection(Record, what="inspection", version=1, rows="datasets"):
    """Content of a file, and how well it streams.

    Args:
        path: the file.
        size: its bytes.
        datasets: its datasets.
        batch_size: rows a batch.
        x: dataset taken for features, or None.
        y: dataset taken for targets, or None.
        line: line of Python that streams it, or "".
        stream: text of `H5ChunkSequence.describe()`.
        notes: further remarks.
    """

    path: str
    size: int
    datasets: tuple[DatasetReport, ...]
    batch_size: int
    x: str | None = None
    y: str | None = None
    line: str = ""
    stream: str = ""
    notes: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The file, its size, and the line that streams it."""
        return f"{self.path}: {format_size(self.size)}; {self.line or 'nothing in it can be trained from as it is'}"


@dataclass(frozen=True)
class ColumnStats:
    """Statistics of one dataset, over all axes but the last.

    Args:
        name: the dataset.
        shape: shape of a row.
        dtype: type as stored.
        mean: mean of each entry of the last axis; one where rows are single numbers.
        variance: variance of each, over all rows (not the estimate for a larger population).
        minimum: smallest finite value of all.
        maximum: largest finite value of all.
        nan_count: NaN among the values; they are left out of the rest.
        infinite_count: infinities; left out too.
        missing_count: fill values and values out of their valid range, by netCDF's attributes; left out too.
        class_counts: rows of each value, if it may be labels.
        class_weight: for each value, rows / (classes × its rows), if it may be labels from 0 on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    minimum: float | None
    maximum: float | None
    nan_count: int = 0
    infinite_count: int = 0
    missing_count: int = 0
    class_counts: dict[int, int] | None = None
    class_weight: dict[int, float] | None = None


@dataclass(frozen=True)
class DataStats(Record, what="statistics", version=1, rows="columns"):
    """Statistics of a file's datasets, of one pass through it.

    Args:
        path: the file.
        rows: rows looked at.
        columns: a dataset each.
        code: lines of Python that put them to use.
    """

    path: str
    rows: int
    columns: tuple[ColumnStats, ...]
    code: str

    @property
    def answer(self) -> str:
        """The file, its rows and its datasets."""
        return f"{self.path}: {format_count(self.rows, 'row')} of {', '.join(each.name for each in self.columns)}"

    def __getitem__(self, name: str) -> ColumnStats:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


@dataclass(frozen=True)
class DataIndexed(Record, what="account of an index", version=1):
    """Content of an index.

    Args:
        path: the index.
        files: how many it names.
        rows: of all files.
        datasets: their names.
        stored_bytes: bytes that the datasets take in the files.
        index_bytes: bytes of the index.
    """

    path: str
    files: int
    rows: int
    datasets: tuple[str, ...]
    stored_bytes: int
    index_bytes: int

    @property
    def answer(self) -> str:
        """Content and size of the index."""
        return (
            f"{self.path}: {format_count(self.rows, 'row')} of {format_count(self.files, 'file')}, "
            f"{format_size(self.stored_bytes)}, in {format_size(self.index_bytes)}"
        )


@dataclass(frozen=True)
class WrittenDataset:
    """One dataset, in one file or in all parts.

    Args:
        name: full name in the file.
        shape: shape of a row.
        dtype: type as written.
        source_dtype: type as read. Several are joined by "+".
        bytes: size of its values, uncompressed.
        class_names: names of its classes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str
    bytes: int
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Conversion(Record, what="conversion", version=1, rows="datasets"):
    """Result of a conversion.

    Args:
        sources: the files and folders.
        outputs: the files.
        rows: rows read.
        datasets: datasets written.
        bytes_written: bytes of the files.
        notes: further remarks.
        line: a line of Python that streams the result.
    """

    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: int
    datasets: tuple[WrittenDataset, ...]
    bytes_written: int
    notes: tuple[str, ...] = ()
    line: str = ""

    @property
    def answer(self) -> str:
        """Rows, size and paths of the outputs."""
        return (
            f"{format_count(self.rows, 'row')}, {format_size(self.bytes_written)}, written to {', '.join(self.outputs)}"
        )
