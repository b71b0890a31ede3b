"""Settings of a conversion, checked before anything is read, and the names of its outputs."""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np

from kerasmem import checks
from kerasmem.checks import Color, Decimal, RowsAxis
from kerasmem.datatools.fields import ColumnChoice
from kerasmem.devices.host import usable_cores
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.hdf5.format.filters import register_filters
from kerasmem.hdf5.format.layout import shown
from kerasmem.hdf5.rows.settings import read_path

_MOST_THREADS = 16
_LEVELS = {"gzip": (4, 1, 9), "zstd": (3, 1, 19)}  # usual, least, most
_USUAL = {2: ("train", "val"), 3: ("train", "val", "test")}  # names of parts


def available_threads() -> int:
    """Return how many threads decode and compress."""
    return min(usable_cores(), _MOST_THREADS)


@dataclass(frozen=True)
class Compression:
    """What is done to a chunk on its way into the file.

    Args:
        kind: "none", "gzip" or "zstd"; the last two with the bytes of numbers sorted by significance before.
        level: of effort.
    """

    kind: str = "none"
    level: int = 0

    @property
    def packs(self) -> bool:
        """Whether chunks are compressed."""
        return self.kind != "none"

    def encode(self, chunk: np.ndarray) -> bytes:
        """Return a chunk's stored bytes. Other threads can run meanwhile."""
        data = np.ascontiguousarray(chunk).view(np.uint8).reshape(-1)
        if chunk.dtype.itemsize > 1:
            data = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T).reshape(-1)
        return _compressor(self)(data)


def read_compression(value: str | None) -> Compression:
    """Parse "none", "gzip", "gzip:6" or "zstd".

    Raises:
        UsageError: there is no such compression.
        MissingExtraError: it needs a package that is not installed.
    """
    kind, _, level = str(value or "none").partition(":")
    if kind == "none" and not level:
        return Compression()
    if kind not in _LEVELS:
        raise UsageError(f"compression: {value!r} is none of none, gzip, zstd, gzip:1 to gzip:9, zstd:1 to zstd:19")
    usual, least, most = _LEVELS[kind]
    if level and not (level.isdecimal() and least <= int(level) <= most):
        raise UsageError(f"compression: {kind} has levels {least} to {most}, not {level!r}")
    if kind == "zstd" and (not register_filters() or find_spec("imagecodecs") is None):
        raise MissingExtraError("compression with zstd", "codecs")
    return Compression(kind, int(level) if level else usual)


