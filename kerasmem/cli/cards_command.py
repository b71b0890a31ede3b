"""`kerasmem cards`."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kerasmem.checks import Method
from kerasmem.cli.command import GuardedCommand
from kerasmem.cli.options import EXIT_CODES, call_arguments, check_options, model_options
from kerasmem.cli.terminal import quiet_tensorflow, show_result, spinner
from kerasmem.errors import UsageError


@click.command("cards", cls=GuardedCommand, seconds=7200)
@model_options("--max-batch", "--method", output=("--json",))
def command(model: str | None, method: Method, max_batch: bool, **options: Any) -> int:
    """Say which cards of the catalogue are enough to train MODEL.

    MODEL is as for `kerasmem estimate`.

    Examples:
      kerasmem cards model.keras -b 64
      kerasmem cards keras.applications:ResNet50 -b 256 --max-batch

    Exit codes: 0 a card fits · 1 the model failed · 2 wrong usage or unreadable
    input · 3 no card fits · 4 too close to call
    """
    check_options("cards", model, options)
    if options["device"] is not None:
        raise UsageError("--device: cards asks about all of them; kerasmem estimate takes a device")
    from kerasmem.rendering.search_tables import cards_table

    with quiet_tensorflow(), spinner(f"asking for {model or options['factory']}", method):
        from kerasmem.estimation.card_ranking import rank_cards

        arguments = {name: value for name, value in call_arguments(options).items() if name != "device"}
        ranking = rank_cards(model, method=method, max_batch=max_batch, **arguments)
    show_result(ranking, options["as_json"], partial(cards_table, largest=max_batch))
    return EXIT_CODES[ranking.cards[0].verdict]
