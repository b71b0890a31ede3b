"""A CardRanking as text: the card to take, and the others."""

from __future__ import annotations

from itertools import compress

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from kerasmem.estimation.card_ranking import CardRanking
from kerasmem.rendering.layout import VERDICT_STYLES, figures, known_size, table, verdict_text
from kerasmem.rendering.peak_text import asked_line
from kerasmem.units import format_size


def cards_table(ranking: CardRanking, terminal: int | None = None, *, largest: bool = False) -> RenderableType:
    """Return the answer, and a row for each card.

    Args:
        ranking: of the cards.
        terminal: columns of one, None for plain text.
        largest: whether the largest batch was looked for.
    """
    report, best = ranking.report, ranking.best
    fitting = sum(each.verdict == "fits" for each in ranking.cards)
    if best is None:
        answer = Text("✘ fits none of the known cards", style=VERDICT_STYLES["does not fit"])
    else:
        kind = "with the least memory" if best.price is None else f"at the lowest price, {best.price:g} an hour"
        answer = Text(f"✔ fits {fitting} of {len(ranking.cards)} known cards", style=VERDICT_STYLES["fits"])
        answer.append(f", {kind}: {best.name}", style="not bold default")
    priced = any(each.price is not None for each in ranking.cards)
    shown = (True, True, True, True, True, largest, priced)
    columns = (
        Column("Card", no_wrap=True), Column("--device", no_wrap=True), figures("For TensorFlow"), figures("At most"),
        Column("Verdict", no_wrap=True), figures("Largest batch"), figures("Price an hour"),
    )  # fmt: skip
    rows = table(terminal, *compress(columns, shown))
    for each in ranking.cards:
        cells: tuple[str | Text, ...] = (
            each.name, each.key, format_size(each.available_bytes), known_size(each.high), verdict_text(each.verdict),
            "–" if each.largest_batch is None else f"{each.largest_batch:,}",
            "–" if each.price is None else f"{each.price:g}",
        )  # fmt: skip
        rows.add_row(*compress(cells, shown))
    return Group(answer, Text(asked_line(report), style="dim"), "", rows)
