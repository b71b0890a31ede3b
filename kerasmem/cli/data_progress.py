"""How far long work is, on standard error where that is a terminal and nowhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def showing() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield what long work tells how far it is; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from kerasmem.rendering.escape import printable

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    screen = Console(file=sys.stderr, emoji=False, markup=False, highlight=False)
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=printable(what, 60), completed=done, total=total or None)

        yield tell
