"""`kerasmem.data.convert` and `kerasmem.data.repack`: write data as HDF5 that streams well."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from kerasmem import checks
from kerasmem.datatools.advice import MOST_INPUTS, choose_features, choose_roles, stream_line
from kerasmem.datatools.fields import ColumnChoice
from kerasmem.datatools.listing import list_contents
from kerasmem.datatools.parts import PART_SIZE, is_index, read_index, write_parts
from kerasmem.datatools.planning import DEFAULT_MEMORY, WritePlan, make_plan
from kerasmem.datatools.reports import Conversion, Progress, WrittenDataset, ignore_progress
from kerasmem.datatools.settings import (
    ReadOptions,
    WriteSettings,
    output_paths,
    read_compression,
    read_output,
    read_split,
    refuse_outputs,
)
from kerasmem.datatools.sources.opening import find_paths, open_sources
from kerasmem.datatools.sources.rows import RowSource
from kerasmem.datatools.writing import Outcome, RunOptions, write_files
from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.format.layout import shown, type_name
from kerasmem.hdf5.rows.settings import read_path
from kerasmem.units import parse_size


def convert(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    drop: Sequence[str] = (),
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int = 0,
    split: Any = None,
    compression: str = "none",
    keep_float64: bool = False,
    memory_budget: int | str = DEFAULT_MEMORY,
    verify: bool = False,
    force: bool = False,
    executor: Executor | None = None,
    part_size: int | str = PART_SIZE,
    remote: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **reading: Any,
) -> Conversion:
    """Write data of other formats as HDF5 that `H5ChunkSequence` streams, whatever its size, in bounded memory.

    Sources with the same columns are read one after another; those with none in common, such as x.npy and y.npy, side
    by side. Names are kept: those of columns, arrays and datasets, and of an .npy its file's; images become "x", the
    numbers of their folders "y". Numbers and texts in the attributes of a single HDF5 file are kept too. Outputs appear
    when they are whole.

    Args:
        sources: files, patterns or folders: .npy, .npz, .csv, .tsv, .parquet, .tfrecord, HDF5, or a folder that holds a
            folder of images for each class. "NAME=PATH" names an .npy.
        output: the file; with `split`, "data.h5" becomes "data-train.h5" and so on. If it ends with
            ".index", it becomes the index of part-00000.h5 and so on beside it, which have the rows in order.
        columns: what is written, {"x": "pixel*", "y": "label"}: by dataset the columns it is made of; "*" stands for
            all that nothing else names. None for all columns, a dataset each.
        drop: columns to leave out, names or patterns.
        batch_size: rows trained on together, by which the size of chunks is chosen.
        shuffle: write the rows in random order, all orders being equally likely.
        seed: of `shuffle` and `split`.
        split: shares of the rows such as "0.8,0.1,0.1" (train, val, test) or "train=0.9,dev=0.1", drawn at random.
        compression: "none", "gzip", "zstd", or with a level, "gzip:6".
        keep_float64: write float64 as it is; else it becomes float32, and a value that this makes infinite is an error.
        memory_budget: bytes or text ("512MiB") of the host's memory to work in.
        verify: read the files back and compare checksums before they are moved into place.
        force: overwrite outputs, and discard what an interrupted conversion with other settings left.
        executor: writes the parts of an index, such as `ProcessPoolExecutor(4)`, Dask's `client.get_executor()` or an
            `MPIPoolExecutor`. Defaults to this process.
        part_size: bytes of rows that such a file is to have, or text.
        remote: for outputs behind a URL, as for `H5ChunkSequence`.
        progress: called with the step, the rows done and all rows.
        **reading: how sources of one kind are read: `ReadOptions`.

    Raises:
        DataError: a source cannot be read, or its values cannot be written without loss.
        UsageError: a setting is wrong, or the output exists.
        MissingExtraError: the format needs a package that is not installed.

    Examples:
        >>> import numpy as np
        >>> np.savez("/tmp/example.npz", x=np.random.rand(1000, 8), y=np.arange(1000) % 3)
        >>> done = convert("/tmp/example.npz", "/tmp/example-data.h5", shuffle=True, force=True)
        >>> [(dataset.name, dataset.dtype) for dataset in done.datasets], done.float64_saved
        ([('x', 'float32'), ('y', 'int64')], 32000)
    """
    started = time.monotonic()
    settings = WriteSettings(
        batch_size, shuffle, seed, read_compression(compression), parse_size(memory_budget, field="memory_budget"),
        keep_float64, read_split(split),
    )  # fmt: skip
    options = ReadOptions(ColumnChoice(columns, drop), settings.memory // 8, **reading)
    given = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    found = find_paths([os.fsdecode(path) for path in given])
    paths = [path for _, path in found]
    run = RunOptions(
        verify, force, progress or ignore_progress, executor, parse_size(part_size, field="part_size"),
        attributes_from=paths[0] if len(paths) == 1 and h5py.is_hdf5(paths[0]) else None,
        trust_file=options.trust_file, remote=remote,
    )  # fmt: skip
    in_parts = is_index(output, executor)
    target = read_index(output, settings) if in_parts else read_output(output)
    if not in_parts:
        refuse_outputs(output_paths(target, settings), paths, force=force)
    run.progress("opening the sources", 0, 0)
    try:
        source = open_sources(found, options)
        for field in source.fields:
            options.columns.reads(field.name)
        options.columns.check()
        plan = make_plan(source, settings, options)
        if in_parts:
            outcome = write_parts(source, plan, settings, options, target, run)
        else:
            outcome = write_files(source, plan, settings, options.threads, target, run)
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(f"{shown(error.filename)}: cannot be read or written: {error.strerror}") from error
    result = _result(source, plan, settings, output_paths(target, settings), outcome)
    return replace(result, verified=verify, seconds=time.monotonic() - started)


def _result(
    source: RowSource, plan: WritePlan, settings: WriteSettings, outputs: tuple[str, ...], outcome: Outcome
) -> Conversion:
    notes = [
        f"{name!r}: {count:,} whole numbers beyond 16,777,216 were rounded to float32; keep_float64 (--keep-float64) "
        "keeps their last digits"
        for name, count in outcome.inexact.items()
    ]
    notes += [f"{count:,} {loss}" for loss, count in sorted(outcome.losses.items())]
    compression = settings.compression
    columns = zip(plan.read, plan.cast, strict=True)
    saved = [
        read.row_bytes - cast.row_bytes for read, cast in columns if np.dtype(read.unpacked or read.dtype).kind == "f"
    ]
    own = [(field.name, field.dtype, field.shape) for field in plan.datasets]
    features = choose_features(own, *choose_roles(own))
    if len(features) > MOST_INPUTS:
        notes.append(
            f"{len(features):,} columns would be an input each; --columns 'x=*' with --columns y=NAME puts them side "
            "by side in one dataset"
        )
    return Conversion(
        sources=source.paths,
        outputs=outputs,
        parts=dict(zip(settings.shares, plan.part_rows, strict=True)),
        rows=plan.rows,
        datasets=tuple(_written(plan, outputs, outcome)),
        bytes_read=plan.rows * sum(field.row_bytes for field in plan.read),
        bytes_written=outcome.size,
        float64_saved=plan.rows * sum(saved),
        compression=f"{compression.kind}:{compression.level}" if compression.packs else "none",
        shuffled=settings.shuffle,
        seed=settings.seed,
        resumed_rows=outcome.resumed_rows,
        notes=(*source.notes, *notes),
        line=stream_line(outputs[0], own, settings.batch_size),
    )


def _written(plan: WritePlan, outputs: Sequence[str], outcome: Outcome) -> Iterator[WrittenDataset]:
    read = {field.name: type_name(field.unpacked or field.dtype) for field in plan.read}
    for target, crc32, stored_bytes in zip(plan.targets, outcome.sums, outcome.stored, strict=True):
        field = target.field
        yield WrittenDataset(
            path=outputs[target.file],
            name=field.name,
            rows=target.rows,
            shape=field.shape,
            dtype=type_name(field.dtype),
            source_dtype="+".join(dict.fromkeys(read[column] for column in field.columns)),
            chunk_rows=min(target.chunk_rows, outcome.most_rows),
            bytes=target.rows * field.row_bytes,
            stored_bytes=stored_bytes,
            crc32=crc32,
            class_names=field.class_names,
        )


def repack(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, float32: bool = False, **options: Any
) -> Conversion:
    """Rewrite an HDF5 file in whole rows and chunks of about 1 MiB.

    Types are kept (in little-endian) and so are attributes that are numbers or texts. Datasets that cannot be trained
    from, or have another number of rows, are left out and named.

    Args:
        path: the HDF5 file.
        output: the file to be written.
        float32: write float64 as float32.
        **options: other arguments of `kerasmem.data.convert`, such as `compression` and `shuffle`.

    Raises:
        DataError: If the file cannot be read.
        UsageError: If a setting is wrong, or the output exists.

    Examples:
        >>> import h5py, numpy as np
        >>> with h5py.File("/tmp/columns.h5", "w") as f:
        ...     _ = f.create_dataset("x", data=np.zeros((30_000, 60), "f4"), chunks=(30_000, 1), compression="gzip")
        >>> done = repack("/tmp/columns.h5", "/tmp/rows.h5", force=True)
        >>> done.datasets[0].chunk_rows
        4352
    """
    source = read_path(path)
    if not h5py.is_hdf5(source):
        list_contents(source)  # explains what is wrong
        raise UsageError(f"path: {source!r} is no HDF5 file; kerasmem data convert reads other formats")
    return convert(source, output, keep_float64=not checks.flag("float32", float32), unpack=False, **options)
