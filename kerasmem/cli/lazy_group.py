"""A group of commands, each imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from kerasmem.checks import nearest
from kerasmem.cli.command import write_options, write_panel


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, so that help stays instant.

    Args:
        modules: command → (module under kerasmem.cli, the line that the group's help shows), in the order of that;
            a module stands for the `command` in it, "module:name" for another.
        **options: as for `click.Group`.
    """

    def __init__(self, *, modules: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a user meets them."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in self._modules:
            return None
        module, _, name = self._modules[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"kerasmem.cli.{module}"), name or "command")
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing any, and the options."""
        write_panel(formatter, "Commands", [(name, line) for name, (_, line) in self._modules.items()])
        write_options(self, ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with what was typed, without importing any."""
        lines = {name: line for name, (_, line) in self._modules.items() if name.startswith(incomplete)}
        found = [CompletionItem(name, help=line) for name, line in lines.items()]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named, or fail with the names there are."""
        if args and args[0] not in self._modules and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(self._modules)}{nearest(args[0], self._modules)}")
        return super().resolve_command(ctx, args)
