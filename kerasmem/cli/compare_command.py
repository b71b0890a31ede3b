"""`kerasmem compare`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import call_arguments, check_options, json_object, model_options, option, worst
from kerasmem.cli.terminal import is_terminal, quiet_tensorflow, show_result, spinner
from kerasmem.errors import InputError, UsageError

_MOST_ON_A_SCREEN = 25  # layers
_SAME = ("batch_size", "method", "mode")  # settings of a saved report that the other side takes over


@click.command("compare", cls=GuardedCommand)
@model_options(
    "--budget", "--max-increase", "--allow-different-settings", "--method",
    arguments=(click.argument("a", metavar="A"), click.argument("b", metavar="B")),
    output=(option("--top", show_default=f"{_MOST_ON_A_SCREEN} on a terminal, else all"), "--markdown", "--json"),
)  # fmt: skip
@click.pass_context
def command(
    context: click.Context, a: str, b: str, budget: str | None, max_increase: str | None, **options: Any
) -> int:
    """Say what differs in memory between A and B, by category and by layer.

    A and B are models as for `kerasmem estimate`, or reports that `kerasmem estimate --json` saved;
    both are estimated with the same settings. A limit that B breaks gives exit code 3.

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
        raise UsageError("--markdown and --json both print; give one of them")
    limits = _limits(budget, max_increase)
    saved = {path: report for path in (a, b) if (report := _saved_report(path)) is not None}
    chosen = {name for name in _SAME if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    known = next(iter(saved.values()), None)
    if known is not None:
        taken = {name: getattr(known.settings, name) for name in _SAME if name not in chosen}
        if taken.get("method") in ("measure", "profile"):
            taken.pop("method")
        options.update(taken)
    method = options["method"]
    with quiet_tensorflow(), spinner(f"comparing {os.path.basename(a)} and {os.path.basename(b)}", method):
        from kerasmem.estimation.comparing import compare_reports, unlike_settings
        from kerasmem.estimation.facade import estimate

        reports = []
        for path in (a, b):
            report = saved.get(path) or estimate(path, method=method, **call_arguments(options))
            if path not in saved:
                method = report.settings.method  # the second by the method that answered for the first
            reports.append(report)
        if not options["allow_different_settings"] and (unlike := unlike_settings(*reports)):
            raise UsageError(
                f"{a} and {b}: {'; '.join(unlike)}; estimate both alike, or give --allow-different-settings"
            )
        comparison = compare_reports(*reports, **limits)
    from kerasmem.rendering.comparison_table import comparison_markdown, comparison_table

    if options["markdown"]:
        click.echo(comparison_markdown(comparison, options["top"]), nl=False)
    else:
        top = _MOST_ON_A_SCREEN if is_terminal() and options["top"] is None else options["top"]
        show_result(comparison, options["as_json"], partial(comparison_table, top=top))
    verdicts = [each.verdict for each in comparison.limits]
    device = comparison.after.device
    return worst([*verdicts, *([] if device is None else [device.verdict])])


def _limits(budget: str | None, max_increase: str | None) -> dict[str, Any]:
    """Return the limits as `compare_reports` takes them."""
    from kerasmem.units import parse_size

    limits: dict[str, Any] = {}
    if budget is not None:
        limits["budget"] = parse_size(budget, field="--budget")
    if max_increase is None:
        return limits
    text = max_increase.strip()
    if not text.endswith("%"):
        return {**limits, "max_increase": parse_size(text, field="--max-increase")}
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1000:
        raise UsageError(f"--max-increase {max_increase!r}: write a share of A such as 5%, or a size such as 200MB")
    return {**limits, "max_increase_ratio": share}


def _saved_report(path: str) -> Any:
    """Return the report in a file, or None if it is something else, such as a model."""
    from kerasmem.estimation.report import MemoryReport

    data = json_object(path)
    if data is None or "formula" not in data or "format_version" not in data:
        return None
    try:
        return MemoryReport.from_dict(data)
    except InputError as error:
        raise InputError(f"{path}: {error}; write it again: kerasmem estimate MODEL --json > {path}") from error
