"""What all commands and groups have in common: `--quiet`, and help with options in panels and examples at its end."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from kerasmem.checks import nearest
from kerasmem.cli.vocabulary import FIRST, QUIET, make_option
from kerasmem.files import package_data

# group → its commands, in the order in which a user meets them, each with the line that the group's help shows
COMMANDS_OF: dict[str, dict[str, str]] = package_data(__package__, "commands")
_LAST = ("Output", "Limits", "Help")  # panels; the others stand before them, as they come
_EXAMPLES = "Examples:\n"  # what stands in a docstring from here on is shown last, laid out as it is


class Command(click.Command):
    """A command with `--quiet`, whose help lists options in panels."""

    def __init__(self, *names: Any, **options: Any) -> None:
        super().__init__(*names, **_parted(options))
        self.params.append(make_option("--quiet", is_eager=True, expose_value=False, callback=_be_quiet))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a panel for each subject."""
        _write_options(self, ctx, formatter)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, so that help stays instant.

    Args:
        lines: command → the line that the group's help shows, in the order of that.
        module: under kerasmem.cli, with a function for each command; "" where each has a module of its own.
        **options: as for `click.Group`.
    """

    def __init__(self, *, lines: Mapping[str, str], module: str = "", **options: Any) -> None:
        super().__init__(**_parted(options))
        self._lines, self._module = lines, module

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a user meets them."""
        return list(self._lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in self._lines:
            return None
        module = self._module or f"{cmd_name.replace('-', '_')}_command"
        found = importlib.import_module(f"kerasmem.cli.{module}")
        command: click.Command = getattr(found, cmd_name if self._module else "command")
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing any, and the options."""
        _write_panel(formatter, "Commands", list(self._lines.items()))
        _write_options(self, ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with what was typed, without importing any."""
        found = [CompletionItem(name, help=line) for name, line in self._lines.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named, or fail with the names there are."""
        if args and args[0] not in self._lines and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(self._lines)}{nearest(args[0], self._lines)}")
        return super().resolve_command(ctx, args)


def _parted(options: dict[str, Any]) -> dict[str, Any]:
    """Return a command's options with the examples in its docstring where click shows them, laid out as they are."""
    text, begin, examples = inspect.cleandoc(options.get("help") or "").partition(_EXAMPLES)
    shown = f"\b\n{begin}{examples}".replace("\n\n", "\n\n\b\n") if begin else None
    return {**options, "help": text, "epilog": shown}


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a command's options, a panel for each subject."""
    panels: dict[str, list[tuple[str, str]]] = {FIRST: []}
    for each in command.get_params(ctx):
        if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
            panels.setdefault(getattr(each, "panel", "Help"), []).append(record)
    for title in _LAST:
        panels[title] = panels.pop(title, [])
    for title, records in panels.items():
        _write_panel(formatter, title, records)


def _write_panel(formatter: click.HelpFormatter, title: str, records: list[tuple[str, str]]) -> None:
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
