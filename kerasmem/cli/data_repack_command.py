"""`kerasmem data repack`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.data_options import read_columns, write_options

EXAMPLES = """\b
Examples:
  kerasmem data repack slow.h5 -o fast.h5
  kerasmem data repack sorted.h5 -o mixed.h5 --shuffle
  kerasmem data repack large.h5 -o small.h5 --compression zstd:9 --verify"""


@click.command("repack", epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@write_options
@click.option("--float32", is_flag=True, help="Write float64 as float32.")
def command(file: str, columns: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write an HDF5 FILE anew: whole rows, chunks of about 1 MiB, other compression, another order.

    Says how an epoch reads the file before and after. A run that was killed goes on when the same command
    is given again.
    """
    from kerasmem.cli.data_progress import showing
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.datatools.converting.repacking import repack_data

    with showing() as tell:
        done = repack_data(file, columns=read_columns(columns), progress=tell, **options)
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(done.to_dict()))
        return
    from kerasmem.rendering.data_conversion_table import repacking_table

    screen = console() if is_terminal() else console(width=400)
    screen.print(repacking_table(done, rich_look=is_terminal()))
