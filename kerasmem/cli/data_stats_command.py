"""`kerasmem data stats`."""

from __future__ import annotations

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import allow_external_option, json_option, repeatable_option
from kerasmem.cli.terminal import progress_bar, show_result

EXAMPLES = """\b
Examples:
  kerasmem data stats train.h5
  kerasmem data stats train.h5 --scale 1/255
  kerasmem data stats train.h5 --dataset images --dataset labels --json"""


@click.command("stats", cls=GuardedCommand, seconds=None, epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@repeatable_option("--dataset", "names", metavar="NAME", help="Only this one; may be given several times.")
@click.option("--scale", default="1", show_default=True, help="What the features are multiplied by, such as 1/255.")
@allow_external_option
@json_option
def command(file: str, names: tuple[str, ...], scale: str, allow_external: bool, as_json: bool) -> None:
    """Print mean, variance, range and class weights of the datasets of FILE, and the lines that put them to use.

    One pass in bounded memory; the figures are those that keras.layers.Normalization(axis=-1).adapt would find.
    """
    from kerasmem.datatools.inspecting.statistics import data_stats
    from kerasmem.rendering.data_tables import stats_table

    factor = _read_scale(scale)
    with progress_bar() as progress:
        found = data_stats(file, list(names) or None, scale=factor, allow_external=allow_external, progress=progress)
    show_result(found, as_json, stats_table)


def _read_scale(text: str) -> float:
    from kerasmem.errors import UsageError

    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or "1")
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--scale: {text!r} is no number; write for example 1/255 or 0.5") from None
