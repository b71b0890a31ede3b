"""`kerasmem run`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.command import Command, is_quiet, option
from kerasmem.cli.options import COUNT, WHOLE

EXAMPLES = """\b
Examples:
  kerasmem run train.py
  kerasmem run train.py --epochs 20 --data images/
  kerasmem run --save-freq 20 --checkpoint runs/first train.py
  kerasmem run --module package.train --epochs 20

\b
The exit code is the script's own; 1 where it ran out of memory with one row at a time too;
2 wrong usage; 128 + N where signal N ended it and nothing could be gone on with."""


@click.command(
    "run",
    cls=Command,
    epilog=EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@option(
    "--module",
    "is_module",
    is_flag=True,
    former="-m",
    help="Take SCRIPT for the name of a module, as `python -m` does.",
)
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@option(
    "--micro-batches",
    type=COUNT,
    metavar="N",
    show_default="1, more where it runs out",
    help="Train in N pieces a batch from the start.",
)
@option("--save-freq", type=COUNT, metavar="N", default=100, former="--every", help="Save every N batches.")
@option("--restarts", type=WHOLE, metavar="N", default=50, help="Restart N times at most.")
@option(
    "--checkpoint",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    former="--keep",
    show_default="none",
    help="Keep the checkpoints in FOLDER, from which a later run goes on.",
)
def command(checkpoint: str | None, **options: Any) -> int:
    """Run SCRIPT with its ARGUMENTS, and go on where it runs out of memory or is killed.

    Each `model.fit` in it becomes `kerasmem.fit`: a step that runs out is repeated in micro-batches. Where the process
    dies (under XLA it has to) the script is run again from its beginning: calls of `fit` that were over give what they
    gave, and the one that was not goes on with the very next batch. So the script must do the same when it is run
    again: the same models, the same data (seeded where random), nothing that must not happen twice before `fit`.
    """
    from kerasmem.rendering.escape import printable
    from kerasmem.training.supervising import supervise

    def say(sentence: str) -> None:
        if not is_quiet():
            click.echo(f"kerasmem run: {printable(sentence)}", err=True)

    return supervise(say=say, folder=checkpoint, **options)
