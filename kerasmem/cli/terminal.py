"""The process as the command line needs it: a quiet TensorFlow, a console that knows whether it is one."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from rich.console import Console


def console(width: int | None = None) -> Console:
    """Return a console on standard output that takes no text for markup."""
    return Console(width=width, emoji=False, markup=False, highlight=False)


def is_terminal() -> bool:
    """Return whether a person is looking at standard output."""
    return sys.stdout.isatty()


@contextlib.contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """Keep TensorFlow's start-up lines off the terminal, and its hands off the cards.

    An estimate needs no GPU, and a job may be running on the one that is there. TensorFlow's libraries write to
    file descriptor 2 before they can be told not to; what they write while the context lasts is shown only if it
    ends in an error that kerasmem does not know. What Python code prints (a factory, say) goes to standard error,
    so that standard output holds the result alone.
    """
    from kerasmem.errors import KerasmemError

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as lines, os.fdopen(os.dup(kept), "w", errors="backslashreplace") as screen:
        os.dup2(lines.fileno(), 2)
        try:
            with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
                yield
        except BaseException as error:
            if not isinstance(error, (KerasmemError, KeyboardInterrupt)):
                lines.seek(0)
                screen.write(lines.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def working(text: str, method: str) -> Iterator[None]:
    """Show on standard error, where that is a terminal, that something goes on and for how long.

    Use it inside `quiet_tensorflow`, which keeps a way to the terminal in `sys.stderr`.

    Args:
        text: what goes on; it may come from a file name.
        method: of the estimate; the formula is instant and shows nothing.
    """
    if method == "formula" or not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from kerasmem.rendering.escape import printable

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    screen = Console(file=sys.stderr, emoji=False, markup=False, highlight=False)
    with Progress(*columns, console=screen, transient=True) as progress:
        progress.add_task(printable(text, 60), total=None)
        yield
