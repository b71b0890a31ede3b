"""Shows the results of searches: the largest batch, cards, and many candidates."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.card_ranking import CardRanking
from kerasmem.estimation.many import Candidate, EstimateTable
from kerasmem.estimation.search import SearchResult
from kerasmem.rendering.formatting import VERDICT_STYLES, figures, note_lines, short_name, table, verdict_text, words
from kerasmem.rendering.peak_text import model_line, settings_line
from kerasmem.units import format_size, printable


def search_table(result: SearchResult, terminal: int | None = None) -> RenderableType:
    """Show the answer, the estimates, and the real steps that ran."""
    report = result.report
    model = f"{printable(report.model.name, 60)} · {settings_line(report.settings, with_batch=False)}"
    answer = [_answer_of_trials(result)] if result.trials else _answer(result)
    parts: list[RenderableType] = [*answer, Text(model, style="dim"), "", _evaluations(result, terminal)]
    if result.trials:
        parts += ["", _trials(result, terminal)]
    return Group(*parts, *note_lines(result.notes))


def _evaluations(result: SearchResult, terminal: int | None) -> Table:
    first = Column("batch size", justify="right", overflow="fold")
    sizes = map(figures, ("Needs", "At least", "At most"))
    rows = table(terminal, first, *sizes, Column("Verdict", no_wrap=True))
    for evaluation in result.evaluations:
        least = None if result.report.settings.stands_in else evaluation.low
        style = "bold" if evaluation.size == result.largest else None
        verdict = verdict_text(evaluation.verdict)
        rows.add(f"{evaluation.size:,}", evaluation.total, least, evaluation.high, verdict, style=style)
    return rows


def _trials(result: SearchResult, terminal: int | None) -> Table:
    rows = table(terminal, *map(figures, ("Real steps at", "Peak", "Limit")), Column("Outcome", no_wrap=True))
    for trial in sorted(result.trials, key=operator.attrgetter("size")):
        outcome = Text("ran", VERDICT_STYLES["fits"]) if trial.fits else Text("ran out", VERDICT_STYLES["does not fit"])
        style = "bold" if trial.size == result.largest else None
        rows.add(f"{trial.size:,}", trial.peak_bytes, trial.limit_bytes, outcome, style=style)
    return rows


def _device(result: SearchResult) -> Text:
    device = result.device
    return Text(f"{printable(device.name, 80)} ({format_size(device.available_bytes)} for TensorFlow): ")


def _answer_of_trials(result: SearchResult) -> Text:
    line = _device(result)
    if result.largest is None:
        smallest = min(trial.size for trial in result.trials)
        return line.append(f"batch size {smallest:,} ran out of memory", style=VERDICT_STYLES["does not fit"])
    peak = next((trial.peak_bytes for trial in result.trials if trial.size == result.largest), None)
    line.append(f"batch size {result.largest:,} ran", style=VERDICT_STYLES["fits"])
    return line if peak is None else line.append(f", {format_size(result.device.available_bytes - peak)} to spare")


def _answer(result: SearchResult) -> Iterator[Text]:
    device, line = result.device, _device(result)
    has_failed = device.verdict == "does not fit"
    if result.largest is not None:
        size = next(evaluation for evaluation in result.evaluations if evaluation.size == result.largest)
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
    """Show the answer, and a row for each card."""
    report, best = ranking.report, ranking.best
    fitting = sum(card.verdict == "fits" for card in ranking.cards)
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
    return Group(answer, Text(model_line(report), style="dim"), "", rows)


def many_table(result: EstimateTable, terminal: int | None = None, *, top: int | None = None) -> RenderableType:
    """Show the answer, a row for each candidate, and the reasons of failures.

    Args:
        result: the candidates.
        terminal: columns of a terminal, or None for plain text.
        top: number of rows to show. None or 0 shows all.
    """
    candidates = result.candidates[: top or None]
    names = list(dict.fromkeys(name for candidate in result.candidates for name in candidate.grid))
    settings = [Column(printable(name, 40), justify="right", overflow="fold") for name in names]
    sizes = map(figures, ("Parameters", "Needs", "At least", "At most"))
    rows = table(terminal, words("Model"), *settings, *sizes, "Method", "Verdict")
    for candidate in candidates:
        values = (_value(candidate.grid.get(name)) for name in names)
        rows.add(short_name(candidate.model, 60), *values, *_cells(candidate))
    omitted = len(result.candidates) - len(candidates)
    more = [Text(f"{omitted:,} more: --top 0 lists all", style="dim")] if omitted else []
    return Group(Text(str(result), style="bold"), "", rows, *more, *_reasons(result))


def _cells(candidate: Candidate) -> tuple[str | Text | int | None, ...]:
    row = candidate.row()
    parameters = "–" if row["parameters"] is None else f"{row['parameters']:,}"
    method, verdict = printable(row["method"] or "–", 30), verdict_text(candidate.verdict or "–")
    return (parameters, row["total"], row["low"], row["high"], method, verdict)


def _value(value: object) -> Text:
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else printable(str(value), 40))


def _reasons(result: EstimateTable) -> Iterator[Text]:
    """Yield a line for each reason, with the first candidate that failed for it."""
    reasons: dict[str, list[Candidate]] = {}
    for candidate in result.failed:
        reasons.setdefault(candidate.reason or "", []).append(candidate)
    for reason, (first, *others) in reasons.items():
        settings = ", ".join(f"{name} {value}" for name, value in first.grid.items())
        name = f"{short_name(first.model, 60)}{f' ({settings})' if settings else ''}"
        more = f" and {len(others):,} more" if others else ""
        yield Text(f"Failed: {printable(name + more, 200)}: {printable(reason, 300)}")
