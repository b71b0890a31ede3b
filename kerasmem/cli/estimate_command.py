"""`kerasmem estimate`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.model_options import call_arguments, check_options, model_options, show_report

EXAMPLES = """\b
Examples:
  kerasmem estimate model.h5
  kerasmem estimate model.keras --batch-size 64 --device t4
  kerasmem estimate keras.applications:VGG16 --batch-size 128 --device 16GB
  kerasmem estimate mymodels.unet:build --factory-arg depth=5 --json

\b
Exit codes: 0 done (and fits) · 1 the model failed · 2 wrong usage or unreadable
input · 3 does not fit · 4 too close to call"""


@click.command("estimate", epilog=EXAMPLES)
@model_options(
    click.option(
        "--method",
        type=click.Choice(["auto", "formula"]),
        default="auto",
        show_default=True,
        help="How to estimate.",
    ),
)
def command(model: str | None, method: str, **options: Any) -> int:
    """Say how much memory training MODEL needs, before it runs and without its weights.

    MODEL is a .h5 or .keras file, an architecture .json, or package.module:function
    (also file.py:function) that returns a Keras model.
    """
    check_options("estimate", model, options)
    from kerasmem.cli.terminal import quiet_tensorflow

    with quiet_tensorflow():
        from kerasmem.estimation.facade import estimate

        report = estimate(model, method=method, **call_arguments(options))
    return show_report(report, options)
