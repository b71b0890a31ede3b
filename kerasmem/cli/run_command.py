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
    """Run SCRIPT with its ARGUMENTS; its `model.fit` survives running out of memory.

    Each `model.fit` in it becomes `kerasmem.fit`: a step that runs out is repeated in micro-batches. With --checkpoint
    a script that was killed is started again from its beginning. Each `fit` has its own checkpoint in that folder, by
    its number: one that was over is not trained again, the other resumes at the next batch. So the script must do the
    same when it is started again: the same models, the same data (seeded if random), nothing that must not happen
    twice. The checkpoints are removed when the script ends with exit code 0.

    Examples:
      kerasmem run train.py
      kerasmem run train.py --epochs 20 --data images/
      kerasmem run --save-freq 20 --checkpoint runs/first train.py
      kerasmem run --module package.train --epochs 20

    The exit code is the script's own; 2 wrong usage; 128 + N if signal N ended it and it was not started again.
    """
    from kerasmem.training.supervising import supervise
    from kerasmem.units import printable

    def say(sentence: str) -> None:
        if not is_quiet():
            click.echo(f"kerasmem run: {printable(sentence)}", err=True)

    return supervise(say=say, folder=checkpoint, **options)
