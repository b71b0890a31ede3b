"""`kerasmem max-batch`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.model_options import (
    EXIT_CODES,
    cache_option,
    call_arguments,
    check_options,
    json_option,
    method_option,
    model_options,
    timeout_option,
)
from kerasmem.errors import UsageError

EXAMPLES = """\b
Examples:
  kerasmem max-batch model.keras --device t4
  kerasmem max-batch model.h5 --device 16GB --step 8 --method graph
  kerasmem max-batch model.keras --device 8GB --verify --margin 0.05
  kerasmem max-batch model.keras --device t4 --batch-size 64 --vary dense_1.units
  kerasmem max-batch mymodels.py:resnet --device a100-40 --vary n --max 200

\b
Exit codes: 0 done · 1 the model failed · 2 wrong usage or unreadable input ·
3 not even the smallest fits · 4 too close to call"""

VERIFYING = ("verify", "margin", "samples", "steps", "timeout")


@click.command("max-batch", epilog=EXAMPLES)
@model_options(
    click.option(
        "--vary",
        default="batch_size",
        show_default=True,
        metavar="WHAT",
        help="What grows: batch_size, LAYER.FIELD (dense_1.units), or an argument of the model's function.",
    ),
    click.option("--min", "minimum", type=click.IntRange(min=1), default=1, show_default=True, help="Smallest size."),
    click.option("--max", "maximum", type=click.IntRange(min=1), help="Largest size [default: as large as fits]."),
    click.option("--step", type=click.IntRange(min=1), default=1, show_default=True, help="Only every Nth size."),
    click.option("--exact", is_flag=True, help="Search to the last one, not to within 1 %."),
    click.option("--verify", is_flag=True, help="Run real steps there, in a process of its own under the limit."),
    click.option("--margin", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Share to keep free."),
    click.option("--samples", type=click.IntRange(min=1), help="Samples of the data: sets the last, smaller batch."),
    click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps of each try."),
    timeout_option,
    method_option,
    cache_option,
    output=(json_option,),
)
def command(model: str | None, no_cache: bool, **options: Any) -> int:
    """Find the largest batch of MODEL that fits a device, or how wide or deep it can get.

    The estimator is asked for a few sizes; the answer is the largest whose whole interval fits.
    With --verify, real steps decide: training, an epoch's smaller last batch, and evaluation.
    MODEL is as for `kerasmem estimate`.
    """
    check_options("max-batch", model, options)
    if options["device"] is None:
        raise UsageError("name the device that it must fit: --device t4, or a size such as --device 16GB")
    from kerasmem.cli.terminal import console, is_terminal, quiet_tensorflow, working

    with quiet_tensorflow(), working(f"searching for the largest {options['vary']}", options["method"]):
        from kerasmem.estimation.sizing import max_batch_size

        own = {name: options[name] for name in ("vary", "minimum", "maximum", "step", "exact", "method", *VERIFYING)}
        result = max_batch_size(model, cache=not no_cache, **own, **call_arguments(options))
    if options["as_json"]:
        from kerasmem.rendering.data import to_json

        click.echo(to_json(result.to_dict()))
    else:
        from kerasmem.rendering.search_table import print_search, render_search

        if is_terminal():
            print_search(result, console())
        else:
            click.echo(render_search(result), nl=False)
    return EXIT_CODES[result.device.verdict]
