"""`kerasmem max-batch`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import (
    COUNT,
    EXIT_CODES,
    cache_option,
    call_arguments,
    check_options,
    json_option,
    method_option,
    model_options,
    require_device,
    timeout_option,
)
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner

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


@click.command("max-batch", cls=GuardedCommand, seconds=7200, epilog=EXAMPLES)
@model_options(
    click.option(
        "--vary",
        default="batch_size",
        metavar="WHAT",
        help="What grows: batch_size, LAYER.FIELD (dense_1.units), or an argument of the model's function.",
    ),
    click.option("--min", "minimum", type=COUNT, default=1, help="Smallest size."),
    click.option("--max", "maximum", type=COUNT, help="Largest size [default: as large as fits]."),
    click.option("--step", type=COUNT, default=1, help="Only every Nth size."),
    click.option("--exact", is_flag=True, help="Search to the last one, not to within 1 %."),
    click.option("--verify", is_flag=True, help="Run real steps there, in a process of its own under the limit."),
    click.option("--margin", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Share to keep free."),
    click.option("--samples", type=COUNT, help="Samples of the data: sets the last, smaller batch."),
    click.option("--steps", type=COUNT, default=3, help="Steps of each try."),
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
    if model is not None:
        require_device(options)
    check_options("max-batch", model, options)
    from kerasmem.rendering.search_table import search_table

    with quiet_tensorflow(), spinner(f"searching for the largest {options['vary']}", options["method"]):
        from kerasmem.estimation.sizing import max_batch_size

        own = {name: options[name] for name in ("vary", "minimum", "maximum", "step", "exact", "method", *VERIFYING)}
        result = max_batch_size(model, cache=not no_cache, **own, **call_arguments(options))
    show_result(result, options["as_json"], search_table)
    return EXIT_CODES[result.device.verdict]
