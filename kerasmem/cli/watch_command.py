"""`kerasmem watch`."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kerasmem.cli.command import Command
from kerasmem.cli.terminal import console, is_terminal, show_result
from kerasmem.cli.vocabulary import all_of
from kerasmem.errors import UsageError

if TYPE_CHECKING:
    from kerasmem.monitoring.snapshot import Snapshot

_MINUTES = 3  # of the course that is shown


@click.command("watch", cls=Command)
@click.argument("pid", required=False, type=click.IntRange(min=1))
@all_of("--log", "--interval", "--once", "--json")
def command(pid: int | None, log: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Watch cards, host, a process (or all that train) and how far its training has come, until Ctrl-C.

    With --json, each look is a line; with --once there is one object.

    Examples:
      kerasmem watch
      kerasmem watch 4711 --log run.jsonl
      kerasmem watch --once --json
    """
    from kerasmem.monitoring.snapshot import read_snapshot

    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval: {interval!r} is no number of seconds from 0.1 to 3600")
    if not (once or as_json or is_terminal()):
        raise UsageError("watch: standard output is no terminal; pass --once, or --json for a line for each look")

    def look() -> Snapshot:
        return read_snapshot(pid, log)

    if once:
        from kerasmem.rendering.watch_view import watch_view

        show_result(look(), as_json, watch_view)
        return
    try:
        if as_json:
            _repeat(look, interval, lambda snapshot: click.echo(json.dumps(snapshot.to_dict(), allow_nan=False)))
        else:
            _show(look, interval)
    except KeyboardInterrupt:  # how watching ends
        pass


def _show(look: Callable[[], Snapshot], interval: float) -> None:
    from rich.live import Live

    from kerasmem.rendering.watch_view import watch_view

    history: dict[str, deque[int]] = {}
    length = max(2, math.ceil(_MINUTES * 60 / interval))
    screen = console()
    with Live(console=screen, auto_refresh=False, screen=False) as live:

        def show(snapshot: Snapshot) -> None:
            for name, size in snapshot.sizes().items():
                history.setdefault(name, deque(maxlen=length)).append(size)
            width = min(60, max(8, screen.width - 60))
            courses = {name: list(values) for name, values in history.items()}
            live.update(watch_view(snapshot, screen.width, history=courses, width=width), refresh=True)

        _repeat(look, interval, show)


def _repeat(look: Callable[[], Snapshot], interval: float, show: Callable[[Snapshot], None]) -> None:
    """Look and show until the process that is watched has ended, which the first look takes for wrong usage."""
    show(look())
    while True:
        time.sleep(interval)
        try:
            snapshot = look()
        except UsageError as error:
            click.echo(str(error).replace("; name one that `ps` lists", " any more"), err=True)
            return
        show(snapshot)
