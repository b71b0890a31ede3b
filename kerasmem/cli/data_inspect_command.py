"""`kerasmem data inspect`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import FILE, all_of, allow_external_option, json_option
from kerasmem.cli.terminal import progress_bar, show_result

EXAMPLES = """\b
Examples:
  kerasmem data inspect train.h5
  kerasmem data inspect cells.h5ad --x X --y obs/kind/codes --batch-size 256
  kerasmem data inspect train.h5 --nan --verify --json"""


@click.command("inspect", cls=GuardedCommand, epilog=EXAMPLES)
@all_of(
    *FILE,
    click.option("--nan", is_flag=True, help="Count NaN and infinity; reads all floating-point datasets."),
    click.option(
        "--verify", is_flag=True, help="Compare the checksums that `kerasmem data convert` stored; reads all data."
    ),
    allow_external_option,
    json_option,
)
def command(file: str, as_json: bool, **options: Any) -> int:
    """Say what is in an HDF5 FILE, what it comes to in memory, and how well H5ChunkSequence streams it.

    Knows what AnnData, MATLAB 7.3, pandas, PyTables and netCDF-4 leave in a file. The exit code is 1 where --verify
    finds data that is no longer what was written.
    """
    from kerasmem.datatools.inspecting.inspection import inspect_data
    from kerasmem.rendering.data_tables import inspection_table

    with progress_bar() as progress:
        found = inspect_data(file, progress=progress, **options)
    show_result(found, as_json, inspection_table)
    return int(any(dataset.checksum == "wrong" for dataset in found.datasets))
