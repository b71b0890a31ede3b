"""What a conversion did, as plain numbers and texts."""

from __future__ import annotations

from dataclasses import dataclass

from kerasmem.records import Record
from kerasmem.units import format_size


@dataclass(frozen=True)
class WrittenDataset:
    """One dataset of an output.

    Args:
        path: the file.
        name: full name in it.
        rows: rows.
        shape: shape of a row.
        dtype: type as written.
        source_dtype: type as read; several, joined by "+", where columns of several types were put together.
        chunk_rows: rows of a chunk.
        bytes: bytes of its values.
        stored_bytes: bytes it takes in the file.
        crc32: CRC-32 of its values in order, little-endian, as `zlib.crc32(dataset[...].tobytes())` has it.
        class_names: what its numbers stand for.
    """

    path: str
    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str
    chunk_rows: int
    bytes: int
    stored_bytes: int
    crc32: int
    class_names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Conversion(Record, what="conversion", version=1, rows="datasets"):
    """Result of a conversion.

    Args:
        sources: the files and folders.
        outputs: the files.
        parts: rows of each part, by name; one called "" where nothing was split.
        rows: rows read.
        datasets: what was written.
        bytes_read: bytes of the values as read.
        bytes_written: bytes of the files.
        float64_saved: bytes saved by writing float64 as float32.
        compression: "none", "gzip:4", "zstd:3".
        shuffled: whether the rows were shuffled.
        seed: of shuffle and split.
        resumed_rows: rows that an interrupted run had done before.
        verified: whether the files were read back and their checksums compared.
        seconds: what it took.
        notes: what else should be known.
        line: a line of Python that streams the result.
    """

    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: dict[str, int]
    rows: int
    datasets: tuple[WrittenDataset, ...]
    bytes_read: int
    bytes_written: int
    float64_saved: int
    compression: str
    shuffled: bool
    seed: int
    resumed_rows: int
    verified: bool
    seconds: float
    notes: tuple[str, ...] = ()
    line: str = ""

    @property
    def answer(self) -> str:
        """Rows, size and paths of the outputs."""
        return f"{self.rows:,} rows, {format_size(self.bytes_written)}, written to {', '.join(self.outputs)}"
