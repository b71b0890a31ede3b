"""`kerasmem explain`."""

from __future__ import annotations

import sys

import click

from kerasmem.cli.command import Command
from kerasmem.cli.options import option
from kerasmem.cli.terminal import show_result


@click.command("explain", cls=Command)
@click.argument("log", type=click.Path())
@option("--json")
def explain_command(log: str, as_json: bool) -> None:
    """Explain why LOG (- for standard input) ran out of memory, and suggest fixes.

    It reads the messages of TensorFlow, XLA, PyTorch, JAX, Theano and CUDA's libraries, and of the host: Python, the
    kernel, Slurm, containers. The exit code is 0 even if LOG did not run out of memory.

    Examples:
      kerasmem explain train.log
      python train.py 2>&1 | tee train.log | kerasmem explain -
      kerasmem explain slurm-4711.out --json
    """
    from kerasmem.diagnosis.explaining import explain_file, explain_stream
    from kerasmem.errors import UsageError
    from kerasmem.rendering.remedy_texts import diagnosis_text

    if log == "-":
        if sys.stdin.isatty():
            raise UsageError("LOG is standard input, which is a terminal; pipe a log into it, or pass a file")
        diagnosis = explain_stream(sys.stdin.buffer, name="standard input")
    else:
        diagnosis = explain_file(log)
    show_result(diagnosis, as_json, diagnosis_text)
