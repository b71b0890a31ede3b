"""`kerasmem estimate`."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.checks import Method, Parallel
from kerasmem.cli.guarded_command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, call_arguments, check_options, model_options
from kerasmem.cli.terminal import is_terminal, quiet_tensorflow, show_json, show_text, spinner

EXAMPLES = """\b
Examples:
  kerasmem estimate model.h5
  kerasmem estimate model.keras -b 64 -d t4
  kerasmem estimate keras.applications:VGG16 --batch-size 128 --device 16GB
  kerasmem estimate model.keras --method graph --optimizer adam --top 10
  kerasmem estimate mymodels.unet:build --factory-arg depth=5 --json
  kerasmem estimate model.keras --batch-size 256 --replicas 4 --shard-optimizer
  kerasmem estimate model.keras --replicas 4 --parallel model --layout '.*/kernel=,model'

\b
Exit codes: 0 done (and fits) · 1 the model failed · 2 wrong usage or unreadable
input · 3 does not fit · 4 too close to call"""

_ROWS_ON_A_SCREEN = 60  # a longer model is shown by its largest layers
_LARGEST = 25


@click.command("estimate", cls=GuardedCommand, epilog=EXAMPLES)
@model_options("--method", "--cache", "--all-methods", "--replicas", "--parallel", "--shard-optimizer", "--layout")
def command(
    model: str | None, method: Method, cache: bool, all_methods: bool, replicas: int, parallel: Parallel,
    shard_optimizer: bool, layout: tuple[str, ...], **options: Any,
) -> int:  # fmt: skip
    """Say how much memory training MODEL needs, before it runs and without its weights.

    MODEL is a .h5 or .keras file, an architecture .json, or package.module:function
    (also file.py:function) that returns a Keras model.
    """
    check_options("estimate", model, options)
    from kerasmem.estimation.parallel.parallelism import check_method, parallelism

    check_method(method, parallelism(replicas, parallel, shard_optimizer, layout))
    with quiet_tensorflow(), spinner(f"estimating {model or options['factory']}", method):
        from kerasmem.estimation.cache import cached_estimate
        from kerasmem.estimation.facade import estimate

        ask = cached_estimate if cache else estimate
        report = ask(
            model, method=method, all_methods=all_methods, replicas=replicas, parallel=parallel,
            shard_optimizer=shard_optimizer, layout=list(layout) or None, **call_arguments(options),
        )  # fmt: skip
    return show_report(report, options)


def show_report(report: Any, options: dict[str, Any]) -> int:
    """Print a `MemoryReport` as the options say, and return the exit code."""
    from kerasmem.estimation.verdict import fitting_cards
    from kerasmem.rendering.answer import answer
    from kerasmem.rendering.data import layers_to_csv
    from kerasmem.rendering.estimate_table import estimate_table

    sort, top = options["sort"], options["top"]
    if options["as_json"]:
        show_json(report.to_dict())
    elif options["as_csv"]:
        click.echo(layers_to_csv(report), nl=False)
    elif not options["verbose"]:
        cards = fitting_cards(report.bytes) if report.device is None else []
        show_text(lambda terminal: answer(report, terminal, cards=cards, sort=sort or "size", top=top))
    else:
        sort = sort or "order"
        if is_terminal() and top is None and sort == "order" and len(report.layers) > _ROWS_ON_A_SCREEN:
            top = _LARGEST
        show_text(lambda terminal: estimate_table(report, terminal, sort=sort, top=top))
    return 0 if report.device is None else EXIT_CODES[report.device.verdict]
