"""Searches as text: the largest batch, the card to take, and many candidates."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.card_ranking import CardRanking
from kerasmem.estimation.many import Candidate, EstimateTable
from kerasmem.estimation.search import SearchResult
from kerasmem.rendering.escape import printable, short_name
from kerasmem.rendering.layout import VERDICT_STYLES, figures, model_heading, note_lines, table, verdict_text, words
from kerasmem.rendering.peak_text import asked_line, how, settings_line
from kerasmem.units import format_size


def search_table(result: SearchResult, terminal: int | None = None) -> RenderableType:
    """Return the answer, the sizes that were asked, and the real steps that ran."""
    report, settings = result.report, result.report.settings
    line = settings_line(settings, with_batch=False)
    heading = model_heading(report.model, f"{line} · method: {printable(settings.method, 30)} ({how(report)})")
    answer = [_answer_of_trials(result)] if result.trials else _answer(result)
    parts: list[RenderableType] = [*answer, "", heading, "", _evaluations(result, terminal)]
    if result.trials:
        parts += ["", _trials(result, terminal)]
    return Group(*parts, *note_lines(result.notes))


def _evaluations(result: SearchResult, terminal: int | None) -> Table:
    first = Column("batch size", justify="right", overflow="fold")
    sizes = map(figures, ("Needs", "At least", "At most"))
    rows = table(terminal, first, *sizes, Column("Verdict", no_wrap=True))
    for each in result.evaluations:
        least = None if result.report.settings.stands_in else each.low
        style = "bold" if each.size == result.largest else None
        rows.add(f"{each.size:,}", each.total, least, each.high, verdict_text(each.verdict), style=style)
    return rows


def _trials(result: SearchResult, terminal: int | None) -> Table:
    rows = table(terminal, *map(figures, ("Real steps at", "Peak", "Limit")), Column("Outcome", no_wrap=True))
    for each in sorted(result.trials, key=lambda trial: trial.size):
        outcome = Text("ran", VERDICT_STYLES["fits"]) if each.fits else Text("ran out", VERDICT_STYLES["does not fit"])
        style = "bold" if each.size == result.largest else None
        rows.add(f"{each.size:,}", each.peak_bytes, each.limit_bytes, outcome, style=style)
    return rows


def _room(result: SearchResult) -> Text:
    device = result.device
    return Text(f"{printable(device.name, 80)} ({format_size(device.available_bytes)} for TensorFlow): ")


def _answer_of_trials(result: SearchResult) -> Text:
    line = _room(result)
    if result.largest is None:
        smallest = min(each.size for each in result.trials)
        return line.append(f"batch size {smallest:,} ran out of memory", style=VERDICT_STYLES["does not fit"])
    peak = next((each.peak_bytes for each in result.trials if each.size == result.largest), None)
    line.append(f"batch size {result.largest:,} ran", style=VERDICT_STYLES["fits"])
    return line if peak is None else line.append(f", {format_size(result.device.available_bytes - peak)} to spare")


def _answer(result: SearchResult) -> Iterator[Text]:
    device, line = result.device, _room(result)
    has_failed = device.verdict == "does not fit"
    if result.largest is not None:
        size = next(each for each in result.evaluations if each.size == result.largest)
        most = size.total if size.high is None else size.high
        line.append(f"batch size {result.largest:,} fits", style=VERDICT_STYLES["fits"])
        line.append(f", {format_size(device.available_bytes - most)} to spare")
    else:
        smallest = result.evaluations[0]
        verdict = "does not fit" if has_failed else "is too close to call"
        line.append(f"batch size {smallest.size:,} {verdict}", style=VERDICT_STYLES.get(device.verdict, "bold"))
        if has_failed:
            least = smallest.total if smallest.low is None else smallest.low
            line.append(f", at least {format_size(least - device.available_bytes)} too much")
    yield line
    if result.fails_from is not None and not has_failed:
        has_gap = result.largest is not None and result.fails_from - result.largest > 1
        between = "; sizes in between are uncertain" if has_gap else ""
        yield Text(f"{result.fails_from:,} and more will not fit{between}.")


def cards_table(ranking: CardRanking, terminal: int | None = None) -> RenderableType:
    """Return the answer, and a row for each card."""
    report, best = ranking.report, ranking.best
    fitting = sum(each.verdict == "fits" for each in ranking.cards)
    if best is None:
        answer = Text("✘ fits none of the known cards", style=VERDICT_STYLES["does not fit"])
    else:
        answer = Text(f"✔ fits {fitting} of {len(ranking.cards)} known cards", style=VERDICT_STYLES["fits"])
        answer.append(f", with the least memory: {best.name}", style="not bold default")
    names = (Column(name, no_wrap=True) for name in ("Card", "--device"))
    verdict = Column("Verdict", no_wrap=True)
    rows = table(terminal, *names, figures("For TensorFlow"), figures("At most"), verdict)
    for card in ranking.cards:
        rows.add(card.name, card.key, card.available_bytes, card.high, verdict_text(card.verdict))
    return Group(answer, Text(asked_line(report), style="dim"), "", rows)


_REASON = 300  # characters


def many_table(
    found: EstimateTable, terminal: int | None = None, *, sort: str = "order", top: int | None = None
) -> RenderableType:
    """Return the answer, a row for each candidate, and the reasons of those that failed.

    Args:
        found: the candidates.
        terminal: columns of one, None for plain text.
        sort: "order", or "size" for the largest first.
        top: how many rows; None or 0 for all.
    """
    shown = list(found.candidates)
    if sort == "size":
        shown.sort(key=lambda each: -1 if each.report is None else each.report.peak, reverse=True)
    shown = shown[: top or None]
    names = list(dict.fromkeys(name for each in found.candidates for name in each.grid))
    varied = [Column(printable(name, 40), justify="right", overflow="fold") for name in names]
    sizes = map(figures, ("Parameters", "Needs", "At least", "At most"))
    rows = table(terminal, words("Model"), *varied, *sizes, "Method", "Verdict")
    for each in shown:
        rows.add(short_name(each.model, 60), *(_value(each.grid.get(name)) for name in names), *_cells(each))
    left = len(found.candidates) - len(shown)
    more = [Text(f"{left:,} more: --top 0 lists all", style="dim")] if left else []
    return Group(Text(str(found), style="bold"), "", rows, *more, *_reasons(found, names))


def _cells(candidate: Candidate) -> tuple[str | Text | int | None, ...]:
    row = candidate.row()
    parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
    method, verdict = printable(row["method"] or "–", 30), verdict_text(candidate.verdict or "–")
    return (parameters, row["total"], row["low"], row["high"], method, verdict)


def _value(value: object) -> Text:
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value), 40))


def _reasons(found: EstimateTable, names: list[str]) -> Iterator[Text]:
    """Yield a line for each reason, with those that it is the reason of."""
    told: dict[str, list[Candidate]] = {}
    for each in found.failed:
        told.setdefault(each.reason or "", []).append(each)
    for reason, failed in told.items():
        first = failed[0]
        settings = ", ".join(f"{name} {first.grid[name]}" for name in names)
        others = f" and {len(failed) - 1:,} more" if len(failed) > 1 else ""
        where = f"{short_name(first.model, 60)}{f' ({settings})' if settings else ''}{others}"
        yield Text(f"Failed: {printable(where, 200)}: {printable(reason, _REASON)}")
