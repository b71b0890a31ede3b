"""What all commands have in common: `--quiet`, and help whose options stand in panels."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from kerasmem.cli.vocabulary import FIRST, QUIET, make_option

_LAST = ("Output", "Limits", "Help")  # panels; the others stand before them, as they come


class Command(click.Command):
    """A command with `--quiet`, whose help lists options in panels."""

    def __init__(self, *names: Any, **options: Any) -> None:
        super().__init__(*names, **options)
        self.params.append(make_option("--quiet", is_eager=True, expose_value=False, callback=_be_quiet))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a panel for each subject."""
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a command's options, a panel for each subject."""
    panels: dict[str, list[tuple[str, str]]] = {FIRST: []}
    for each in command.get_params(ctx):
        if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
            panels.setdefault(getattr(each, "panel", "Help"), []).append(record)
    for title in _LAST:
        panels[title] = panels.pop(title, [])
    for title, records in panels.items():
        write_panel(formatter, title, records)


def write_panel(formatter: click.HelpFormatter, title: str, records: list[tuple[str, str]]) -> None:
    """Write a list, if it is not empty, under its heading; in a frame on a terminal."""
    if not records:
        return
    if not sys.stdout.isatty():
        with formatter.section(title):
            formatter.write_dl(records)
        return
    plain = "NO_COLOR" in os.environ

    def styled(text: str, **look: Any) -> str:
        return text if plain else click.style(text, **look)

    inside = click.HelpFormatter(width=formatter.width - 4)
    inside.write_dl([(styled(names, fg="cyan"), text) for names, text in records])
    room = formatter.width - 2
    formatter.write("" if formatter.getvalue().endswith("╯\n") else "\n")
    formatter.write(f"╭─ {styled(title, bold=True)} {'─' * (room - len(title) - 3)}╮\n")
    for line in inside.getvalue().rstrip("\n").split("\n"):
        formatter.write(f"│ {line}{' ' * (room - 2 - len(click.unstyle(line)))} │\n")
    formatter.write(f"╰{'─' * room}╯\n")


def _be_quiet(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value
