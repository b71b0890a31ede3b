"""`kerasmem max-batch` and `kerasmem cards`: searches by estimate."""

from __future__ import annotations

from typing import Any

import click

from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, PROFILE, check_options, model_options, step_settings
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner


@click.command("max-batch", cls=GuardedCommand, seconds=7200)
@model_options(
    "--maximum", "--margin", "--method", *PROFILE, "--confirm", "--timeout", output=("--json",), shared=("--device",)
)
def max_batch_command(model: str | None, **options: Any) -> int:
    """Find the largest batch of MODEL that fits a device.

    A few batch sizes are estimated. The result is the largest one whose upper bound fits. With --confirm, real steps
    decide: training, an epoch's smaller last batch, and evaluation. MODEL is as in `kerasmem estimate`.

    Examples:
      kerasmem max-batch model.keras --device t4
      kerasmem max-batch model.h5 --device 16GB --maximum 512 --method graph
      kerasmem max-batch model.keras --device 8GB --confirm --margin 0.05

    Exit codes: 0 done · 1 the model failed · 2 wrong usage or unreadable input ·
    3 no batch fits · 4 too close to call
    """
    check_options("max-batch", model, options, needs_device=True)
    from kerasmem.rendering.search_tables import search_table

    with quiet_tensorflow(), spinner("searching for the largest batch"):
        from kerasmem.estimation.sizing import max_batch_size

        own = {name: options[name] for name in ("maximum", "margin", "confirm", "timeout")}
        result = max_batch_size(model, **own, **step_settings(options))
    show_result(result, options["as_json"], search_table)
    return EXIT_CODES[result.device.verdict]


@click.command("cards", cls=GuardedCommand, seconds=7200)
@model_options("--method", output=("--json",), shared=("--batch-size",))
def cards_command(model: str | None, **options: Any) -> int:
    """List the cards of the catalogue that are large enough to train MODEL.

    MODEL is as in `kerasmem estimate`.

    Examples:
      kerasmem cards model.keras -b 64
      kerasmem cards keras.applications:ResNet50 -b 256

    Exit codes: 0 a card fits · 1 the model failed · 2 wrong usage or unreadable
    input · 3 no card fits · 4 too close to call
    """
    check_options("cards", model, options)
    from kerasmem.rendering.search_tables import cards_table

    with quiet_tensorflow(), spinner(f"estimating {model or options['factory']}"):
        from kerasmem.estimation.card_ranking import rank_cards

        ranking = rank_cards(model, **step_settings(options))
    show_result(ranking, options["as_json"], cards_table)
    return EXIT_CODES[ranking.cards[0].verdict]
