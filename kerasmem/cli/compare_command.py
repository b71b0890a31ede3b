"""`kerasmem compare`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import PROFILE, check_options, model_options, option, step_settings, worst
from kerasmem.cli.terminal import is_terminal, quiet_tensorflow, show_result, spinner
from kerasmem.errors import UsageError

_TERMINAL_LAYERS = 25
# settings that a saved report has too
_SAVED = ("batch_size", "method", "mode", "device", "replicas", "kernels", "threads")


@click.command("compare", cls=GuardedCommand)
@model_options(
    "--budget", "--max-increase", "--allow-different-settings", "--method", "--replicas", *PROFILE,
    arguments=(click.argument("a", metavar="A"), click.argument("b", metavar="B")),
    output=(option("--top", show_default=f"{_TERMINAL_LAYERS} on a terminal, else all"), "--markdown", "--json"),
)  # fmt: skip
@click.pass_context
def compare_command(
    context: click.Context, a: str, b: str, budget: str | None, max_increase: str | None, **options: Any
) -> int:
    """Compare the memory of A and B, by category and by layer.

    A and B are models as in `kerasmem estimate`, or reports of `kerasmem estimate --json`. Both are estimated with
    the same settings. If B exceeds a limit, the exit code is 3.

    Examples:
      kerasmem compare before.keras after.keras --batch-size 64
      kerasmem compare before.keras after.keras --max-increase 5%
      kerasmem estimate model.keras --json > base.json
      kerasmem compare base.json model.keras --budget 14GiB --markdown

    Exit codes: 0 done, and within the limits · 1 a model failed · 2 wrong usage or
    unreadable input · 3 B exceeds a limit, or does not fit · 4 too close to call
    """
    check_options("compare", a, options)
    if options["markdown"] and options["as_json"]:
        raise UsageError("--markdown and --json cannot be combined; choose one")
    is_default = click.core.ParameterSource.DEFAULT
    settings = {
        name: options[name] for name in _SAVED if context.get_parameter_source(name) is not is_default
    }  # a saved report sets the defaults
    with quiet_tensorflow(), spinner(f"comparing {os.path.basename(a)} and {os.path.basename(b)}"):
        from kerasmem.estimation.comparing import compare

        arguments = {name: value for name, value in step_settings(options).items() if name not in _SAVED}
        comparison = compare(
            a, b, budget=budget, max_increase=max_increase,
            allow_different_settings=options["allow_different_settings"], **arguments, **settings,
        )  # fmt: skip
    from kerasmem.rendering.comparison_table import comparison_markdown, comparison_table

    if options["markdown"]:
        click.echo(comparison_markdown(comparison, options["top"]), nl=False)
    else:
        top = _TERMINAL_LAYERS if is_terminal() and options["top"] is None else options["top"]
        show_result(comparison, options["as_json"], partial(comparison_table, top=top))
    verdicts = [limit.verdict for limit in comparison.limits]
    device = comparison.after.device
    return worst([*verdicts, *([] if device is None else [device.verdict])])
