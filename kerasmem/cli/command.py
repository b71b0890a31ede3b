"""What all commands have in common: options with a place in the help and former names, and `--quiet`."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_QUIET = "kerasmem.quiet"
_FIRST, _LAST = "Options", ("Output", "Limits", "Help")  # panels; the others stand between, as they come
_UNSAID = ("x>=0", "x>=1", "x>0")  # ranges that go without saying


class Option(click.Option):
    """An option.

    Args:
        *names: as for `click.Option`.
        panel: the heading under which help lists it.
        former: a name that goes on working, with a warning: "--every", or "--xla/--no-xla".
        **options: as for `click.Option`.
    """

    def __init__(self, *names: Any, panel: str = _FIRST, former: str = "", **options: Any) -> None:
        super().__init__(*names, **options)
        self.panel = panel
        self._former: Option | None = None
        if former:
            on, _, off = former.partition("/")
            self._former = copy.copy(self)
            self._former.name = f"{self.name}, formerly"
            self._former.opts, self._former.secondary_opts = [on], [off] if off else []

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return what help adds in brackets: a default in plain words, and no range that goes without saying."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        if extra.get("range") in _UNSAID:
            del extra["range"]
        return extra

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser know the former name too."""
        super().add_to_parser(parser, ctx)
        if self._former is not None:
            self._former.add_to_parser(parser, ctx)

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> Any:
        """Take the value that was given under the former name."""
        former = self._former
        if former is not None and former.name in opts:
            value = opts[former.name]
            opts = {str(self.name): value, **opts}
            if not (ctx.resilient_parsing or is_quiet(ctx)):
                old, new = (each.secondary_opts[0] if value is False else each.opts[-1] for each in (former, self))
                click.echo(f"Warning: {old} is called {new} now", err=True)
        return super().handle_parse_result(ctx, opts, args)


def option(*names: str, **options: Any) -> Decorator:
    """Return a decorator that adds an `Option`."""
    return click.option(*names, cls=Option, **options)


class Command(click.Command):
    """A command with `--quiet`, whose help lists options in panels."""

    def __init__(self, *names: Any, **options: Any) -> None:
        super().__init__(*names, **options)
        quiet = Option(
            ["-q", "--quiet"], panel="Output", is_flag=True, is_eager=True, expose_value=False, callback=_be_quiet,
            help="Show no progress and no warnings.",
        )  # fmt: skip
        self.params.append(quiet)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a panel for each subject."""
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a command's options, a panel for each subject."""
    panels: dict[str, list[tuple[str, str]]] = {_FIRST: []}
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


def is_quiet(ctx: click.Context | None = None) -> bool:
    """Return whether the command was asked to show neither progress nor warnings."""
    ctx = ctx or click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_QUIET))


def _be_quiet(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    ctx.meta[_QUIET] = value