@functools.cache
def _compressor(compression: Compression) -> Callable[[np.ndarray], bytes]:
    level = compression.level
    if compression.kind == "zstd":
        import imagecodecs

        return lambda data: bytes(imagecodecs.zstd_encode(data, level=level))  # type: ignore[arg-type]  # any buffer
    try:
        import deflate
    except ImportError:
        return lambda data: zlib.compress(data.data, level)
    return lambda data: bytes(deflate.zlib_compress(data, level))


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read: the first two are set by `kerasmem.data.convert`, the others are its arguments.

    Args:
        columns: which columns are read.
        budget: bytes for reading HDF5.
        image_size: "224x160", width first, to resize images. Defaults to the size that all have.
        color: "rgb", "rgba" or "gray".
        follow_links: follow links in folders of images.
        trust_file: as for `H5ChunkSequence`, of HDF5 files.
        rows_axis: axis of the rows in HDF5 files, "first" or "last". MATLAB stores its first axis last.
        unpack: write the values that netCDF's packed ones stand for (scale_factor, add_offset), and NaN for missing
            ones. False keeps the stored values and their attributes.
        header: whether the first row of a CSV file names the columns.
        delimiter: between the values of CSV. Defaults to a comma, in .tsv a tab.
        decimal: before the fractions of numbers in CSV, "." or ",".
        encoding: of the text in CSV.
        text: columns of CSV that are texts even if they look like numbers, such as codes that begin with zeros.
        threads: that decode and compress.

    Raises:
        UsageError: If there is no such size, color or encoding.
    """

    columns: ColumnChoice
    budget: int
    image_size: Any = None
    color: Color = "rgb"
    follow_links: bool = False
    trust_file: bool = False
    rows_axis: RowsAxis = "first"
    unpack: bool = True
    header: bool = True
    delimiter: str | None = None
    decimal: Decimal = "."
    encoding: str = "utf-8"
    text: Sequence[str] = ()
    threads: int = field(default_factory=available_threads)

    def __post_init__(self) -> None:
        checks.choice("color", self.color, get_args(Color))
        checks.choice("rows_axis", self.rows_axis, get_args(RowsAxis))
        checks.choice("decimal", self.decimal, get_args(Decimal))
        object.__setattr__(self, "image_size", _read_image_size(self.image_size))
        try:
            " ".encode(self.encoding)
        except (LookupError, ValueError, TypeError):
            raise UsageError(f"encoding: {self.encoding!r} is no encoding; try 'latin-1' or 'utf-16'") from None


@dataclass(frozen=True)
class WriteSettings:
    """What the result depends on, apart from the sources and their columns.

    Args:
        batch_size: rows trained on together, for the size of chunks.
        shuffle: whether rows are written in random order.
        seed: of shuffle and split.
        compression: what is done to chunks.
        memory: bytes.
        keep_float64: write float64 as it is.
        shares: the share of each part by name; one called "" where nothing is split.

    Raises:
        UsageError: a setting is wrong, or settings contradict each other.
    """

    batch_size: int
    shuffle: bool
    seed: int
    compression: Compression
    memory: int
    keep_float64: bool
    shares: Mapping[str, float] = field(default_factory=lambda: read_split(None))

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {  # without NumPy's kinds, which JSON does not take
            "batch_size": checks.whole("batch_size", self.batch_size),
            "seed": checks.whole("seed", self.seed, 0),
            **{name: checks.flag(name, getattr(self, name)) for name in ("shuffle", "keep_float64")},
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def splits(self) -> bool:
        """Whether there are several parts."""
        return len(self.shares) > 1


def read_split(value: Any) -> dict[str, float]:
    """Return the share of each part by name, or {"": 1.0} if nothing is split.

    Args:
        value: None, "0.8,0.1,0.1", "train=0.8,test=0.2", or the same as a mapping.

    Raises:
        UsageError: these are no shares that add up to 1.

    Examples:
        >>> read_split("0.8,0.2")
        {'train': 0.8, 'val': 0.2}
    """
    if value is None:
        return {"": 1.0}
    if isinstance(value, Mapping):
        pairs = [(str(name), share) for name, share in value.items()]
    else:
        texts = [text.strip() for text in str(value).split(",")]
        if all("=" in text for text in texts):
            pairs = [(name.strip(), share) for name, _, share in (text.partition("=") for text in texts)]
        else:
            names = _USUAL.get(len(texts), tuple(f"part{number}" for number in range(1, len(texts) + 1)))
            pairs = list(zip(names, texts, strict=True))
    shares = {}
    for name, share in pairs:
        try:
            number = float(share)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < 1:
            raise UsageError(f"split: {share!r} is no share between 0 and 1; write for example '0.8,0.1,0.1'")
        if not name or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise UsageError(f"split: {name!r} cannot be part of a file's name; use letters and digits")
        if name in shares:
            raise UsageError(f"split: {name!r} is named twice")
        shares[name] = number
    if len(shares) < 2 or abs(sum(shares.values()) - 1) > 1e-6:
        raise UsageError(f"split: the shares {list(shares.values())} do not add up to 1; write for example '0.8,0.2'")
    return shares


def _read_image_size(value: Any) -> tuple[int, int] | None:
    """Return (width, height) of "224x224" or a pair."""
    if value is None:
        return None
    parts = value.lower().replace("×", "x").split("x") if isinstance(value, str) else value
    try:
        width, height = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise UsageError(f"image_size: {value!r} is no size; write for example '224x160', width first") from None
    if not (0 < width <= 1 << 15 and 0 < height <= 1 << 15):
        raise UsageError(f"image_size: {value!r} is out of range")
    return width, height


def read_output(output: Any) -> str:
    """Return the absolute path of an output.

    Raises:
        UsageError: it cannot be written there.
    """
    path = read_path(output)
    if os.path.isdir(path):
        raise UsageError(f"output: {shown(path)} is a folder; name a file in it")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise UsageError(f"output: the folder {shown(folder)} does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"output: no permission to write in {shown(folder)}")
    return path


def output_paths(output: str, settings: WriteSettings) -> tuple[str, ...]:
    """Return the output files: out-train.h5 and so on for several parts."""
    if not settings.splits:
        return (output,)
    stem, suffix = os.path.splitext(output)
    return tuple(f"{stem}-{name}{suffix}" for name in settings.shares)


def refuse_outputs(outputs: Sequence[str], sources: Sequence[str], *, force: bool) -> None:
    """Refuse to write onto a source, and onto an existing file without `force`.

    Raises:
        UsageError: that would happen.
    """
    real = [os.path.realpath(path) for path in sources]
    for output in outputs:
        here = os.path.realpath(output)
        for path in real:
            same = os.path.exists(here) and os.path.exists(path) and os.path.samefile(here, path)
            if here == path or same or (os.path.isdir(path) and here.startswith(path + os.sep)):
                raise UsageError(f"output: {shown(output)} is, or lies in, what is read; choose another name")
        if os.path.isdir(output):
            raise UsageError(f"output: {shown(output)} is a folder; choose another name")
        if os.path.lexists(output) and not force:
            raise UsageError(f"output: {shown(output)} exists already; choose another name, or force=True (--force)")
