"""`kerasmem data`: the commands that look at data files and write them."""

from __future__ import annotations

import importlib

import click

# command -> (module under kerasmem.cli, the line that `kerasmem data --help` shows)
COMMANDS = {
    "inspect": ("data_inspect_command", "What is in an HDF5 file, and how well it streams."),
    "convert": ("data_convert_command", "Arrays, tables, images, records or HDF5 as HDF5 that streams well."),
    "repack": ("data_repack_command", "An HDF5 file in other chunks, compression or order."),
    "stats": ("data_stats_command", "Mean, variance, range and class weights, in one pass."),
    "bench": ("data_bench_command", "What a file can deliver here, and what limits it."),
}


class DataGroup(click.Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kerasmem.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named, or fail with the names there are."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group("data", cls=DataGroup, epilog="Example: kerasmem data inspect train.h5")
def command() -> None:
    """Data files: look into them, convert them, find their statistics and their speed."""
