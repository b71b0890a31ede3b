"""`kerasmem data bench`."""

from __future__ import annotations

from typing import Any

import click

EXAMPLES = """\b
Examples:
  kerasmem data bench train.h5
  kerasmem data bench train.h5 --x images --y labels --batch-size 256 --sample 2GiB
  kerasmem data bench train.h5 --json"""


@click.command("bench", epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@click.option("--x", metavar="NAME", help="The dataset of the features [default: what looks most like them].")
@click.option("--y", metavar="NAME", help="That of the targets [default: the same].")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Rows a batch.")
@click.option("--sample", default="256MiB", show_default=True, metavar="SIZE", help="How much of FILE to look at.")
@click.option("--memory-budget", metavar="SIZE", help="As for H5ChunkSequence.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: str, memory_budget: str | None, as_json: bool, **options: Any) -> None:
    """Time what H5ChunkSequence delivers from FILE on this machine, and say which step limits it.

    The system is asked to forget the file before it is read from the disk; nothing else is changed.
    """
    from kerasmem.cli.data_progress import showing
    from kerasmem.cli.terminal import console, is_terminal, quiet_tensorflow

    settings: dict[str, Any] = {} if memory_budget is None else {"memory_budget": memory_budget}
    with quiet_tensorflow(), showing() as tell:
        from kerasmem.datatools.inspecting.benching import bench_data

        found = bench_data(file, progress=tell, **options, **settings)
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(found.to_dict()))
        return
    from kerasmem.rendering.data_bench_table import bench_table

    screen = console() if is_terminal() else console(width=400)
    screen.print(bench_table(found, rich_look=is_terminal()))
