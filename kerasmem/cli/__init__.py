"""The command line. Commands are loaded when they run, and errors become messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import click

import kerasmem
from kerasmem.cli.command import COMMANDS_OF, Invocation, LazyGroup, debug_option
from kerasmem.errors import KerasmemError

COMMANDS = COMMANDS_OF["kerasmem"]
_SHARED_MODULES = {
    "max-batch": "search_commands", "cards": "search_commands",
    "measure": "step_commands", "profile": "step_commands",
    "devices": "machine_commands", "doctor": "machine_commands",
}  # fmt: skip


@click.group(
    cls=LazyGroup,
    lines=COMMANDS,
    modules=_SHARED_MODULES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(kerasmem.__version__, prog_name="kerasmem")
@debug_option
def cli() -> None:
    """Estimate, measure and reduce the memory of training Keras/TensorFlow models.

    Examples:
      kerasmem estimate model.h5 --batch-size 64 --device t4
      kerasmem max-batch keras.applications:ResNet50 --device 16GB
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line, print errors, and exit.

    Exit codes: 0 done (and fits) · 1 kerasmem or the model failed · 2 wrong usage or unreadable input ·
    3 does not fit · 4 too close to call · 130 interrupted.
    """
    state = Invocation(is_program=args is None)
    try:
        code = cli.main(args, prog_name="kerasmem", standalone_mode=False, obj=state) or 0
        sys.stdout.flush()  # reports a full disk
        sys.exit(code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # 128 + SIGPIPE
    except Exception as error:
        if state.debug:
            traceback.print_exc()
        else:
            _print_error(_message(error))
        sys.exit(getattr(error, "exit_code", 1))


def _message(error: Exception) -> str:
    if isinstance(error, KerasmemError):
        return str(error)
    if isinstance(error, MemoryError):
        return "this machine ran out of memory; nothing was written"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
        return f"the output cannot be written: {error.strerror}"
    return (
        f"unexpected {type(error).__name__}: {error}\n"
        "This is a defect in kerasmem; run the command with --debug for the traceback."
    )


def _print_error(message: str) -> None:
    from kerasmem.units import printable

    for number, line in enumerate(message.splitlines() or [""]):
        click.echo(("Error: " if number == 0 else "       ") + printable(line), err=True)
