"""Base classes of commands: help in panels with examples, and work in a subprocess with limits."""

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

# group → commands in the order of help → line in help
COMMANDS_OF: dict[str, dict[str, str]] = package_data(__package__, "commands")
_LAST = ("Output", "Limits", "Help")  # the last panels of help
_EXAMPLES = "Examples:\n"
_INPUTS = ("file", "files", "models", "model", "a", "sources", "factory")  # parameters with the input of a command


@dataclass
class Invocation:
    """State of one call of the command line.

    Attributes:
        is_program: whether this process runs only the command line; False if Python code called `main`.
        debug: whether `--debug` is set, before or after the command.
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
    """A command that reads untrusted files in a subprocess with limits of time and memory.

    It has the options `--time-limit` and `--memory-limit`.

    Args:
        *names: arguments of `click.Command`.
        seconds: default of `--time-limit`, or None for no limit. Defaults to 1800.
        parted: function that returns from the parameters whether the command itself applies the limits to its
            subprocesses. Its parameter `limits` then has the limits; otherwise it is None.
        **options: keyword arguments of `click.Command`.
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
        """Run the command, in a subprocess if this process runs only the command line."""
        from kerasmem.processes.children import ChildFailure, Limits, continue_in_child

        seconds, size = ctx.params.pop("time_limit"), ctx.params.pop("memory_limit")
        limits = Limits(seconds, _memory(size))
        if self._parted is not None:
            is_parted = self._parted(ctx.params)
            ctx.params["limits"] = limits if is_parted else None
            if is_parted:
                return super().invoke(ctx)
        # A process that calls `main` from Python may have loaded TensorFlow or started threads, so it does not fork.
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
            fix = f"; if you trust the file, raise {option}" if failure.signal is None else ""
            reason = f"while reading {_input(ctx.params)}: {failure.reason}"
            raise KerasmemError(f"{reason}. A damaged or hostile file can be the cause{fix}") from None
        if code is not None:
            return code
        try:
            return super().invoke(ctx)
        finally:
            gc.freeze()  # skips a garbage collection of TensorFlow's objects when the process exits


class LazyGroup(click.Group):
    """A group that imports the module of a command when it is used, so that help is fast.

    Args:
        lines: command → line in the group's help, in this order.
        modules: command → module in kerasmem.cli. Defaults to NAME_command. The function is NAME_command.
        **options: keyword arguments of `click.Group`.
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
        """Write the commands, without importing them, and the options."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._lines.items()))
        _write_options(self, ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or fail with the names of all commands."""
        if args and args[0] not in self._lines and not args[0].startswith("-"):
            ctx.fail(
                f"the command must be one of {', '.join(self._lines)}; got {args[0]!r}{nearest(args[0], self._lines)}"
            )
        return super().resolve_command(ctx, args)


def _with_examples(options: dict[str, Any]) -> dict[str, Any]:
    """Move the examples of a docstring to the end of help, with their line breaks."""
    text, begin, examples = inspect.cleandoc(options.get("help") or "").partition(_EXAMPLES)
    epilog = f"\b\n{begin}{examples}".replace("\n\n", "\n\n\b\n") if begin else None
    return {**options, "help": text, "epilog": epilog}


def _write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    panels: dict[str, list[tuple[str, str]]] = {FIRST: []}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
            panels.setdefault(getattr(parameter, "panel", "Help"), []).append(record)
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
    """Return the first input of a command."""
    value = next((parameters[name] for name in _INPUTS if parameters.get(name)), "")
    return str(value if isinstance(value, str) else value[0])


def _show_cursor() -> None:
    """Show the cursor, which the spinner of a subprocess may have hidden."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K\x1b[?25h", nl=False, err=True)


def _memory(size: str | None) -> int:
    from kerasmem.devices.host import default_memory_limit
    from kerasmem.units import parse_size

    return default_memory_limit() if size is None else parse_size(size, field="--memory-limit")
