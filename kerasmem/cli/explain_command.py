"""`kerasmem explain`."""

from __future__ import annotations

import sys

import click

EXAMPLES = """\b
Examples:
  kerasmem explain train.log
  python train.py 2>&1 | tee train.log | kerasmem explain -
  kerasmem explain slurm-4711.out --json"""


@click.command("explain", epilog=EXAMPLES)
@click.argument("log", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(log: str, as_json: bool) -> None:
    """Say what ran out of memory in LOG (- for standard input), why, where, and what to do.

    Reads the messages of TensorFlow, XLA, PyTorch, JAX, Theano and CUDA's libraries, and those of the host: Python,
    the kernel, Slurm, containers. The exit code is 0 also where memory did not run out.
    """
    from kerasmem.diagnosis.explaining import explain_file, explain_stream
    from kerasmem.errors import UsageError

    if log == "-":
        if sys.stdin.isatty():
            raise UsageError("explain: standard input is a terminal; pipe a log into it, or name a file")
        found = explain_stream(sys.stdin.buffer, name="standard input")
    else:
        found = explain_file(log)
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(found.to_dict()))
        return
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.rendering.diagnosis_text import diagnosis_text

    screen = console() if is_terminal() else console(width=400)
    screen.print(diagnosis_text(found, rich_look=is_terminal()))
