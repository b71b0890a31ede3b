"""`kerasmem data`: commands that inspect, convert and index data files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import click

from kerasmem.cli.command import COMMANDS_OF, GuardedCommand, LazyGroup
from kerasmem.cli.options import FILE, TRUST, WRITING, all_of, option, read_lists
from kerasmem.cli.terminal import progress_bar, quiet_tensorflow, show_result

COMMANDS = COMMANDS_OF["kerasmem data"]


@click.group("data", cls=LazyGroup, lines=COMMANDS, modules=dict.fromkeys(COMMANDS, "data_command"))
def data_command() -> None:
    """Inspect, convert, repack and index data files, and compute their statistics.

    Examples:
      kerasmem data inspect train.h5
      kerasmem data convert x.npy y.npy -o train.h5 --shuffle
    """


@contextlib.contextmanager
def _executor_arguments(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replace --workers and --dask in the options by the arguments `executor` and `progress`."""
    from kerasmem.processes.executors import open_executor

    with open_executor(options.pop("workers"), options.pop("dask")) as executor, progress_bar() as progress:
        yield {"executor": executor, "progress": progress}


@click.command("inspect", cls=GuardedCommand)
@all_of(*FILE, TRUST, "--json")
def inspect_command(file: str, as_json: bool, **options: Any) -> None:
    """List the datasets of an HDF5 FILE, their sizes in memory, and how well they stream.

    Examples:
      kerasmem data inspect train.h5
      kerasmem data inspect cells.h5ad --x X --y obs/kind/codes --batch-size 256
      kerasmem data inspect train.h5 --json
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import inspection_table

    show_result(data.inspect(file, **options), as_json, inspection_table)


@click.command("convert", cls=GuardedCommand, seconds=None)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@all_of(
    *WRITING, "--float32", "--image-size",
    "--color", "--header", "--delimiter", "--decimal", "--encoding", "--text",
    "--rows-axis", "--unpack",
)  # fmt: skip
def convert_command(sources: tuple[str, ...], columns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Convert SRC of any size to HDF5 that H5ChunkSequence streams, in bounded memory.

    SRC: .npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder with one folder of images per class.
    Sources with the same columns are read one after another, sources without a common column side by side.
    float64 becomes float32; if a value would become infinite, it is an error. If the output is NAME.index, rows are
    written to part-00000.h5 and so on in its folder, in --workers processes or on a --dask cluster.

    Examples:
      kerasmem data convert x.npy y.npy -o train.h5
      kerasmem data convert digits.csv -o digits.h5 --columns y=label --columns 'x=*' --shuffle
      kerasmem data convert photos/ -o photos.h5 --image-size 224x224 --split 0.8,0.1,0.1
      kerasmem data convert 'part-*.parquet' -o scans.h5 --compression zstd
      kerasmem data convert cells.h5ad -o cells.h5 --columns x=X --columns y=obs/kind/codes
      kerasmem data convert 'raw/*.parquet' -o s3://bucket/train.index --dask tcp://host:8786

    Outputs appear once they are complete.
    Formats other than .npy, .npz and HDF5 need: pip install 'kerasmem[convert]'
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import conversion_table

    with quiet_tensorflow(), _executor_arguments(options) as working:
        result = data.convert(sources, columns=_read_columns(columns), **working, **options)
    show_result(result, as_json, conversion_table)


@click.command("repack", cls=GuardedCommand, seconds=None)
@click.argument("file", type=click.Path())
@all_of(*WRITING, option("--float32", default=False))
def repack_command(file: str, columns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Rewrite an HDF5 FILE with chunks of whole rows of about 1 MiB, other compression, or shuffled rows.

    `kerasmem data inspect` shows how an epoch reads a file.

    Examples:
      kerasmem data repack slow.h5 -o fast.h5
      kerasmem data repack sorted.h5 -o mixed.h5 --shuffle
      kerasmem data repack large.h5 -o small.h5 --compression zstd:9
      kerasmem data repack large.h5 -o parts/small.index --workers 4 --part-size 256MiB
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import conversion_table

    with _executor_arguments(options) as working:
        result = data.repack(file, columns=_read_columns(columns), **working, **options)
    show_result(result, as_json, conversion_table)


@click.command("stats", cls=GuardedCommand, seconds=None)
@click.argument("file", type=click.Path())
@all_of("--dataset", "--workers", "--dask", TRUST, "--json")
def stats_command(file: str, datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print mean, variance, range and class weights of the datasets of FILE, and lines of Python that use them.

    The file is read once in bounded memory. Means and variances equal those of
    keras.layers.Normalization(axis=-1).adapt.

    Examples:
      kerasmem data stats train.h5
      kerasmem data stats train.h5 --dataset images --dataset labels --json
      kerasmem data stats train.index --workers 8
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import stats_table

    with _executor_arguments(options) as working:
        result = data.stats(file, list(datasets) or None, **working, **options)
    show_result(result, as_json, stats_table)


def _read_columns(texts: Sequence[str]) -> dict[str, list[str]] | None:
    lists = read_lists("--columns", texts, "x='pixel*' or y=label")
    return {name: columns.split(",") for name, columns in lists.items()} or None


@click.command("index", cls=GuardedCommand, seconds=None)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@all_of(option("--output", required=True), "--dataset", "--workers", "--dask", TRUST, "--json")
def index_command(
    files: tuple[str, ...], output: str, datasets: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Write an index, NAME.index, of HDF5 files that are read as one, in this order (part-2 before part-10).

    H5ChunkSequence("NAME.index") then knows rows, types and chunks without opening a file. If a file changes later,
    reading it is an error.

    Examples:
      kerasmem data index 'parts/part-*.h5' -o parts/train.index
      kerasmem data index 's3://bucket/part-*.h5' -o train.index
      kerasmem data index a.h5 b.h5 -o train.index --dataset x --dataset y
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import index_table

    with _executor_arguments(options) as working:
        result = data.index(files, output, datasets=list(datasets) or None, **working, **options)
    show_result(result, as_json, index_table)
