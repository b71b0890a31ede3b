"""`convert_data`: data of other formats as HDF5 that streams well."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kerasmem import checks
from kerasmem.datatools.converting.casting import saved_bytes
from kerasmem.datatools.converting.chunk_store import copy_attributes
from kerasmem.datatools.converting.encoding import read_compression
from kerasmem.datatools.converting.fields import ColumnFilter
from kerasmem.datatools.converting.job import Job, folder_of
from kerasmem.datatools.converting.planning import Progress, WritePlan, check_space, fingerprint, make_plan
from kerasmem.datatools.converting.results import Conversion, WrittenDataset
from kerasmem.datatools.converting.running import ConversionRun
from kerasmem.datatools.converting.settings import WriteSettings, output_paths, read_output, refuse_outputs
from kerasmem.datatools.converting.sizing import DEFAULT_MEMORY
from kerasmem.datatools.converting.sources.image_decoding import ImageOptions, read_color, read_image_size
from kerasmem.datatools.converting.sources.opening import ReadOptions, find_paths, open_sources
from kerasmem.datatools.converting.sources.table_files import TableOptions
from kerasmem.datatools.converting.splitting import read_split
from kerasmem.datatools.inspecting.advice import stream_line
from kerasmem.datatools.inspecting.inspection import type_name
from kerasmem.errors import DataError, KerasmemError
from kerasmem.hdf5.scan import close_file, open_file
from kerasmem.units import parse_size


def convert_data(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    drop: Sequence[str] = (),
    batch_size: int = 32,
    shuffle: bool = False,
    seed: int = 0,
    split: Any = None,
    split_as: str = "files",
    stratify: str | None = None,
    group: str | None = None,
    compression: str = "none",
    keep_float64: bool = False,
    narrow_integers: bool = False,
    image_size: Any = None,
    color: str = "rgb",
    accept_mislabelled: bool = False,
    follow_links: bool = False,
    allow_external: bool = False,
    header: bool = True,
    delimiter: str | None = None,
    text: Sequence[str] = (),
    memory: int | str = DEFAULT_MEMORY,
    verify: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write data of other formats as HDF5 that `H5ChunkSequence` streams, whatever its size, in bounded memory.

    Sources with the same columns are read one after another; those with none in common, such as x.npy and y.npy, side
    by side. Names are kept: those of columns, arrays and datasets, and of an .npy its file's; images become "x", the
    numbers of their folders "y". A process that is killed goes on where it was when the same call is made again.

    Args:
        sources: files, patterns or folders: .npy, .npz, .csv, .tsv, .parquet, .tfrecord, HDF5, or a folder that holds a
            folder of images for each class. "NAME=PATH" names an .npy.
        output: the file; with `split` into files, "data.h5" becomes "data-train.h5" and so on.
        columns: what is written, {"x": "pixel*", "y": "label"}: by dataset the columns it is made of; "*" stands for
            all that nothing else names. None for all columns, a dataset each.
        drop: columns to leave out, names or patterns.
        batch_size: rows trained on together, by which the size of chunks is chosen.
        shuffle: write the rows in random order, all orders being equally likely.
        seed: of `shuffle` and `split`.
        split: shares of the rows such as "0.8,0.1,0.1" (train, val, test) or "train=0.9,dev=0.1", drawn at random.
        split_as: "files", or "groups" of one file: train/x, val/x.
        stratify: column of classes that every part gets its share of.
        group: column whose equal values stay in one part, such as a patient's number.
        compression: "none", "gzip", "zstd", or with a level, "gzip:6".
        keep_float64: write float64 as it is; by default it becomes float32, and a value that this would make infinite
            is an error.
        narrow_integers: write whole numbers in as few bytes as their values allow; costs reading them twice.
        image_size: "224x160", width first, to resize images; None where all have one size.
        color: "rgb", "rgba" or "gray".
        accept_mislabelled: accept images that are of another format than their names say.
        follow_links: follow links in folders of images.
        allow_external: read other files that an HDF5 file names.
        header: whether the first row of a CSV file names the columns.
        delimiter: between the values of CSV; by default a comma, in .tsv a tab.
        text: columns of CSV that are texts also where they look like numbers.
        memory: bytes or text ("512MiB") to work in.
        verify: read the files back and compare checksums before they are moved into place.
        force: overwrite outputs, and discard what an interrupted conversion with other settings left.
        progress: called with what goes on, the rows done and all rows.

    Returns:
        What was read and written.

    Raises:
        DataError: a source cannot be read, or its values cannot be written without loss.
        UsageError: a setting is wrong, or the output exists.
        MissingExtraError: the format needs a package that is not installed.

    Example:
        >>> import numpy as np
        >>> np.savez("/tmp/example.npz", x=np.random.rand(1000, 8), y=np.arange(1000) % 3)
        >>> done = convert_data("/tmp/example.npz", "/tmp/example-data.h5", shuffle=True, force=True)
        >>> [(dataset.name, dataset.dtype) for dataset in done.datasets], done.float64_saved
        ([('x', 'float32'), ('y', 'int64')], 32000)
    """
    settings = WriteSettings(
        columns=columns,
        drop=tuple(drop),
        batch_size=checks.whole("batch_size", batch_size),
        shuffle=checks.flag("shuffle", shuffle),
        seed=checks.whole("seed", seed, 0),
        compression=read_compression(compression),
        memory=parse_size(memory, field="memory"),
        keep_float64=checks.flag("keep_float64", keep_float64),
        shares=read_split(split),
        as_groups=checks.choice("split_as", split_as, ("files", "groups")) == "groups",
        stratify=stratify,
        group=group,
        narrow=checks.flag("narrow_integers", narrow_integers),
    )
    wanted = ColumnFilter(columns, settings.drop, [settings.key] if settings.key else [])
    options = ReadOptions(
        wanted=wanted,
        tables=TableOptions(header, delimiter, tuple(text), wanted.keeps),
        images=ImageOptions(read_image_size(image_size), read_color(color), accept_mislabelled),
        follow_links=follow_links,
        allow_external=allow_external,
        threads=available_threads(),
        budget=settings.memory // 8,
    )
    given: Sequence[str | os.PathLike[str]] = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    paths = [os.fsdecode(os.fspath(path)) for path in given]
    return write_data(paths, output, settings, options, verify=verify, force=force, progress=progress)


