"""The command line: one file a command, loaded when it is run; errors become messages and exit codes here."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import click

import kerasmem
from kerasmem.cli.lazy_group import LazyGroup
from kerasmem.errors import KerasmemError

# command -> (module under kerasmem.cli, the line that `kerasmem --help` shows)
COMMANDS = {
    "estimate": ("estimate_command", "How much memory training a model will need, before it runs."),
    "max-batch": ("max_batch_command", "The largest batch, layer or depth that fits a device."),
    "cards": ("cards_command", "Which cards of the catalogue are enough."),
    "compare": ("compare_command", "What differs in memory between two models; a limit for CI."),
    "measure": ("measure_command", "How much memory some real training steps take."),
    "profile": ("profile_command", "What is in memory at the peak of a real step, layer by layer."),
    "advise": ("advise_command", "What to do so that training fits a device, each remedy estimated."),
    "run": ("run_command", "Run a training script, and go on where it runs out of memory."),
    "explain": ("explain_command", "What ran out of memory in a log, why, and what to do."),
    "watch": ("watch_command", "Cards, processes and running training, live."),
    "doctor": ("doctor_command", "Does TensorFlow see the GPU, and if not, why."),
    "data": ("data_command", "Data files: look into, convert, repack, statistics, speed."),
    "report": ("report_command", "Runs, estimates and profiles as a page, a picture, a table or data."),
    "devices": ("devices_command", "The catalogue of cards, and what is in this machine."),
    "completion": ("completion_command", "Completion of commands and options for your shell."),
}


EXAMPLES = """\b
Examples:
  kerasmem estimate model.h5 --batch-size 64 --device t4
  kerasmem max-batch keras.applications:ResNet50 --device 16GB"""


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog=EXAMPLES,
)
@click.version_option(kerasmem.__version__, prog_name="kerasmem")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def cli(debug: bool) -> None:
    """Memory answers for people who train Keras/TensorFlow models."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code; the only place where errors are caught.

    Exit codes: 0 done (and fits) · 1 kerasmem or the model failed · 2 wrong usage or unreadable input ·
    3 does not fit · 4 too close to call · 130 interrupted.
    """
    arguments = sys.argv[1:] if args is None else args
    debug = "--debug" in arguments  # before or after the command
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = cli.main(arguments, prog_name="kerasmem", standalone_mode=False, obj=args is None) or 0
        sys.stdout.flush()  # a full disk is met here, not at the interpreter's end
        sys.exit(code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a program that SIGPIPE ends
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            _complain(_message(error))
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
        "This is a defect in kerasmem; run again with --debug for the traceback."
    )


def _complain(message: str) -> None:
    from kerasmem.rendering.escape import printable

    for number, line in enumerate(message.splitlines() or [""]):
        click.echo(("Error: " if number == 0 else "       ") + printable(line), err=True)
