"""HTML tables: every number of a chart, to be read without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kerasmem.monitoring.log_summary import EpochSummary, LogSummary
from kerasmem.monitoring.phases import PhasePeaks
from kerasmem.monitoring.rank_logs import TrainingLogs
from kerasmem.rendering.contents import Composition, PageContents
from kerasmem.rendering.escape import html_attribute, html_text
from kerasmem.rendering.layout import growth, known_size
from kerasmem.rendering.runs_table import kept_rows, peak_place, run_name
from kerasmem.units import format_count

MOST_ROWS = 200


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Return a table; in a narrow window each row becomes a card, so each cell has its column's name.

    Args:
        caption: plain text.
        head: names of the columns, plain text.
        rows: cells as HTML; the first of a row is its heading.
        words: columns beside the first that hold words rather than numbers.
    """
    lines = [
        f'<p class="caption">{html_text(caption)}</p>',
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_attribute(caption)}">',
        f'<table aria-label="{html_attribute(caption)}"><thead><tr>',
        *(f'<th scope="col"{_words(place, words)}>{html_text(name)}</th>' for place, name in enumerate(head)),
        "</tr></thead><tbody>",
    ]
    names = [html_attribute(name) for name in head]
    for first, *others in rows:
        cells = "".join(
            f'<td{_words(place, words)} data-name="{names[place]}"><span>{cell}</span></td>'
            for place, cell in enumerate(others, start=1)
        )
        lines.append(f'<tr><th scope="row" class="words">{first}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _words(place: int, words: Sequence[int]) -> str:
    return ' class="words"' if place in words or place == 0 else ""


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Return content that opens at a click."""
    return f"<details{' open' if is_open else ''}><summary>{html_text(title)}</summary>{content}</details>"


def runs(trainings: Sequence[TrainingLogs]) -> str:
    """Return run beside run: peaks, means, growth."""
    kept, left_out = kept_rows(trainings, MOST_ROWS)
    rows = [
        (
            html_text(run_name(log, run)),
            known_size(run.peak_bytes),
            html_text(peak_place(run)),
            known_size(run.mean_in_use_bytes),
            growth(run.in_use_growth_bytes),
            *_sizes(run, "driver_used_bytes", "rss_bytes", "mean_rss_bytes"),
            growth(run.rss_growth_bytes),
            *_length(run),
        )
        for log, run in kept
    ]
    sizes = ("Peak", "where", "Mean in use", "growth", "Card", "Host peak", "mean", "growth")
    caption = "Runs: the largest, the mean, and the growth after warm-up"
    rest = _rest(left_out, "runs with smaller peaks; kerasmem report --json has them")
    return table(caption, ("Run", *sizes, "Batches", "Time"), rows, words=(2,)) + rest


def ranks(training: TrainingLogs) -> str:
    """Return a row for each rank, and the largest of all first."""
    rows = [("<b>largest of all ranks</b>", *(_extreme(training, name) for name in _RANKED), "")]
    for log in training.logs:
        found = ([size for run in log.runs if (size := getattr(run, name)) is not None] for name in _RANKED)
        rows.append(
            (f"rank {log.rank}", *(known_size(max(sizes, default=None)) for sizes in found), html_text(log.name))
        )
    return table(f"Ranks of {training.name}", ("Rank", "Peak", "Reserved", "Card", "Host", "File"), rows, words=(5,))


_RANKED = ("peak_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes")


def _extreme(training: TrainingLogs, name: str) -> str:
    extreme = training.largest(name)
    return "–" if extreme is None else f"<b>{known_size(extreme.bytes)}</b> (rank {extreme.rank})"


def _sizes(each: Any, *names: str) -> list[str]:
    return [known_size(getattr(each, name)) for name in names]


def _length(each: Any) -> tuple[str, str]:
    return format_count(each.batches), f"{each.seconds:,.1f} s"


def epochs(log: LogSummary, span: tuple[int, int]) -> str:
    """Return the epochs of the runs in `span` (first and last), in order."""
    rows: list[EpochSummary] = [epoch for epoch in log.epochs if span[0] <= epoch.run <= span[1]]
    sizes = ("peak_bytes", "in_use_bytes", "driver_used_bytes", "rss_bytes")
    shown = [
        (f"run {epoch.run + 1}, epoch {epoch.epoch + 1}", *_sizes(epoch, *sizes), *_length(epoch))
        for epoch in rows[:MOST_ROWS]
    ]
    head = ("Epoch", "Peak", "In use", "Card", "Host", "Batches", "Time")
    return table("The largest sizes of each epoch", head, shown) + _rest(len(rows) - len(shown), "epochs")


def phases(found: Sequence[PhasePeaks]) -> str:
    """Return the largest sizes in each phase of training."""
    sizes = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")
    rows = [
        (html_text(each.phase or "between two phases"), *_sizes(each, *sizes), format_count(each.readings))
        for each in found[:MOST_ROWS]
    ]
    head = ("Phase", "Host process", "with its workers", "in swap", "Card", "Readings")
    return table("The largest sizes that background readings found in each phase", head, rows)


def categories(compositions: Sequence[Composition]) -> str:
    """Return what each peak is made of: a row a category, a column a report."""
    names = list(dict.fromkeys(name for each in compositions for name, _ in each.categories))
    rows = [
        (html_text(name), *(known_size(dict(each.categories).get(name)) for each in compositions))
        for name in names[:MOST_ROWS]
    ]
    rows.append(("<b>total</b>", *(f"<b>{known_size(each.total)}</b>" for each in compositions)))
    head = ("Category", *(each.source for each in compositions))
    return table("The peak by category", head, rows)


def layers(one: Composition, other: Composition | None = None) -> str:
    """Return the layers of a report, largest first, beside those of another where one is given."""
    theirs = {} if other is None else {layer.name: layer.bytes for layer in other.layers}
    ours = {layer.name: layer.bytes for layer in one.layers}
    names = list(dict.fromkeys([*ours, *theirs]))
    names.sort(key=lambda name: -max(ours.get(name) or 0, theirs.get(name) or 0))
    classes = {layer.name: layer.class_name for each in (other, one) if each is not None for layer in each.layers}

    def sizes(own: int | None, others: int | None) -> list[str]:
        return [known_size(own), *([] if other is None else [known_size(others), difference(own, others)])]

    rows = [
        [html_text(name), html_text(classes[name]), *sizes(ours.get(name), theirs.get(name))]
        for name in names[:MOST_ROWS]
    ]
    rest, total = (None, None) if other is None else (other.unnamed, other.total)
    rows.append(["no layer's", "", *sizes(one.unnamed, rest)])
    first, *last = sizes(one.total, total)
    rows.append(["<b>total</b>", "", f"<b>{first}</b>", *(f"<b>{cell}</b>" for cell in last[:1]), *last[1:]])
    head = ["Layer", "Class", "At the peak" if one.is_at_peak else "Share of the total"]
    if other is not None:
        head = ["Layer", "Class", "Estimated", "Measured", "Estimated − measured"]
    left_out = _rest(len(names) - MOST_ROWS, "layers")
    return table("The peak by layer, largest first", head, rows, words=(1,)) + left_out


def beside_measured(contents: PageContents) -> str:
    """Return each estimate's total beside each measured peak."""
    measured = [(each.source, each.total) for each in contents.profiles]
    kept, _ = kept_rows(contents.trainings, 20)
    measured += [(run_name(log, run), run.peak_bytes) for log, run in kept if run.peak_bytes is not None]
    rows = []
    for estimate in contents.estimates:
        for name, peak in measured:
            claim = "–"
            if estimate.low is not None and estimate.high is not None:
                holds = '<b class="does-not-fit">missed</b>' if misses(estimate, peak) else "holds"
                least = estimate.lower_end
                ends = "at most" if least is None else f"{known_size(least)} to"
                claim = f"{ends} {known_size(estimate.high)}: {holds}"
            sizes = (known_size(estimate.total), html_text(name), known_size(peak))
            rows.append((html_text(estimate.source), *sizes, difference(estimate.total, peak), claim))
    head = ("Estimate", "Estimated", "Measured by", "Measured", "Estimated − measured", "Interval claimed")
    rest = _rest(len(rows) - MOST_ROWS, "pairs")
    return table("Estimated peaks beside measured ones", head, rows[:MOST_ROWS], words=(2,)) + rest


def misses(estimate: Composition, peak: int) -> bool:
    """Return whether a measured peak lies outside the interval that an estimate claims."""
    return estimate.low is not None and estimate.high is not None and not estimate.low <= peak <= estimate.high


def difference(one: int | None, other: int | None) -> str:
    """Return by how much one is larger than the other, and the share of the other."""
    if one is None or other is None:
        return "–"
    share = f" ({(one - other) / other:+.1%})" if other else ""
    return growth(one - other) + share


def _rest(count: int, what: str) -> str:
    return f'<p class="soft">and {count:,} more {html_text(what)}</p>' if count > 0 else ""
