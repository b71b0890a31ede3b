"""Results of inspections, conversions, statistics and indexes of data files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerasmem.records import Record
from kerasmem.units import format_count, format_size

Progress = Callable[[str, int, int], None]
"""Called with the step, the number of rows done and the number of all rows."""


def ignore_progress(step: str, done: int, total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class DatasetReport:
    """One dataset of an HDF5 file.

    Attributes:
        name: full path in the file.
        shape: shape, or None if it has none.
        dtype: name of NumPy's type, such as "float32".
        storage: "contiguous", "chunked" and so on, or "" if it cannot be trained from.
        chunks: shape of the chunks, or None.
        filters: names of the filters of the chunks.
        stored_bytes: bytes in the file.
        float32_bytes: bytes of the values as float32, or None if unknown.
        problem: reason why it cannot be trained from, or "".
        class_names: names of the classes, or None if the file has none.
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
    """Content of an HDF5 file, and how well it streams.

    Attributes:
        path: the file.
        size: bytes of the file.
        datasets: its datasets.
        batch_size: rows per batch.
        x: name of the features, or None.
        y: name of the targets, or None.
        line: line of Python that streams the file, or "".
        stream: text of `H5ChunkSequence.describe()`, or "".
        notes: notes for the user.
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
        """Path, size and the line of Python that streams the file."""
        return f"{self.path}: {format_size(self.size)}; {self.line or 'it has no dataset that can be trained from'}"


@dataclass(frozen=True)
class ColumnStats:
    """Statistics of one dataset, over all axes but the last. NaN, infinite and missing values are left out.

    Attributes:
        name: name of the dataset.
        shape: shape of a row.
        dtype: type of the stored values.
        mean: mean of each entry of the last axis. If rows are single numbers, there is one.
        variance: population variance of each entry of the last axis.
        minimum: smallest finite value, or None.
        maximum: largest finite value, or None.
        nan_count: number of NaN.
        infinite_count: number of infinite values.
        missing_count: number of fill values and of values outside their valid range, by netCDF's attributes.
        class_counts: number of rows by value, or None if the values are not labels.
        class_weight: rows / (classes × rows of the class) by value, or None if the values are not labels from 0.
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
    """Statistics of a file's datasets.

    Attributes:
        path: the file.
        rows: number of rows.
        columns: statistics of each dataset.
        code: lines of Python that use them, or "".
    """

    path: str
    rows: int
    columns: tuple[ColumnStats, ...]
    code: str

    @property
    def answer(self) -> str:
        """Path, number of rows, and names of the datasets."""
        return f"{self.path}: {format_count(self.rows, 'row')} of {', '.join(column.name for column in self.columns)}"

    def __getitem__(self, name: str) -> ColumnStats:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


@dataclass(frozen=True)
class IndexSummary(Record, what="summary of an index", version=1):
    """Content of an index.

    Attributes:
        path: path or URL of the index.
        files: number of files.
        rows: number of rows in all files.
        datasets: names of the datasets.
        stored_bytes: bytes of the datasets in the files.
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
    """One dataset of the output, in one file or in all parts.

    Attributes:
        name: full path in the file.
        shape: shape of a row.
        dtype: type in the output.
        source_dtype: type in the source. Several are joined by "+".
        bytes: uncompressed bytes of the values.
        class_names: names of the classes, or None if there are none.
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

    Attributes:
        sources: the files and folders that were read.
        outputs: the files that were written.
        rows: number of rows.
        datasets: the datasets that were written.
        bytes_written: bytes of the outputs.
        notes: notes for the user.
        line: line of Python that streams the output.
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
