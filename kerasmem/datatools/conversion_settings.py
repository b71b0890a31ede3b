"""Settings of a conversion, which are checked before anything is read, and the paths of its outputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from kerasmem import checks
from kerasmem.checks import Color, Decimal, RowsAxis
from kerasmem.datatools.fields import ColumnChoice
from kerasmem.devices.host import usable_cores
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.format.filters import ZSTD, register_filters
from kerasmem.hdf5.format.layout import quote

_MOST_THREADS = 16
_MOST_PIXELS = 1 << 15  # on a side of an image
_LEVELS = {"gzip": (4, 1, 9), "zstd": (3, 1, 19)}  # default, smallest, largest
_SPLIT_NAMES = {2: ("train", "val"), 3: ("train", "val", "test")}


def read_compression(value: str) -> dict[str, Any]:
    """Return h5py's arguments for "none", "gzip", "gzip:6" or "zstd".

    Raises:
        UsageError: If the compression is unknown.
        MissingExtraError: If it needs a package that is not installed.
    """
    kind, _, level = str(value).partition(":")
    if value == "none":
        return {}
    if kind not in _LEVELS:
        raise UsageError(f"compression must be none, gzip, zstd, gzip:1 to gzip:9 or zstd:1 to zstd:19; got {value!r}")
    default, smallest, largest = _LEVELS[kind]
    if level and not (level.isdecimal() and smallest <= int(level) <= largest):
        raise UsageError(f"compression: {kind} has levels {smallest} to {largest}; got {level!r}")
    number = int(level or default)
    if kind == "gzip":
        return {"compression": "gzip", "compression_opts": number}
    if not register_filters():
        raise MissingExtraError("compression with zstd", "codecs")
    return {"compression": ZSTD, "compression_opts": (number,)}


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading sources. `kerasmem.data.convert` sets the first two, and the others are its arguments.

    Args:
        columns: the columns to read.
        budget: bytes for reading HDF5.
        image_size: size to resize images to, such as "224x160", width first. If not set, all images must have the same
            size. Defaults to None.
        color: "rgb" or "gray". Defaults to "rgb".
        trust_file: as for `H5ChunkSequence`, for HDF5 files. Defaults to False.
        rows_axis: axis of the rows in HDF5 files, "first" or "last". MATLAB stores its first axis last. Defaults to
            "first".
        unpack: apply netCDF's scale_factor and add_offset, and write missing values as NaN. If False, stored values and
            their attributes are kept. Defaults to True.
        header: whether the first row of a CSV file names the columns. Defaults to True.
        delimiter: delimiter of CSV. Defaults to a comma, or to a tab in .tsv files.
        decimal: decimal separator of CSV, "." or ",". Defaults to ".".
        encoding: text encoding of CSV. Defaults to "utf-8".
        text: CSV columns to read as text even if they look like numbers, such as codes with leading zeros.
        threads: number of threads that decode images. Defaults to the usable cores, at most 16.

    Raises:
        UsageError: If a value is invalid.
    """

    columns: ColumnChoice
    budget: int
    image_size: Any = None
    color: Color = "rgb"
    trust_file: bool = False
    rows_axis: RowsAxis = "first"
    unpack: bool = True
    header: bool = True
    delimiter: str | None = None
    decimal: Decimal = "."
    encoding: str = "utf-8"
    text: Sequence[str] = ()
    threads: int = field(default_factory=lambda: min(usable_cores(), _MOST_THREADS))

    def __post_init__(self) -> None:
        checks.choice("color", self.color, get_args(Color))
        checks.choice("rows_axis", self.rows_axis, get_args(RowsAxis))
        checks.choice("decimal", self.decimal, get_args(Decimal))
        object.__setattr__(self, "image_size", _read_image_size(self.image_size))
        try:
            " ".encode(self.encoding)
        except (LookupError, ValueError, TypeError):
            raise UsageError(f"encoding must be one of Python's, such as 'latin-1'; got {self.encoding!r}") from None


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing files.

    Args:
        shuffle: write the rows in random order.
        seed: seed of that order.
        compression: h5py's arguments for the compression of chunks.
        memory: host memory to work in, in bytes.
        float32: write float64 as float32.
        shares: share of the rows in each file, by name, or {} for one file.
        remote: options for URLs.

    Raises:
        UsageError: If a value is invalid.
    """

    shuffle: bool
    seed: int
    compression: Mapping[str, Any]
    memory: int
    float32: bool
    shares: Mapping[str, float] = field(default_factory=dict)
    remote: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        checks.flag("shuffle", self.shuffle)
        checks.flag("float32", self.float32)
        checks.whole("seed", self.seed, 0)


def read_split(value: str | None) -> dict[str, float]:
    """Return the share of each file by name, or {} for one file.

    Raises:
        UsageError: If `value` is not two or three shares that add up to 1.

    Examples:
        >>> read_split("0.8,0.2")
        {'train': 0.8, 'val': 0.2}
    """
    if value is None:
        return {}
    try:
        shares = [float(text) for text in value.split(",")]
    except (AttributeError, ValueError):
        shares = []
    names = _SPLIT_NAMES.get(len(shares), ())
    if not (names and min(shares) > 0 and abs(sum(shares) - 1) <= 1e-6):  # also false for NaN
        raise UsageError(f"split must be two or three shares that add up to 1, such as '0.8,0.1,0.1'; got {value!r}")
    return dict(zip(names, shares, strict=True))


def _read_image_size(text: Any) -> tuple[int, int] | None:
    """Return (width, height) of "224x160". Pairs are returned as they are, because options are copied for parts."""
    if text is None or isinstance(text, tuple):
        return text
    width, _, height = str(text).lower().partition("x")
    if not all(side.isdecimal() and 0 < int(side) <= _MOST_PIXELS for side in (width, height)):
        raise UsageError(f"image_size must be WIDTHxHEIGHT in pixels, such as '224x160'; got {text!r}")
    return int(width), int(height)


def output_paths(output: str, shares: Mapping[str, float]) -> tuple[str, ...]:
    """Return the output files, such as out-train.h5 and out-val.h5 if the rows are split."""
    stem, suffix = os.path.splitext(output)
    return tuple(f"{stem}-{name}{suffix}" for name in shares) or (output,)


def check_outputs(outputs: Sequence[str], sources: Sequence[str], *, force: bool) -> None:
    """Check that outputs can be written without losing data.

    Raises:
        UsageError: If an output is a source or a folder, has no folder, or exists and `force` is not set.
    """
    read = [os.path.realpath(path) for path in sources]
    for output in outputs:
        real = os.path.realpath(output)
        if any(real == path or real.startswith(path + os.sep) for path in read):
            raise UsageError(f"output must not be a source, or in one; got {quote(output)}")
        if os.path.isdir(output):
            raise UsageError(f"output must be a file; got the folder {quote(output)}")
        if not os.path.isdir(os.path.dirname(output)):
            raise UsageError(f"output: the folder {quote(os.path.dirname(output))} does not exist; create it first")
        if os.path.lexists(output) and not force:
            raise UsageError(f"output: {quote(output)} exists already; to replace it, pass force=True (--force)")
