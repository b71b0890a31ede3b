"""`kerasmem run`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.command import Command
from kerasmem.cli.options import all_of, option
from kerasmem.cli.terminal import is_quiet


@click.command(
    "run",
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@option("--module")
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@all_of("--micro-batches", "--save-freq", "--restarts", "--checkpoint")
def run_command(checkpoint: str | None, **options: Any) -> int:
    """Run SCRIPT with its ARGUMENTS so that `model.fit` survives running out of memory.

    Each `model.fit` becomes `kerasmem.fit`, which repeats a step that ran out of memory in micro-batches. With
    --checkpoint, a killed script restarts from its beginning. Each `fit` has a numbered checkpoint in that folder. A
    finished `fit` is skipped, and an interrupted one resumes at the next batch. Therefore the script must be
    repeatable: the same models, the same data (with seeds), and no effects that must happen only once. The checkpoints
    are removed when the script exits with code 0.

    Examples:
      kerasmem run train.py
      kerasmem run train.py --epochs 20 --data images/
      kerasmem run --save-freq 20 --checkpoint runs/first train.py
      kerasmem run --module package.train --epochs 20

    The exit code is the script's; 2 for wrong usage; 128 + N if signal N ended it and it did not restart.
    """
    from kerasmem.training.supervising import supervise
    from kerasmem.units import printable

    def print_message(text: str) -> None:
        if not is_quiet():
            click.echo(f"kerasmem run: {printable(text)}", err=True)

    return supervise(say=print_message, folder=checkpoint, **options)
