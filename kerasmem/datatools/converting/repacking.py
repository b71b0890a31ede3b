"""`kerasmem.data.repack`: an HDF5 file rewritten in chunks that stream well."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import h5py

from kerasmem import checks
from kerasmem.datatools.converting.conversion import write_data
from kerasmem.datatools.converting.fields import ColumnChoice
from kerasmem.datatools.converting.parts import PART_SIZE, read_parting
from kerasmem.datatools.converting.planning import DEFAULT_MEMORY
from kerasmem.datatools.converting.results import Conversion
from kerasmem.datatools.converting.running import Ways
from kerasmem.datatools.converting.settings import ReadOptions, WriteSettings
from kerasmem.datatools.converting.writing import read_compression
from kerasmem.datatools.inspecting.listing import list_contents
from kerasmem.datatools.progress import Progress, tell_nobody
from kerasmem.errors import UsageError
from kerasmem.hdf5.settings import read_path
from kerasmem.units import parse_size


def repack(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    drop: Sequence[str] = (),
    batch_size: int = 32,
    compression: str = "none",
    shuffle: bool = False,
    seed: int = 0,
    float32: bool = False,
    trust_file: bool = False,
    memory_budget: int | str = DEFAULT_MEMORY,
    verify: bool = False,
    force: bool = False,
    executor: Executor | None = None,
    part_size: int | str = PART_SIZE,
    progress: Progress | None = None,
) -> Conversion:
    """Rewrite an HDF5 file in whole rows and chunks of about 1 MiB, compressed as asked for.

    Types are kept (in little-endian) and so are attributes that are numbers or texts. Datasets that cannot be trained
    from, or have another number of rows, are left out and named. For the rest this is `kerasmem.data.convert`.

    Args:
        path: the HDF5 file.
        output: the file to be written.
        columns: as for `kerasmem.data.convert`.
        drop: as for `kerasmem.data.convert`.
        batch_size: rows trained on together, by which the size of chunks is chosen.
        compression: "none", "gzip", "zstd", or with a level, "gzip:6".
        shuffle: write the rows in random order.
        seed: of that order.
        float32: write float64 as float32.
        trust_file: as for `H5ChunkSequence`.
        memory_budget: bytes or text ("512MiB") of the host's memory to work in.
        verify: read the file back and compare checksums before it is moved into place.
        force: overwrite the output.
        executor: as for `kerasmem.data.convert`.
        part_size: as for `kerasmem.data.convert`.
        progress: called with what goes on, the rows done and all rows.

    Raises:
        DataError: the file cannot be read.
        UsageError: a setting is wrong, or the output exists.

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
        list_contents(source)  # says what is wrong
        raise UsageError(f"path: {source!r} is no HDF5 file; kerasmem data convert reads other formats")
    settings = WriteSettings(
        batch_size, shuffle, seed, read_compression(compression), parse_size(memory_budget, field="memory_budget"),
        keep_float64=not checks.flag("float32", float32),
    )  # fmt: skip
    options = ReadOptions(ColumnChoice(columns, drop), settings.memory // 8, trust_file=trust_file)
    parting = read_parting(output, executor, part_size)
    ways = Ways(verify, force, progress or tell_nobody, attributes_from=source)
    return write_data(source, output, settings, options, parting, ways)
