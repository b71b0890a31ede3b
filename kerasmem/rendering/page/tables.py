"""HTML tables: every number of a chart, to be read without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kerasmem.monitoring.digest import EpochSummary, LogSummary
from kerasmem.monitoring.merging import Training
from kerasmem.monitoring.phases import PhasePeaks
from kerasmem.rendering.composition import Composition
from kerasmem.rendering.page.contents import PageContents
from kerasmem.rendering.page.markup import attribute, text
from kerasmem.rendering.runs_table import growth_text, kept_rows, peak_place, run_name
from kerasmem.units import format_count, format_size

MOST_ROWS = 200


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Return a table that scrolls in itself where the window is narrow.

    Args:
        caption: plain text.
        head: names of the columns, plain text.
        rows: cells as HTML; the first of a row is its heading.
        words: columns beside the first that hold words rather than numbers.
    """
    lines = [
        f'<p class="caption">{text(caption)}</p>',
        f'<div class="scroll" tabindex="0" role="region" aria-label="{attribute(caption)}">',
        f'<table aria-label="{attribute(caption)}"><thead><tr>',
        *(f'<th scope="col"{_words(place, words)}>{text(name)}</th>' for place, name in enumerate(head)),
        "</tr></thead><tbody>",
    ]
    for row in rows:
        first, *others = row
        cells = "".join(f"<td{_words(place, words)}>{cell}</td>" for place, cell in enumerate(others, start=1))
        lines.append(f'<tr><th scope="row" class="words">{first}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _words(place: int, words: Sequence[int]) -> str:
    return ' class="words"' if place in words or place == 0 else ""


def folded(title: str, content: str, is_open: bool = False) -> str:
    """Return content that opens at a click."""
    return f"<details{' open' if is_open else ''}><summary>{text(title)}</summary>{content}</details>"


def size(count: int | None) -> str:
    """Return bytes for a cell; a dash where not known."""
    return "–" if count is None else format_size(count)


def runs(trainings: Sequence[Training]) -> str:
    """Return run beside run: peaks, means, growth."""
    kept, left_out = kept_rows(trainings, MOST_ROWS)
    rows = [
        (
            text(run_name(log, run)),
            size(run.peak_bytes),
            text(peak_place(run)),
            size(run.mean_in_use_bytes),
            growth_text(run.in_use_growth_bytes),
            size(run.driver_used_bytes),
            size(run.rss_bytes),
            size(run.mean_rss_bytes),
            growth_text(run.rss_growth_bytes),
            format_count(run.batches),
            f"{run.seconds:,.1f} s",
        )
        for log, run in kept
    ]
    head = (
        "Run", "Peak", "where", "Mean in use", "growth", "Card", "Host peak", "mean", "growth", "Batches", "Time",
    )  # fmt: skip
    return table("Runs: the largest, the mean, and the growth after warm-up", head, rows, words=(2,)) + _rest(
        left_out, "runs with smaller peaks; kerasmem report --json has them"
    )


def ranks(training: Training) -> str:
    """Return a row for each rank, and the largest of all first."""
    rows = [("<b>largest of all ranks</b>", *(_extreme(training, name) for name in _RANKED), "")]
    for log in training.logs:
        values = [
            max((v for run in log.runs if (v := getattr(run, name)) is not None), default=None) for name in _RANKED
        ]
        rows.append((f"rank {log.rank}", *map(size, values), text(log.name)))
    return table(f"Ranks of {training.name}", ("Rank", "Peak", "Reserved", "Card", "Host", "File"), rows, words=(5,))


_RANKED = ("peak_bytes", "reserved_bytes", "driver_used_bytes", "rss_bytes")


def _extreme(training: Training, name: str) -> str:
    extreme = training.extreme(name)
    if extreme is None:
        return "–"
    return f"<b>{size(extreme.bytes)}</b> (rank {extreme.rank})"


def epochs(log: LogSummary, span: tuple[int, int]) -> str:
    """Return the epochs of the runs in `span` (first and last), in order."""
    rows: list[EpochSummary] = [epoch for epoch in log.epochs if span[0] <= epoch.run <= span[1]]
    shown = [
        (
            f"run {epoch.run + 1}, epoch {epoch.epoch + 1}",
            size(epoch.peak_bytes),
            size(epoch.in_use_bytes),
            size(epoch.driver_used_bytes),
            size(epoch.rss_bytes),
            format_count(epoch.batches),
            f"{epoch.seconds:,.1f} s",
        )
        for epoch in rows[:MOST_ROWS]
    ]
    head = ("Epoch", "Peak", "In use", "Card", "Host", "Batches", "Time")
    return table("The largest sizes of each epoch", head, shown) + _rest(len(rows) - len(shown), "epochs")


def phases(found: Sequence[PhasePeaks]) -> str:
    """Return the largest sizes in each phase of training."""
    rows = [
        (
            text(peaks.phase or "between two phases"),
            size(peaks.rss_bytes),
            size(peaks.tree_bytes),
            size(peaks.swap_bytes),
            size(peaks.driver_used_bytes),
            format_count(peaks.readings),
        )
        for peaks in found[:MOST_ROWS]
    ]
    head = ("Phase", "Host process", "with its workers", "in swap", "Card", "Readings")
    return table("The largest sizes that background readings found in each phase", head, rows)


def categories(compositions: Sequence[Composition]) -> str:
    """Return what each peak is made of: a row a category, a column a report."""
    names = list(dict.fromkeys(name for each in compositions for name, _ in each.categories))
    rows = []
    for name in names[:MOST_ROWS]:
        parts = [dict(each.categories).get(name) for each in compositions]
        rows.append((text(name), *map(size, parts)))
    rows.append(("<b>total</b>", *(f"<b>{size(each.total)}</b>" for each in compositions)))
    head = ("Category", *(each.source for each in compositions))
    return table("The peak by category", head, rows)


def layers(one: Composition, other: Composition | None = None) -> str:
    """Return the layers of a report, largest first, beside those of another where one is given."""
    theirs = {} if other is None else {layer.name: layer.bytes for layer in other.layers}
    ours = {layer.name: layer.bytes for layer in one.layers}
    names = list(dict.fromkeys([*ours, *theirs]))
    names.sort(key=lambda name: -max(ours.get(name) or 0, theirs.get(name) or 0))
    classes = {layer.name: layer.class_name for each in (other, one) if each is not None for layer in each.layers}
    rows: list[Sequence[str]] = []
    for name in names[:MOST_ROWS]:
        cells = [text(name), text(classes[name]), size(ours.get(name))]
        if other is not None:
            cells += [size(theirs.get(name)), difference(ours.get(name), theirs.get(name))]
        rows.append(cells)
    rest: list[str] = ["no layer's", "", size(one.unnamed)]
    total = ["<b>total</b>", "", f"<b>{size(one.total)}</b>"]
    if other is not None:
        rest += [size(other.unnamed), difference(one.unnamed, other.unnamed)]
        total += [f"<b>{size(other.total)}</b>", difference(one.total, other.total)]
    head = ["Layer", "Class", "At the peak" if one.is_at_peak else "Share of the total"]
    if other is not None:
        head = ["Layer", "Class", "Estimated", "Measured", "Estimated − measured"]
    return table("The peak by layer, largest first", head, [*rows, rest, total], words=(1,)) + _rest(
        len(names) - MOST_ROWS, "layers"
    )


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
                claim = f"{size(estimate.low)} to {size(estimate.high)}"
                claim += ": holds" if estimate.low <= peak <= estimate.high else ": missed"
            rows.append(
                (
                    text(estimate.source),
                    size(estimate.total),
                    text(name),
                    size(peak),
                    difference(estimate.total, peak),
                    claim,
                )
            )
    head = ("Estimate", "Estimated", "Measured by", "Measured", "Estimated − measured", "Interval claimed")
    kept_rows_ = rows[:MOST_ROWS]
    return table("Estimated peaks beside measured ones", head, kept_rows_, words=(2,)) + _rest(
        len(rows) - len(kept_rows_), "pairs"
    )


def difference(one: int | None, other: int | None) -> str:
    """Return by how much one is larger than the other, and the share of the other."""
    if one is None or other is None:
        return "–"
    share = f" ({(one - other) / other:+.1%})" if other else ""
    return growth_text(one - other) + share


def _rest(count: int, what: str) -> str:
    return f'<p class="soft">and {count:,} more {text(what)}</p>' if count > 0 else ""
