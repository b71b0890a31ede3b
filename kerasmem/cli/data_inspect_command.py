"""`kerasmem data inspect`."""

from __future__ import annotations

import click

EXAMPLES = """\b
Examples:
  kerasmem data inspect train.h5
  kerasmem data inspect cells.h5ad --x X --y obs/kind/codes --batch-size 256
  kerasmem data inspect train.h5 --nan --verify --json"""


@click.command("inspect", epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@click.option("--x", metavar="NAME", help="The dataset of the features [default: what looks most like them].")
@click.option("--y", metavar="NAME", help="That of the targets [default: the same].")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Rows a batch.")
@click.option("--nan", is_flag=True, help="Count NaN and infinity; reads all floating-point datasets.")
@click.option(
    "--verify", is_flag=True, help="Compare the checksums that `kerasmem data convert` stored; reads all data."
)
@click.option("--allow-external", is_flag=True, help="Read other files that FILE names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    file: str,
    x: str | None,
    y: str | None,
    batch_size: int,
    nan: bool,
    verify: bool,
    allow_external: bool,
    as_json: bool,
) -> int:
    """Say what is in an HDF5 FILE, what it comes to in memory, and how well H5ChunkSequence streams it.

    Knows what AnnData, MATLAB 7.3, pandas, PyTables and netCDF-4 leave in a file. The exit code is 1 where --verify
    finds data that is no longer what was written.
    """
    from kerasmem.cli.data_progress import showing
    from kerasmem.datatools.inspecting.inspection import inspect_data

    with showing() as tell:
        found = inspect_data(
            file, x=x, y=y, batch_size=batch_size, nan=nan, verify=verify, allow_external=allow_external, progress=tell
        )
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(found.to_dict()))
    else:
        from kerasmem.cli.terminal import console, is_terminal
        from kerasmem.rendering.data_inspection_table import inspection_table

        screen = console() if is_terminal() else console(width=400)
        screen.print(inspection_table(found, rich_look=is_terminal()))
    return int(any(dataset.checksum == "wrong" for dataset in found.datasets))
