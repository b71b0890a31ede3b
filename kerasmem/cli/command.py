"""Base classes of commands: help in panels, examples at its end, and work in a child process with limits."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kerasmem.checks import nearest
from kerasmem.cli.options import FIRST, make_option, option
from kerasmem.cli.terminal import QUIET
from kerasmem.errors import KerasmemError
from kerasmem.files import package_data

# group → its commands in the order of help, each with its line there
COMMANDS_OF: dict[str, dict[str, str]] = package_data(__package__, "commands")
_LAST = ("Output", "Limits", "Help")  # panels at the end of help
_EXAMPLES = "Examples:\n"
_INPUTS = ("file", "files", "models", "model", "a", "sources", "factory")  # parameters that name a command's input


@dataclass
class Invocation:
    """State of one call of the command line.

    Attributes:
        is_program: whether this process runs nothing else; False if `main` was called from Python.
        debug: whether `--debug` was given, before or after the command.
    """

    is_program: bool
    debug: bool = False


def debug_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--debug` to a command."""
    return option("--debug", is_eager=True, expose_value=False, callback=_set_debug)(function)


class Command(click.Command):
    """A command with `--quiet`, `--debug`, and help in panels."""

    def __init__(self, *names: Any, **options: Any) -> None:
        super().__init__(*names, **_with_examples(options))
        self.params.append(make_option("--quiet", is_eager=True, expose_value=False, callback=_be_quiet))
        debug_option(self)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a panel for each subject."""
        _write_options(self, ctx, formatter)


class GuardedCommand(Command):
    """A command that reads files of unknown origin in a child process with limits of time and memory.

    Adds `--time-limit` and `--memory-limit`.

    Args:
        *names: as for `click.Command`.
        seconds: default of `--time-limit`; None for no limit.
        parted: tells from the parameters whether the command starts processes itself and holds each of them to the
            limits. They are then its parameter `limits`, which is None otherwise.
        **options: as for `click.Command`.
    """

    def __init__(
        self,
        *names: Any,
        seconds: float | None = 1800,
        parted: Callable[[Mapping[str, Any]], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*names, **options)
        self._parted = parted
        self.params += [make_option("--time-limit", default=seconds), make_option("--memory-limit")]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, in a child if this is a program of its own."""
        from kerasmem.processes.children import ChildFailure, Limits, continue_in_child

        seconds, size = ctx.params.pop("time_limit"), ctx.params.pop("memory_limit")
        limits = Limits(seconds, _memory(size))
        if self._parted is not None:
            is_parted = self._parted(ctx.params)
            ctx.params["limits"] = limits if is_parted else None
            if is_parted:
                return super().invoke(ctx)
        # `main` called from Python stays in its process, which may have loaded TensorFlow and have threads.
        state = ctx.find_object(Invocation)
        is_alone = state is not None and state.is_program and threading.active_count() == 1
        if not is_alone or not hasattr(os, "fork"):
            return super().invoke(ctx)
        try:
            code = continue_in_child(limits)
        except KeyboardInterrupt:
            _show_cursor()
            raise
        except ChildFailure as failure:
            _show_cursor()
            option = "--time-limit" if failure.timed_out else "--memory-limit"
            fix = f", and {option} allows one that you trust more" if failure.signal is None else ""
            told = f"while reading {_input(ctx.params)}: {failure.reason}"
            raise KerasmemError(f"{told}; a damaged or hostile file can do that{fix}") from None
        if code is not None:
            return code
        try:
            return super().invoke(ctx)
        finally:
            gc.freeze()  # this process ends, and would first look for circles in all that TensorFlow holds


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is used, so that help stays instant.

    Args:
        lines: command → its line in the help of the group, in that order.
        modules: command → its module under kerasmem.cli. Defaults to NAME_command. The function is NAME_command.
        **options: as for `click.Group`.
    """

    def __init__(self, *, lines: Mapping[str, str], modules: Mapping[str, str], **options: Any) -> None:
        super().__init__(**_with_examples(options))
        self._lines, self._modules = lines, modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of help."""
        return list(self._lines)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._lines:
            return None
        function = f"{cmd_name.replace('-', '_')}_command"
        module = importlib.import_module(f"kerasmem.cli.{self._modules.get(cmd_name, function)}")
        command: click.Command = getattr(module, function)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing any, and the options."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._lines.items()))
        _write_options(self, ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command named, or fail with the names there are."""
        if args and args[0] not in self._lines and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(self._lines)}{nearest(args[0], self._lines)}")
        return super().resolve_command(ctx, args)


def _with_examples(options: dict[str, Any]) -> dict[str, Any]:
    """Move the examples of a docstring to the end of help, laid out as they are."""
    text, begin, examples = inspect.cleandoc(options.get("help") or "").partition(_EXAMPLES)
    shown = f"\b\n{begin}{examples}".replace("\n\n", "\n\n\b\n") if begin else None
    return {**options, "help": text, "epilog": shown}


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    panels: dict[str, list[tuple[str, str]]] = {FIRST: []}
    for each in command.get_params(ctx):
        if isinstance(each, click.Option) and (record := each.get_help_record(ctx)):
            panels.setdefault(getattr(each, "panel", "Help"), []).append(record)
    for title in _LAST:
        panels[title] = panels.pop(title, [])
    for title, records in panels.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    state = ctx.find_object(Invocation)
    if value and state is not None:
        state.debug = True


def _be_quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value


def _input(parameters: Mapping[str, Any]) -> str:
    """Return the first thing that a command reads."""
    named = next((parameters[name] for name in _INPUTS if parameters.get(name)), "")
    return str(named if isinstance(named, str) else named[0])


def _show_cursor() -> None:
    """Show the cursor again that a child's spinner has hidden."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K\x1b[?25h", nl=False, err=True)


def _memory(size: str | None) -> int:
    from kerasmem.devices.host import default_memory_limit
    from kerasmem.units import parse_size

    return default_memory_limit() if size is None else parse_size(size, field="--memory-limit")
