"""`kerasmem measure`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.estimate_command import show_report
from kerasmem.cli.options import check_options, model_options, option, step_settings
from kerasmem.cli.terminal import quiet_tensorflow, spinner


@click.command("measure", cls=GuardedCommand, seconds=7200)
@model_options(option("--steps", default=10), "--timeout")
def command(model: str | None, steps: int, timeout: float, **options: Any) -> int:
    """Train MODEL for some steps in a process of its own and say what memory they took.

    The weights are real (and random), the batch is zeros; on a machine without a GPU
    the allocator is the one that TensorFlow uses on GPUs. MODEL is as for `kerasmem estimate`.

    Examples:
      kerasmem measure model.keras --batch-size 64
      kerasmem measure keras.applications:MobileNetV2 --batch-size 32 --optimizer adam --device t4
      kerasmem measure mymodels.unet:build --batch-size 8 --jit-compile --json

    Exit codes: 0 done (and fits) · 1 the model failed, or ran out of memory or time ·
    2 wrong usage or unreadable input · 3 does not fit · 4 too close to call
    """
    check_options("measure", model, options)
    with quiet_tensorflow(), spinner(f"measuring {model or options['factory']}"):
        from kerasmem.estimation.measuring import measure

        report = measure(model, steps=steps, timeout=timeout, **step_settings(options))
    return show_report(report, options)
