"""Output of the command line: results, progress, and suppression of TensorFlow's log."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, ProgressColumn

QUIET = "kerasmem.quiet"  # key in the context of a command: hide progress and warnings
_LOOK: dict[str, Any] = {"emoji": False, "markup": False, "highlight": False}


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def show_result(result: Any, as_json: bool, view: Callable[[Any, int | None], RenderableType]) -> None:
    """Print a result as a JSON object or as text.

    Args:
        result: a result with `to_dict`.
        as_json: whether to print JSON.
        view: function of `kerasmem.rendering` that returns the text for a terminal's width, or for a pipe (None).
    """
    if as_json:
        show_json(result.to_dict())
    else:
        show_text(lambda terminal: view(result, terminal))


def show_text(view: Callable[[int | None], RenderableType]) -> None:
    """Print the text of a function for the terminal's width, or for a pipe (None)."""
    if is_terminal():
        from kerasmem.rendering.formatting import terminal_console

        screen = terminal_console()
        screen.print(view(screen.width))
        return
    from kerasmem.rendering.formatting import plain_text

    click.echo(plain_text(view(None)), nl=False)


def show_json(data: Mapping[str, Any]) -> None:
    """Print a JSON object."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


@contextlib.contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """Hide TensorFlow's log, and hide the GPUs from TensorFlow.

    TensorFlow's libraries write to file descriptor 2 even before logging can be configured. Their output is shown only
    if the context ends with an unexpected error. Output of Python code, such as a factory, goes to standard error, so
    that standard output has only the result.
    """
    from kerasmem.errors import KerasmemError
    from kerasmem.processes.children import off_the_cards

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as lines, os.fdopen(os.dup(terminal), "w", errors="backslashreplace") as screen:
        os.dup2(lines.fileno(), 2)
        try:
            with off_the_cards(), contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
                yield
        except BaseException as error:
            if not isinstance(error, (KerasmemError, KeyboardInterrupt)):
                lines.seek(0)
                screen.write(lines.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show a task and its time on standard error, if it is a terminal.

    Use it inside `quiet_tensorflow`, which redirects `sys.stderr` to the terminal.

    Args:
        text: description of the task, which may be a file name.

    Yields:
        A function that changes the description.
    """
    if not _is_watched():
        yield lambda _: None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    from kerasmem.units import printable

    with _progress(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()) as progress:
        task = progress.add_task(printable(text, 60), total=None)
        yield lambda text: progress.update(task, description=printable(text, 60))


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a function that shows progress, or None if standard error is not a terminal."""
    if not _is_watched():
        yield None
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from kerasmem.units import printable

    description = TextColumn("{task.description}", markup=False)
    with _progress(description, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=None)

        def update(text: str, done: int, total: int) -> None:
            progress.update(task, description=printable(text, 60), completed=done, total=total or None)

        yield update


def is_quiet() -> bool:
    """Return whether the current command hides progress and warnings."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def _is_watched() -> bool:
    """Return whether to show progress on standard error."""
    return sys.stderr.isatty() and not is_quiet()


def _progress(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(file=sys.stderr, **_LOOK), transient=True)
