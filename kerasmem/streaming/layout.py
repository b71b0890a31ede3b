"""What is in the file: shapes, types and storage of its datasets, as plain results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

FORMAT_VERSION = 1


def shown(name: str, limit: int = 120) -> str:
    """Return a name found in a file so that it can be printed: quoted, control characters escaped."""
    text = repr(name)
    return text if len(text) <= limit else f"{text[: limit - 1]}…{text[0]}"


def one_line(text: str, limit: int = 1000) -> str:
    """Return text from elsewhere as one line that can be printed: white space joined, control characters escaped."""
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def plain_name(name: str) -> str:
    """Return a dataset's path with what does not matter left out: "/train//x" is "train/x"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


@dataclass(frozen=True)
class DatasetLayout:
    """How one dataset is stored.

    Args:
        name: full path inside the file, such as "train/images".
        shape: shape; axis 0 counts the rows.
        dtype: NumPy's text for the stored type: "<f4", ">i2", "|b1".
        storage: "contiguous", "chunked", "compact" or "virtual".
        chunks: chunk shape, or None where the data is not chunked.
        filters: names of the filters a chunk passes through, such as ("shuffle", "gzip").
        stored_bytes: bytes taken in the file, after compression.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    stored_bytes: int = 0

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored, uncompressed."""
        return prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows that have to be read together: a chunk's rows, or 1 where the data is not chunked."""
        return min(self.chunks[0], max(self.rows, 1)) if self.chunks else 1


@dataclass(frozen=True)
class FileLayout:
    """A file and those of its datasets that were asked for.

    Args:
        path: absolute path of the file.
        size: bytes of the file when it was looked at.
        datasets: one entry a dataset, in the order asked for.
    """

    path: str
    size: int
    datasets: tuple[DatasetLayout, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain numbers, texts and lists, ready for JSON."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FileLayout:
        """Return the layout that `to_dict` wrote, also after a trip through JSON."""

        def dataset(entry: dict[str, Any]) -> DatasetLayout:
            chunks = entry["chunks"]
            return DatasetLayout(
                **{
                    **entry,
                    "shape": tuple(entry["shape"]),
                    "chunks": None if chunks is None else tuple(chunks),
                    "filters": tuple(entry["filters"]),
                }
            )

        return cls(data["path"], data["size"], tuple(dataset(entry) for entry in data["datasets"]))
