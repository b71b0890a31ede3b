"""`kerasmem data stats`."""

from __future__ import annotations

import click

EXAMPLES = """\b
Examples:
  kerasmem data stats train.h5
  kerasmem data stats train.h5 --scale 1/255
  kerasmem data stats train.h5 --dataset images --dataset labels --json"""


@click.command("stats", epilog=EXAMPLES)
@click.argument("file", type=click.Path())
@click.option("--dataset", "names", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--scale", default="1", show_default=True, help="What the features are multiplied by, such as 1/255.")
@click.option("--allow-external", is_flag=True, help="Read other files that FILE names.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: str, names: tuple[str, ...], scale: str, allow_external: bool, as_json: bool) -> None:
    """Print mean, variance, range and class weights of the datasets of FILE, and the lines that put them to use.

    One pass in bounded memory; the figures are those that keras.layers.Normalization(axis=-1).adapt would find.
    """
    from kerasmem.cli.data_progress import showing
    from kerasmem.datatools.inspecting.statistics import data_stats

    factor = _read_scale(scale)
    with showing() as tell:
        found = data_stats(file, list(names) or None, scale=factor, allow_external=allow_external, progress=tell)
    if as_json:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(found.to_dict()))
        return
    from kerasmem.cli.terminal import console, is_terminal
    from kerasmem.rendering.data_stats_table import stats_table

    screen = console() if is_terminal() else console(width=400)
    screen.print(stats_table(found, rich_look=is_terminal()))


def _read_scale(text: str) -> float:
    from kerasmem.errors import UsageError

    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or "1")
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--scale: {text!r} is no number; write for example 1/255 or 0.5") from None
