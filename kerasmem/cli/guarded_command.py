"""Commands that read files of unknown origin: their work is done in a child process with limits of time and memory."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import click

from kerasmem.cli.command import Command
from kerasmem.cli.vocabulary import make_option
from kerasmem.errors import KerasmemError


class GuardedCommand(Command):
    """A command whose child process does the work and may be ended; adds `--time-limit` and `--memory-limit`.

    Args:
        *names: as for `click.Command`.
        seconds: that it may take where nothing else is asked for; None for no limit.
        parted: says by its parameters whether the command starts processes itself, and holds each of them to the
            limits; they are then its parameter `limits`, which is None otherwise.
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
        """Run the command, in a child where this is a program of its own."""
        from kerasmem.processes.children import Limits
        from kerasmem.processes.guarding import GuardedFailure, go_on_in_child

        seconds, size = ctx.params.pop("time_limit"), ctx.params.pop("memory_limit")
        limits = Limits(seconds, _memory(size))
        if self._parted is not None:
            is_parted = self._parted(ctx.params)
            ctx.params["limits"] = limits if is_parted else None
            if is_parted:
                return super().invoke(ctx)
        # `main` called from Python stays in its process, which may have loaded TensorFlow and have threads.
        if not ctx.find_root().obj or threading.active_count() > 1 or not hasattr(os, "fork"):
            return super().invoke(ctx)
        file = _input(ctx.params)
        try:
            code = go_on_in_child(f"reading {file}", limits)
        except KeyboardInterrupt:
            _show_cursor()
            raise
        except GuardedFailure as failure:
            _show_cursor()
            named = file in failure.stage
            said = str(failure) if named else f"while {failure.stage} of {file}: {failure.reason}"
            way_out = "--time-limit" if failure.timed_out else "--memory-limit"
            raise KerasmemError(
                f"{said}; a damaged or hostile file can do that"
                + ("" if failure.crashed else f", and {way_out} allows one that you trust more")
            ) from None
        if code is not None:
            return code
        try:
            return super().invoke(ctx)
        finally:
            gc.freeze()  # this process ends, and would first look for circles in all that TensorFlow holds


def _input(options: Mapping[str, Any]) -> str:
    """Return what a command reads first, by whatever name it takes it."""
    named = next(
        (
            options[name]
            for name in ("file", "files", "models", "model", "a", "sources", "factory")
            if options.get(name)
        ),
        "",
    )
    return str(named if isinstance(named, str) else named[0])


def _show_cursor() -> None:
    """Leave a terminal as it was: a child that was ended may have hidden the cursor for its spinner."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K\x1b[?25h", nl=False, err=True)


def _memory(size: str | None) -> int:
    from kerasmem.devices.limits import default_memory_limit
    from kerasmem.units import parse_size

    return default_memory_limit() if size is None else parse_size(size, field="--memory-limit")
