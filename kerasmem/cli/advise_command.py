"""`kerasmem advise`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, PROFILE, check_options, model_options, step_settings
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner
from kerasmem.errors import UsageError


@click.command("advise", cls=GuardedCommand, seconds=7200)
@model_options(
    "--method", *PROFILE, "--confirm", "--samples", "--budget-seconds", output=("--code", "--verbose", "--json")
)
def advise_command(model: str | None, budget_seconds: float, code: bool, **options: Any) -> int:
    """Suggest changes so that training MODEL fits a device.

    Each change is estimated on the changed model. If no single change is enough, combinations are estimated, those
    with the fewest side effects first. MODEL is as in `kerasmem estimate`.

    Examples:
      kerasmem advise model.keras --device t4 --batch-size 64
      kerasmem advise keras.applications:ResNet50 --device 8GB --no-jit-compile
      kerasmem advise model.keras --device 8GB --code
      kerasmem advise model.keras --device 8GB --samples 60000 --confirm

    Exit codes: 0 it fits, unchanged or with a suggestion · 1 the model failed ·
    2 wrong usage or unreadable input · 3 nothing fits · 4 too close to call
    """
    check_options("advise", model, options, needs_device=True)
    if code and options["as_json"]:
        raise UsageError("--code and --json cannot be combined; choose one")
    from kerasmem.rendering.remedy_texts import advice_code, advice_table

    with quiet_tensorflow(), spinner("estimating remedies") as show_task:
        from kerasmem.recovery.advising import advise

        settings = {name: options[name] for name in ("confirm", "samples")} | step_settings(options)
        result = advise(model, progress=show_task, budget_seconds=budget_seconds, **settings)
    if code:
        click.echo(advice_code(result), nl=False)
    else:
        show_result(result, options["as_json"], partial(advice_table, is_brief=not options["verbose"]))
    return EXIT_CODES[result.verdict]
