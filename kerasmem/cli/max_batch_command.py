"""`kerasmem max-batch`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kerasmem.cli.command import option
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
    steps_option,
    timeout_option,
)
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner

EXAMPLES = """\b
Examples:
  kerasmem max-batch model.keras --device t4
  kerasmem max-batch model.h5 --device 16GB --step 8 --method graph
  kerasmem max-batch model.keras --device 8GB --confirm --margin 0.05
  kerasmem max-batch model.keras --device t4 --batch-size 64 --vary dense_1.units
  kerasmem max-batch mymodels.py:resnet --device a100-40 --vary n --maximum 200

\b
Exit codes: 0 done · 1 the model failed · 2 wrong usage or unreadable input ·
3 not even the smallest fits · 4 too close to call"""

REAL_STEPS = ("confirm", "margin", "samples", "steps", "timeout")


of_real = partial(option, panel="Real steps")


@click.command("max-batch", cls=GuardedCommand, seconds=7200, epilog=EXAMPLES)
@model_options(
    option(
        "--vary",
        default="batch_size",
        metavar="WHAT",
        help="Let this grow: batch_size, LAYER.FIELD (dense_1.units), or an argument of the model's function.",
    ),
    option("--minimum", type=COUNT, default=1, metavar="N", former="--min", help="Begin with size N."),
    option(
        "--maximum",
        type=COUNT,
        metavar="N",
        former="--max",
        show_default="as large as fits",
        help="Ask for no size above N.",
    ),
    option("--step", type=COUNT, default=1, metavar="N", help="Ask for every Nth size only."),
    option("--exact", is_flag=True, help="Search to the last size, not to within 1 %."),
    option(
        "--margin",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        metavar="SHARE",
        help="Keep this share of the device free.",
    ),
    method_option,
    of_real(
        "--confirm",
        is_flag=True,
        former="--verify",
        help="Run real steps at the answer, in a process of its own under the device's limit.",
    ),
    steps_option(default=3, panel="Real steps"),
    of_real(
        "--samples",
        type=COUNT,
        metavar="N",
        show_default="half a batch over",
        help="Try the last, smaller batch that N samples leave.",
    ),
    timeout_option(),
    cache_option,
    output=(json_option,),
)
def command(model: str | None, cache: bool, **options: Any) -> int:
    """Find the largest batch of MODEL that fits a device, or how wide or deep it can get.

    The estimator is asked for a few sizes; the answer is the largest whose whole interval fits.
    With --confirm, real steps decide: training, an epoch's smaller last batch, and evaluation.
    MODEL is as for `kerasmem estimate`.
    """
    if model is not None:
        require_device(options)
    check_options("max-batch", model, options)
    from kerasmem.rendering.search_table import search_table

    with quiet_tensorflow(), spinner(f"searching for the largest {options['vary']}", options["method"]):
        from kerasmem.estimation.sizing import max_batch_size

        own = {name: options[name] for name in ("vary", "minimum", "maximum", "step", "exact", "method", *REAL_STEPS)}
        result = max_batch_size(model, cache=cache, **own, **call_arguments(options))
    show_result(result, options["as_json"], search_table)
    return EXIT_CODES[result.device.verdict]
