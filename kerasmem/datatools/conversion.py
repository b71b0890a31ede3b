"""`kerasmem.data.convert` and `kerasmem.data.repack`: write data as HDF5 that streams well."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from typing import Any

import h5py

from kerasmem import checks
from kerasmem.datatools.array_source import ArraySource
from kerasmem.datatools.conversion_settings import (
    ReadOptions,
    WriteOptions,
    check_outputs,
    output_paths,
    read_compression,
    read_split,
)
from kerasmem.datatools.fields import ColumnChoice
from kerasmem.datatools.hdf5_source import Hdf5Source
from kerasmem.datatools.image_and_record_source import ImageFolder, RecordSource
from kerasmem.datatools.indexing import read_index, write_parts
from kerasmem.datatools.inspection import MOST_INPUTS, choose_roles, stream_line
from kerasmem.datatools.listing import Column, list_contents
from kerasmem.datatools.reports import Conversion, Progress, WrittenDataset, ignore_progress
from kerasmem.datatools.row_source import RowSource, combine
from kerasmem.datatools.table_source import SUFFIXES, open_tables
from kerasmem.datatools.writing import make_plan, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import quote, type_name
from kerasmem.hdf5.rows.paths import INDEX_SUFFIX, natural_order, read_path
from kerasmem.units import parse_size

_HDF5 = (".h5", ".hdf5", ".h5ad", ".mat", ".nc", ".hdf")
_RECORDS = re.compile(r"\.tfrecords?$|\.tfrec$|\.tfrecord-\d+-of-\d+$", re.IGNORECASE)


def convert(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    drop: Sequence[str] = (),
    shuffle: bool = False,
    seed: int = 0,
    split: str | None = None,
    compression: str = "none",
    float32: bool = True,
    memory_budget: int | str = "512MiB",
    force: bool = False,
    executor: Executor | None = None,
    part_size: int | str = "1GiB",
    remote: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **reading: Any,
) -> Conversion:
    """Convert data of any size to HDF5 that `H5ChunkSequence` streams, in bounded memory.

    Sources with the same columns are read one after another. Sources without a common column, such as x.npy and y.npy,
    are put side by side. Datasets are named like the columns, arrays or datasets that are read; an .npy is named like
    its file, images become "x" and the numbers of their folders "y". Attributes of a single HDF5 file are kept if they
    are numbers or texts. Of an image only the first frame is written, without transparency; of a TFRecord only features
    that its first record has. Outputs appear once they are complete.

    Args:
        sources: files, patterns or folders: .npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder with
            one folder of images per class.
        output: the HDF5 file. With `split`, "data.h5" becomes "data-train.h5" and so on. If it ends with ".index", the
            rows are written in order to part-00000.h5 and so on in its folder, and it becomes their index.
        columns: columns of each dataset to write, {"x": "pixel*", "y": "label"}. "*" is all columns that no other
            pattern matches. Defaults to one dataset per column.
        drop: names or patterns of columns to omit.
        shuffle: write the rows in random order. All orders are equally likely. Defaults to False.
        seed: seed of that order. Defaults to 0.
        split: shares of the rows, "0.8,0.2" (train, val) or "0.8,0.1,0.1" (train, val, test). The rows are shuffled.
        compression: "none", "gzip" or "zstd", optionally with a level, "gzip:6". Defaults to "none".
        float32: write float64 as float32. If this makes a value infinite, it is an error. Defaults to True.
        memory_budget: host memory to work in, in bytes or as text. Defaults to "512MiB".
        force: overwrite outputs if they exist. Defaults to False.
        executor: writes the parts of an index, such as `ProcessPoolExecutor(4)`, Dask's `client.get_executor()` or an
            `MPIPoolExecutor`. Defaults to this process.
        part_size: size of the rows in a part, in bytes or as text. Defaults to "1GiB".
        remote: options for output URLs, as for `H5ChunkSequence`.
        progress: called with the step, the number of rows done and the number of all rows.
        **reading: options for sources of one kind, see `ReadOptions`.

    Returns:
        A `Conversion`: the outputs, their datasets, and notes on columns and files that were left out.

    Raises:
        DataError: If a source cannot be read, or its values cannot be written without loss.
        UsageError: If a setting is wrong, or an output exists.
        MissingExtraError: If a format needs a package that is not installed.

    Examples:
        >>> import kerasmem, numpy as np
        >>> np.savez("/tmp/example.npz", x=np.random.rand(1000, 8), y=np.arange(1000) % 3)
        >>> result = kerasmem.data.convert("/tmp/example.npz", "/tmp/example-data.h5", shuffle=True, force=True)
        >>> [(dataset.name, dataset.dtype) for dataset in result.datasets]
        [('x', 'float32'), ('y', 'int64')]
    """
    checks.keywords("convert", reading, [item.name for item in fields(ReadOptions)])
    shares, memory = read_split(split), parse_size(memory_budget, field="memory_budget")
    writing = WriteOptions(
        bool(shares) or shuffle, seed, read_compression(compression), memory, float32, shares, remote
    )
    options = ReadOptions(ColumnChoice(columns, drop), memory // 8, **reading)
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    matching = _find_paths([os.fsdecode(path) for path in paths])
    progress = progress or ignore_progress
    in_parts = executor is not None or os.fsdecode(output).endswith(INDEX_SUFFIX)
    target = read_index(output, writing) if in_parts else read_path(output)
    outputs = output_paths(target, shares)
    if not in_parts:
        check_outputs(outputs, matching, force=force)
    progress("opening the sources", 0, 0)
    try:
        source = _open_sources(matching, options)
        plan = make_plan(source, options, writing)
        if in_parts:
            part_bytes = parse_size(part_size, field="part_size")
            outcome = write_parts(source, plan, options, writing, target, part_bytes, executor, progress, force=force)
        else:
            outcome = write_files(source, options, writing, outputs, progress)
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(f"{quote(error.filename)}: cannot be read or written: {error.strerror}") from error
    written = [Column(field.name, field.dtype, field.shape) for field in plan.datasets]
    features, target_name = choose_roles(written)
    notes = [*source.notes, *(f"{count:,} {loss}" for loss, count in sorted(outcome.losses.items()))]
    if len(features) > MOST_INPUTS:
        notes.append(
            f"{len(features):,} columns would be separate inputs; to put them side by side in one dataset, use "
            "--columns 'x=*' and --columns y=NAME"
        )
    read_types = {field.name: type_name(field.stored_dtype or field.dtype) for field in plan.read}
    datasets = [
        WrittenDataset(
            name=field.name,
            shape=field.shape,
            dtype=type_name(field.dtype),
            source_dtype="+".join(dict.fromkeys(read_types[column] for column in field.columns)),
            bytes=plan.rows * field.row_bytes,
            class_names=field.class_names,
        )
        for field in plan.datasets
    ]
    return Conversion(
        sources=source.paths,
        outputs=outputs,
        rows=plan.rows,
        datasets=tuple(datasets),
        bytes_written=outcome.size,
        notes=tuple(notes),
        line=stream_line(outputs[0], written, features, target_name),
    )


def repack(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, float32: bool = False, **options: Any
) -> Conversion:
    """Rewrite an HDF5 file in whole rows and chunks of about 1 MiB.

    Types are kept, in little-endian byte order, and so are attributes that are numbers or texts. Datasets that cannot
    be trained from, or have another number of rows, are left out, and a note names them.

    Args:
        path: the HDF5 file.
        output: the file to write.
        float32: write float64 as float32. Defaults to False.
        **options: other arguments of `kerasmem.data.convert`, such as `compression` and `shuffle`.

    Returns:
        A `Conversion`, as `kerasmem.data.convert` returns.

    Raises:
        DataError: If the file cannot be read.
        UsageError: If a setting is wrong, or the output exists.

    Examples:
        >>> import h5py, kerasmem, numpy as np
        >>> with h5py.File("/tmp/columns.h5", "w") as f:
        ...     _ = f.create_dataset("x", data=np.zeros((30_000, 60), "f4"), chunks=(30_000, 1), compression="gzip")
        >>> _ = kerasmem.data.repack("/tmp/columns.h5", "/tmp/rows.h5", force=True)
        >>> with h5py.File("/tmp/rows.h5") as f:
        ...     f["x"].chunks
        (4369, 60)
    """
    source = read_path(path)
    if not h5py.is_hdf5(source):
        list_contents(source)  # explains what is wrong
        raise UsageError(f"path must be an HDF5 file; got {source!r}. kerasmem data convert reads other formats")
    return convert(source, output, float32=float32, unpack=False, **options)


def _open_sources(paths: Sequence[str], options: ReadOptions) -> RowSource:
    """Return all sources as one.

    Raises:
        DataError: If a path cannot be read, or the sources do not fit together.
        UsageError: If the format of a path is unknown, or a path occurs twice.
    """
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("sources must be different files; got one more than once")
    tables = {path: path.lower().endswith(SUFFIXES) and os.path.isfile(path) for path in paths}
    others = [_open_source(path, options) for path, is_table in tables.items() if not is_table]
    return combine([*others, *open_tables([path for path, is_table in tables.items() if is_table], options)])


def _find_paths(sources: Sequence[str]) -> list[str]:
    """Return the paths that match paths and patterns.

    Raises:
        DataError: If no file matches a pattern.
        UsageError: If `sources` is empty.
    """
    if not sources:
        raise UsageError("sources must name at least one file or folder")
    paths = []
    for source in sources:
        path = os.path.expanduser(source)
        if glob.has_magic(path) and not os.path.lexists(path):
            matching = sorted(glob.glob(path, recursive=True), key=natural_order)
            if not matching:
                raise DataError(f"{quote(path)}: no file matches this pattern")
            paths += matching
        else:
            paths.append(path)
    return paths


def _open_source(path: str, options: ReadOptions) -> RowSource:
    lower = path.lower()
    if os.path.isdir(path):
        return ImageFolder(path, options)
    if not os.path.isfile(path):
        problem = "is not a file or folder" if os.path.exists(path) else "the file or folder does not exist"
        raise DataError(f"{quote(path)}: {problem}")
    if lower.endswith((".npy", ".npz")):
        return ArraySource(path, options)
    if _RECORDS.search(path):
        return RecordSource(path, options)
    if h5py.is_hdf5(path) or lower.endswith(_HDF5):
        return Hdf5Source(path, options)
    formats = ".npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder with one folder of images a class"
    raise UsageError(f"{quote(path)}: unknown format; sources must be {formats}")
