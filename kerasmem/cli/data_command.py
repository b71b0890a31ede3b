"""`kerasmem data`: the commands that look at data files and write them."""

from __future__ import annotations

import click

from kerasmem.cli.lazy_group import LazyGroup

# command -> (module under kerasmem.cli, the line that `kerasmem data --help` shows)
COMMANDS = {
    "inspect": ("data_inspect_command", "What is in an HDF5 file, and how well it streams."),
    "convert": ("data_convert_command", "Arrays, tables, images, records or HDF5 as HDF5 that streams well."),
    "repack": ("data_repack_command", "An HDF5 file in other chunks, compression or order."),
    "stats": ("data_stats_command", "Mean, variance, range and class weights, in one pass."),
    "bench": ("data_bench_command", "What a file can deliver here, and what limits it."),
}


@click.group("data", cls=LazyGroup, modules=COMMANDS, epilog="Example: kerasmem data inspect train.h5")
def command() -> None:
    """Data files: look into them, convert them, find their statistics and their speed."""
