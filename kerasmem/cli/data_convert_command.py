"""`kerasmem data convert`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import WRITING, all_of, choice_option, read_columns, repeatable_option
from kerasmem.cli.terminal import progress_bar, quiet_tensorflow, show_result

EXAMPLES = """\b
Examples:
  kerasmem data convert x.npy y.npy -o train.h5
  kerasmem data convert digits.csv -o digits.h5 --columns y=label --columns 'x=*' --shuffle
  kerasmem data convert photos/ -o photos.h5 --image-size 224x224 --shuffle --split 0.8,0.1,0.1 --stratify y
  kerasmem data convert 'part-*.parquet' -o scans.h5 --split train=0.9,dev=0.1 --group patient --compression zstd
  kerasmem data convert cells.h5ad -o cells.h5 --columns x=X --columns y=obs/kind/codes

\b
A run that was killed goes on where it was when the same command is given again.
Formats other than .npy, .npz and HDF5 need: pip install 'kerasmem[convert]'"""


@click.command("convert", cls=GuardedCommand, seconds=None, epilog=EXAMPLES)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@all_of(*WRITING)
@click.option("--split", metavar="SHARES", help="0.8,0.2 or 0.8,0.1,0.1 or train=0.9,dev=0.1; drawn at random.")
@choice_option(
    "--split-as", ["files", "groups"], "A file for each part (out-train.h5), or groups of one file (train/x)."
)
@click.option("--stratify", metavar="COLUMN", help="Every part gets its share of each class in COLUMN.")
@click.option("--group", metavar="COLUMN", help="Rows with the same value in COLUMN stay in one part.")
@click.option("--keep-float64", is_flag=True, help="Write float64 as it is, not as float32.")
@click.option("--narrow-integers", is_flag=True, help="Write whole numbers in as few bytes as their values allow.")
@click.option("--image-size", metavar="WxH", help="Resize images; without it all have to have one size.")
@choice_option("--color", ["rgb", "rgba", "gray"], "Of images.")
@click.option("--accept-mislabelled", is_flag=True, help="Accept images of another format than their names say.")
@click.option("--follow-links", is_flag=True, help="Follow links in folders of images.")
@click.option("--no-header", is_flag=True, help="The first row of CSV is data.")
@click.option("--delimiter", metavar="CHARACTER", help="Between the values of CSV [default: comma; tab in .tsv].")
@repeatable_option("--text", metavar="COLUMN", help="A column of CSV that is text, also where it looks like numbers.")
def command(sources: tuple[str, ...], columns: tuple[str, ...], no_header: bool, as_json: bool, **options: Any) -> None:
    """Write SRC as HDF5 that H5ChunkSequence streams, in bounded memory, whatever its size.

    SRC: .npy (NAME=PATH names it), .npz, .csv, .tsv, .parquet, .tfrecord, HDF5, or a folder that holds a folder of
    images for each class. Sources with the same columns are read one after another, those with none in common side by
    side.
    float64 becomes float32; a value that would become infinite is an error.
    """
    from kerasmem.rendering.data_tables import conversion_table

    wanted = read_columns(columns)
    with quiet_tensorflow(), progress_bar() as progress:
        from kerasmem.datatools.converting.conversion import convert_data

        done = convert_data(sources, columns=wanted, header=not no_header, progress=progress, **options)
    show_result(done, as_json, conversion_table)
