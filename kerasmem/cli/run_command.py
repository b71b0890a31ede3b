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
def command(checkpoint: str | None, **options: Any) -> int:
    """Run SCRIPT with its ARGUMENTS, and go on where it runs out of memory or is killed.

    Each `model.fit` in it becomes `kerasmem.fit`: a step that runs out is repeated in micro-batches. Where the process
    dies (under XLA it has to) the script is run again from its beginning: calls of `fit` that were over give what they
    gave, and the one that was not goes on with the very next batch. So the script must do the same when it is run
    again: the same models, the same data (seeded where random), nothing that must not happen twice before `fit`.

    Examples:
      kerasmem run train.py
      kerasmem run train.py --epochs 20 --data images/
      kerasmem run --save-freq 20 --checkpoint runs/first train.py
      kerasmem run --module package.train --epochs 20

    The exit code is the script's own; 1 where it ran out of memory with one row at a time too;
    2 wrong usage; 128 + N where signal N ended it and nothing could be gone on with.
    """
    from kerasmem.rendering.escape import printable
    from kerasmem.training.supervising import supervise

    def say(sentence: str) -> None:
        if not is_quiet():
            click.echo(f"kerasmem run: {printable(sentence)}", err=True)

    return supervise(say=say, folder=checkpoint, **options)