def write_data(
    sources: Sequence[str],
    output: str | os.PathLike[str],
    settings: WriteSettings,
    options: ReadOptions,
    *,
    verify: bool,
    force: bool,
    progress: Progress | None,
    attributes_from: str | None = None,
) -> Conversion:
    """Do what `convert_data` does, with checked settings; attributes are copied from `attributes_from`, if given."""
    started = time.monotonic()
    tell = progress or (lambda what, done, total: None)
    target = read_output(output)
    outputs = output_paths(target, settings)
    inputs = [path for _, path in find_paths(sources)]
    interrupted = os.path.isdir(folder_of(target))
    refuse_outputs(outputs, inputs, force=force or interrupted)
    tell("opening the sources", 0, 0)
    try:
        source = open_sources(sources, options)
        for field in source.fields:
            options.wanted.keeps(field.name)
        options.wanted.check()
        plan = make_plan(source, settings, threads=options.threads, progress=tell)
        job = Job(target, fingerprint(source, plan, settings), discard=force)
        with job.ending():
            placing = job.state.get("phase") == "placing"
            refuse_outputs(outputs, inputs, force=force or placing)
            if not job.resumed:
                check_space(plan, os.path.dirname(target), shuffle=settings.shuffle, packs=settings.compression.packs)
            run = ConversionRun(source, plan, settings, job, threads=options.threads, progress=tell)
            sums = run.write()
            if attributes_from is not None and not placing:
                pairs = [(join.columns[0], join.field.name) for join in plan.joins if len(join.columns) == 1]
                copy_attributes(attributes_from, run.paths[0], pairs)
            if verify and not placing:
                run.verify(sums)
            run.place(outputs, sums)
        return _result(run, outputs, sums, verified=verify, seconds=time.monotonic() - started)
    except OSError as error:
        if isinstance(error, KerasmemError) or error.filename is None:
            raise
        raise DataError(f"{error.filename!r}: {error.strerror}") from error


def available_threads() -> int:
    """Return how many threads decode and compress."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def _result(
    run: ConversionRun, outputs: Sequence[str], sums: Sequence[int], *, verified: bool, seconds: float
) -> Conversion:
    source, plan, settings = run.source, run.plan, run.settings
    datasets = _written(plan, outputs, sums)
    notes = [
        f"{name!r}: {count:,} whole numbers beyond 16,777,216 were rounded to float32; keep_float64 (--keep-float64) "
        "keeps their last digits"
        for name, count in run.caster.inexact.items()
    ]
    compression = settings.compression
    own = [(t.name, t.field.dtype, t.field.shape) for t in plan.targets[: len(plan.joins)]]
    return Conversion(
        sources=source.paths,
        outputs=tuple(outputs),
        parts=dict(zip(plan.parts, plan.assignment.sizes, strict=True)),
        rows=plan.rows,
        datasets=datasets,
        bytes_read=plan.rows * sum(field.row_bytes for field in plan.read),
        bytes_written=sum(os.path.getsize(path) for path in outputs),
        float64_saved=saved_bytes(plan.read, plan.cast, plan.rows),
        compression=f"{compression.kind}:{compression.level}" if compression.packs else "none",
        shuffled=settings.shuffle,
        seed=settings.seed,
        resumed_rows=run.resumed_rows,
        verified=verified,
        seconds=seconds,
        notes=(*source.notes, *notes),
        line=stream_line(outputs[0], own, settings.batch_size),
    )


def _written(plan: WritePlan, outputs: Sequence[str], sums: Sequence[int]) -> tuple[WrittenDataset, ...]:
    read = {field.name: type_name(field.dtype) for field in plan.read}
    kinds = ["+".join(dict.fromkeys(read[column] for column in join.columns)) for join in plan.joins] * len(plan.parts)
    files = [open_file(path) for path in outputs]
    try:
        return tuple(
            WrittenDataset(
                path=outputs[target.file],
                name=target.name,
                rows=target.rows,
                shape=target.field.shape,
                dtype=type_name(target.field.dtype),
                source_dtype=kind,
                chunk_rows=target.chunk_rows,
                bytes=target.rows * target.field.row_bytes,
                stored_bytes=int(files[target.file][target.name].id.get_storage_size()),
                crc32=value,
                class_names=target.field.class_names,
            )
            for target, value, kind in zip(plan.targets, sums, kinds, strict=True)
        )
    finally:
        for file in files:
            close_file(file)
