"""`kerasmem run`."""

from __future__ import annotations

from typing import Any

import click

EXAMPLES = """\b
Examples:
  kerasmem run train.py
  kerasmem run train.py --epochs 20 --data images/
  kerasmem run --save-freq 20 --keep runs/first train.py
  kerasmem run -m package.train --epochs 20

\b
The exit code is the script's own; 1 where it ran out of memory with one row at a time too;
2 wrong usage; 128 + N where signal N ended it and nothing could be gone on with."""


@click.command(
    "run", epilog=EXAMPLES, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as after `python -m`.")
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--micro-batches", type=click.IntRange(min=1), metavar="K", help="Train in K pieces a batch from the start."
)
@click.option("--save-freq", type=click.IntRange(min=1), metavar="N", help="Save every N batches.  [default: 100]")
@click.option("--every", type=click.IntRange(min=1), hidden=True)
@click.option("--restarts", type=click.IntRange(min=0), default=50, help="Restart so often at most.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Keep the checkpoints; a later run goes on from them.",
)
def command(save_freq: int | None, every: int | None, keep: str | None, **options: Any) -> int:
    """Run SCRIPT with its ARGUMENTS, and go on where it runs out of memory or is killed.

    Each `model.fit` in it becomes `kerasmem.fit`: a step that runs out is repeated in micro-batches. Where the process
    dies (under XLA it has to) the script is run again from its beginning: calls of `fit` that were over give what they
    gave, and the one that was not goes on with the very next batch. So the script must do the same when it is run
    again: the same models, the same data (seeded where random), nothing that must not happen twice before `fit`.
    """
    from kerasmem.rendering.escape import printable
    from kerasmem.training.supervising import supervise

    def say(sentence: str) -> None:
        click.echo(f"kerasmem run: {printable(sentence)}", err=True)

    if every is not None:
        click.echo("kerasmem run: --every is called --save-freq now", err=True)
    return supervise(say=say, save_freq=save_freq or every or 100, folder=keep, **options)
