"""A CardRanking as text: the card to take, and the others."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from kerasmem.estimation.card_ranking import CardRanking
from kerasmem.rendering.layout import VERDICT_STYLES, figures, table, verdict_text
from kerasmem.rendering.peak_text import asked_line


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
        answer = Text(f"✔ fits {fitting} of {len(ranking.cards)} known cards", style=VERDICT_STYLES["fits"])
        answer.append(f", with the least memory: {best.name}", style="not bold default")
    names = (Column(name, no_wrap=True) for name in ("Card", "--device"))
    batches = figures("Largest batch") if largest else None
    verdict = Column("Verdict", no_wrap=True)
    rows = table(terminal, *names, figures("For TensorFlow"), figures("At most"), verdict, batches)
    for each in ranking.cards:
        batch = "–" if each.largest_batch is None else f"{each.largest_batch:,}"
        rows.add(each.name, each.key, each.available_bytes, each.high, verdict_text(each.verdict), batch)
    return Group(answer, Text(asked_line(report), style="dim"), "", rows)
