"""`kerasmem data repack`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import WRITING, all_of, read_columns
from kerasmem.cli.terminal import progress_bar, show_result

EXAMPLES = """\b
Examples:
  kerasmem data repack slow.h5 -o fast.h5
  kerasmem data repack sorted.h5 -o mixed.h5 --shuffle
  kerasmem data repack large.h5 -o small.h5 --compression zstd:9 --verify"""


@click.command("repack", cls=GuardedCommand, seconds=None, epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@all_of(*WRITING)
@click.option("--float32", is_flag=True, help="Write float64 as float32.")
def command(file: str, columns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Rewrite an HDF5 FILE: whole rows, chunks of about 1 MiB, other compression, another order.

    Says how an epoch reads the file before and after. A run that was killed goes on when the same command
    is given again.
    """
    from kerasmem.datatools.converting.repacking import repack_data
    from kerasmem.rendering.data_tables import repacking_table

    with progress_bar() as progress:
        done = repack_data(file, columns=read_columns(columns), progress=progress, **options)
    show_result(done, as_json, repacking_table)
