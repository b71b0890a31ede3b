"""`kerasmem data bench`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import FILE, all_of, json_option
from kerasmem.cli.terminal import progress_bar, quiet_tensorflow, show_result

EXAMPLES = """\b
Examples:
  kerasmem data bench train.h5
  kerasmem data bench train.h5 --x images --y labels --batch-size 256 --sample 2GiB
  kerasmem data bench train.h5 --json"""


@click.command("bench", cls=GuardedCommand, seconds=None, epilog=EXAMPLES)
@all_of(
    *FILE,
    click.option("--sample", default="256MiB", show_default=True, metavar="SIZE", help="How much of FILE to look at."),
    click.option("--memory-budget", metavar="SIZE", help="As for H5ChunkSequence."),
    json_option,
)
def command(file: str, memory_budget: str | None, as_json: bool, **options: Any) -> None:
    """Time what H5ChunkSequence delivers from FILE on this machine, and say which step limits it.

    The system is asked to forget the file before it is read from the disk; nothing else is changed.
    """
    from kerasmem.rendering.data_tables import bench_table

    settings: dict[str, Any] = {} if memory_budget is None else {"memory_budget": memory_budget}
    with quiet_tensorflow(), progress_bar() as progress:
        from kerasmem.datatools.inspecting.benching import bench_data

        found = bench_data(file, progress=progress, **options, **settings)
    show_result(found, as_json, bench_table)
