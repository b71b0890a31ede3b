"""`kerasmem data`: the commands that look at data files and write them."""

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
    """Data files: look into them, convert them, index them, and sum up their statistics.

    Examples:
      kerasmem data inspect train.h5
      kerasmem data convert x.npy y.npy -o train.h5 --shuffle
    """


@contextlib.contextmanager
def _working(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Take --workers and --dask out of the options; yield the executor and the progress as arguments."""
    from kerasmem.processes.executors import open_executor

    with open_executor(options.pop("workers"), options.pop("dask")) as executor, progress_bar() as progress:
        yield {"executor": executor, "progress": progress}


@click.command("inspect", cls=GuardedCommand)
@all_of(*FILE, TRUST, "--json")
def inspect_command(file: str, as_json: bool, **options: Any) -> None:
    """List the datasets of an HDF5 FILE, their size in memory, and how well they stream.

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
    """Write SRC as HDF5 that H5ChunkSequence streams, in bounded memory, whatever its size.

    SRC: .npy, .npz, .csv, .tsv, .parquet, .arrow, .tfrecord, HDF5, or a folder that holds a folder of
    images for each class. Sources with the same columns are read one after another, those with none in common side by
    side.
    float64 becomes float32; a value that would become infinite is an error. To NAME.index, the rows are written to
    part-00000.h5 and so on beside it, in --workers processes or by a --dask cluster.

    Examples:
      kerasmem data convert x.npy y.npy -o train.h5
      kerasmem data convert digits.csv -o digits.h5 --columns y=label --columns 'x=*' --shuffle
      kerasmem data convert photos/ -o photos.h5 --image-size 224x224 --split 0.8,0.1,0.1
      kerasmem data convert 'part-*.parquet' -o scans.h5 --compression zstd
      kerasmem data convert cells.h5ad -o cells.h5 --columns x=X --columns y=obs/kind/codes
      kerasmem data convert 'raw/*.parquet' -o s3://bucket/train.index --dask tcp://host:8786

    Outputs appear when they are whole.
    Formats other than .npy, .npz and HDF5 need: pip install 'kerasmem[convert]'
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import conversion_table

    wanted = _read_columns(columns)
    with quiet_tensorflow(), _working(options) as working:
        done = data.convert(sources, columns=wanted, **working, **options)
    show_result(done, as_json, conversion_table)


@click.command("repack", cls=GuardedCommand, seconds=None)
@click.argument("file", type=click.Path())
@all_of(*WRITING, option("--float32", default=False))
def repack_command(file: str, columns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Rewrite an HDF5 FILE: whole rows, chunks of about 1 MiB, other compression, another order.

    `kerasmem data inspect` says how an epoch reads a file.

    Examples:
      kerasmem data repack slow.h5 -o fast.h5
      kerasmem data repack sorted.h5 -o mixed.h5 --shuffle
      kerasmem data repack large.h5 -o small.h5 --compression zstd:9
      kerasmem data repack large.h5 -o parts/small.index --workers 4 --part-size 256MiB
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import conversion_table

    with _working(options) as working:
        done = data.repack(file, columns=_read_columns(columns), **working, **options)
    show_result(done, as_json, conversion_table)


@click.command("stats", cls=GuardedCommand, seconds=None)
@click.argument("file", type=click.Path())
@all_of("--dataset", "--workers", "--dask", TRUST, "--json")
def stats_command(file: str, datasets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print mean, variance, range and class weights of the datasets of FILE, and the lines that put them to use.

    One pass in bounded memory; the figures are those that keras.layers.Normalization(axis=-1).adapt would find.

    Examples:
      kerasmem data stats train.h5
      kerasmem data stats train.h5 --dataset images --dataset labels --json
      kerasmem data stats train.index --workers 8
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import stats_table

    with _working(options) as working:
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
    """Write an index, NAME.index, of HDF5 files read as one, in the order given; of a pattern, part-2 before part-10.

    H5ChunkSequence("NAME.index") then knows rows, types and chunks without opening a file. A file that is changed later
    is an error that names it.

    Examples:
      kerasmem data index 'parts/part-*.h5' -o parts/train.index
      kerasmem data index 's3://bucket/part-*.h5' -o train.index
      kerasmem data index a.h5 b.h5 -o train.index --dataset x --dataset y
    """
    from kerasmem import data
    from kerasmem.rendering.data_tables import index_table

    with _working(options) as working:
        done = data.index(files, output, datasets=list(datasets) or None, **working, **options)
    show_result(done, as_json, index_table)
