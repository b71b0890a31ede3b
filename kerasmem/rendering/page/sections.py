"""The sections of a page in order: verdicts, runs, memory over time, composition, estimate beside measured, notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kerasmem.estimation.report import verdict_on
from kerasmem.monitoring.log_summary import LogSummary, RunSummary
from kerasmem.monitoring.phases import PhasePeaks, largest_known
from kerasmem.rendering.contents import PageContents, SavedReport
from kerasmem.rendering.escape import html_attribute, html_text
from kerasmem.rendering.layout import VERDICT_MARKS, known_size, signed_share, signed_size
from kerasmem.rendering.page.charts import Bar, Limit, bars, over_time, stacked
from kerasmem.rendering.peak_text import asked_line
from kerasmem.rendering.run_tables import RUN_COLUMNS, kept_runs, run_name, run_rows
from kerasmem.units import format_count, format_size

_MOST = 8
_CLOSE = 0.95  # of a card: what the driver takes beside may be the rest


def limit_of(contents: PageContents, log: LogSummary | None = None) -> Limit | None:
    """Return the memory available: of the card that a log names, or of the first device of an estimate.

    Args:
        contents: of the page.
        log: one of its logs, or None for a chart of several results, which takes the smallest card of all logs.
    """
    logs = contents.logs if log is None else (log,)
    cards = [run.driver_total_bytes for one in logs for run in one.runs if run.driver_total_bytes]
    if cards:
        return Limit(min(cards), "card")
    devices = (report.device for report in contents.reports if report.device is not None)
    return next((Limit(device.available_bytes, f"{device.name}, for TensorFlow") for device in devices), None)


def verdicts(contents: PageContents) -> str:
    """Return the first lines of the page, the most important first."""
    lines = [_of_report(report) for report in contents.reports if report.device is not None]
    lines += _of_logs(contents)
    if not any(report.device for report in contents.reports) and limit_of(contents) is None:
        lines.append("No device was named: <code>kerasmem estimate MODEL --device t4 --json</code> adds a verdict.")
    rest = f'<p class="soft">and {len(lines) - _MOST} more</p>' if len(lines) > _MOST else ""
    return "\n".join(f'<p class="verdict">{line}</p>' for line in lines[:_MOST]) + rest


def _of_report(saved: SavedReport) -> str:
    device = saved.device
    if device is None:
        return ""
    kind = device.verdict.replace(" ", "-") if device.verdict in VERDICT_MARKS else ""
    needs = f"{'took' if saved.is_measured else 'needs'} {format_size(saved.total)}"
    most = f", at most {format_size(saved.high)}" if saved.high and not saved.is_measured else ""
    verdict = f"{VERDICT_MARKS.get(device.verdict, '?')} {verdict_on(device.verdict, device.name)}"
    line = f'<b class="{kind}">{html_text(verdict, 120)}</b>: {html_text(saved.report.model.name, 60)}'
    return f"{line} {needs}{most}, of {format_size(device.available_bytes)}"


def _of_logs(contents: PageContents) -> Iterator[str]:
    for log in contents.logs:
        limit = limit_of(contents, log)
        card = largest_known(run.driver_used_bytes for run in log.runs)
        most = next((size for size in (card, log.peak_bytes, log.rss_bytes) if size is not None), None)
        if most is None:
            continue
        of, kind = "", ""
        if limit is not None and (card is not None or log.peak_bytes is not None):
            kind = "does-not-fit" if most > limit.bytes else "fits"
            if _CLOSE * limit.bytes < most <= limit.bytes:
                kind = "too-close-to-call"
            share = f"{most / limit.bytes:.0%}".replace("%", " %") if limit.bytes else "–"
            of = f", {share} of {format_size(limit.bytes)} ({html_text(limit.name, 60)})"
        yield f'{html_text(log.name, 80)}: at most <b class="{kind}">{format_size(most)}</b>{of}'


_MOST_LAYERS = 20
_MOST_CHARTS = 16  # of runs over time
_MOST_BARS = 24
_MOST_NOTES = 40
_MOST_ROWS = 200


def sections(contents: PageContents) -> Iterator[str]:
    """Yield the HTML of each section that the contents call for."""
    parts = (_runs, _time, _composition, _beside, _notes)
    yield from filter(None, ("\n".join(part(contents)) for part in parts))


def _runs(contents: PageContents) -> Iterator[str]:
    kept, _ = kept_runs(contents.logs, _MOST_BARS)
    if not kept:
        return
    yield "<h2>Run beside run</h2>"
    if len(kept) > 1:
        names = [run_name(log, run) for log, run in kept]
        series = _largest_sizes([run for _, run in kept])
        yield bars("The largest sizes of each run", names, series, limit=limit_of(contents))
    rows, left_out = run_rows(contents.logs)
    yield _table("Runs: the largest, the mean, and the growth after warm-up", RUN_COLUMNS, rows, words=(0, 2))
    yield _rest(left_out, "runs with smaller peaks; kerasmem report --json has them")
    yield (
        '<p class="soft">Growth is the median of the last fifth less that of the second fifth: what came on top '
        "once the run had warmed up.</p>"
    )


def _largest_sizes(runs: Sequence[RunSummary]) -> dict[str, list[Bar]]:
    series = {
        "allocator peak": [Bar(run.peak_bytes) for run in runs],
        "host process": [Bar(run.rss_bytes) for run in runs],
    }
    return {name: column for name, column in series.items() if any(bar.bytes is not None for bar in column)}


def _time(contents: PageContents) -> Iterator[str]:
    stretches = [(log, stretch) for log in contents.logs for stretch in log.curves if stretch.lines]
    if not stretches:
        return
    yield "<h2>Memory over time</h2>"
    for log, stretch in stretches[:_MOST_CHARTS]:
        first, last = stretch.runs
        which = "" if len(log.runs) < 2 else f", run {first + 1}" + (f" to {last + 1}" if last > first else "")
        yield f"<h3>{html_text(log.name)}{which}</h3>"
        caption = "Dotted lines are where epochs begin."
        if any(len(line.values) < line.readings for line in stretch.lines):
            readings = max(line.readings for line in stretch.lines)
            caption += f" {readings:,} readings, thinned; each stretch keeps its largest and least."
        yield over_time(stretch, caption, limit_of(contents, log))
        yield _folded("Epoch by epoch, as a table", _epochs(log, stretch.runs))
        if log.phases and stretch is log.curves[0]:
            yield _folded("Phase by phase, as a table", _phases(log.phases))
    yield _rest(len(stretches) - _MOST_CHARTS, "stretches of time are in the table of runs")


def _epochs(log: LogSummary, span: tuple[int, int]) -> str:
    sizes = ("peak_bytes", "in_use_bytes", "driver_used_bytes", "rss_bytes")
    rows = [
        (
            f"run {epoch.run + 1}, epoch {epoch.epoch + 1}",
            *(known_size(getattr(epoch, size)) for size in sizes),
            format_count(epoch.batches),
            f"{epoch.seconds:,.1f} s",
        )
        for epoch in log.epochs
        if span[0] <= epoch.run <= span[1]
    ]
    head = ("Epoch", "Peak", "In use", "Card", "Host", "Batches", "Time")
    return _table("The largest sizes of each epoch", head, rows[:_MOST_ROWS]) + _rest(len(rows) - _MOST_ROWS, "epochs")


def _phases(phases: Sequence[PhasePeaks]) -> str:
    sizes = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")
    rows = [
        (
            peaks.phase or "between two phases",
            *(known_size(getattr(peaks, size)) for size in sizes),
            format_count(peaks.readings),
        )
        for peaks in phases[:_MOST_ROWS]
    ]
    head = ("Phase", "Host process", "with its workers", "in swap", "Card", "Readings")
    return _table("The largest sizes of background readings in each phase", head, rows)


def _composition(contents: PageContents) -> Iterator[str]:
    reports = contents.reports[:_MOST_BARS]
    if not reports:
        return
    yield "<h2>What the peak is made of</h2>"
    if any(report.categories for report in reports):
        parts = {report.source: report.categories for report in reports}
        yield stacked("The peak by category", parts, limit_of(contents))
        names = list(dict.fromkeys(name for report in reports for name in report.categories))
        rows = [(name, *(known_size(report.categories.get(name)) for report in reports)) for name in names]
        rows.append(("total", *(known_size(report.total) for report in reports)))
        head = ("Category", *(report.source for report in reports))
        yield _folded("By category, as a table", _table("The peak by category", head, rows))
    for report in reports:
        yield f"<h3>{html_text(report.source)}</h3><p>{html_text(asked_line(report.report))}</p>"
        if report.layers:
            yield from _layers(report)
        else:
            yield "<p>This method does not divide the peak by layer.</p>"


def _layers(report: SavedReport) -> Iterator[str]:
    """Yield a chart of the largest layers, and the table of all."""
    kind = "What each layer holds at the peak" if report.is_at_peak else "Each layer’s share of the total"
    names = list(report.layers)
    largest = {"bytes": [Bar(report.layers[name]) for name in names[:_MOST_LAYERS]]}
    yield bars(f"{kind}, the largest of {len(report.report.layers)} layers", names[:_MOST_LAYERS], largest)
    classes = {layer.name: layer.class_name for layer in report.report.layers}
    rest = max(0, report.total - sum(report.layers.values()))
    rows = [(name, classes[name], report.layers[name]) for name in names[:_MOST_ROWS]]
    rows += [("no layer's", "", rest), ("total", "", report.total)]
    cells = [(name, kind, known_size(size)) for name, kind, size in rows]
    table = _table("The peak by layer, the largest first", ("Layer", "Class", "Bytes"), cells, words=(0, 1))
    yield _folded("By layer, as a table", table + _rest(len(names) - _MOST_ROWS, "layers"))


def _beside(contents: PageContents) -> Iterator[str]:
    kept, _ = kept_runs(contents.logs, _MOST_BARS)
    measured = {report.source: report.total for report in contents.measured[:_MOST_BARS]}
    measured.update((run_name(log, run), run.peak_bytes) for log, run in kept if run.peak_bytes is not None)
    estimates = contents.estimates[:_MOST_BARS]
    if not estimates or not measured:
        return
    yield "<h2>Estimated beside measured</h2>"
    estimated = [
        Bar(
            report.total,
            report.lower_end or report.total,
            report.high,
            any(_misses(report, peak) for peak in measured.values()),
        )
        for report in estimates
    ]
    series = {
        "estimated": [*estimated, *[Bar(None)] * len(measured)],
        "measured": [*[Bar(None)] * len(estimated), *map(Bar, measured.values())],
    }
    caption = "Peaks. The thin line is the interval that the estimate claims: red if a measured peak lies outside."
    names = [*(report.source for report in estimates), *measured]
    yield bars(caption, names, series, limit=limit_of(contents), roles=("c0", "c1"))
    rows = [_pair(estimate, name, peak) for estimate in estimates for name, peak in measured.items()]
    head = ("Estimate", "Estimated", "Measured by", "Measured", "Difference", "Interval claimed")
    yield _table("Estimated peaks beside measured ones", head, rows[:_MOST_ROWS], words=(0, 2))
    yield _rest(len(rows) - _MOST_ROWS, "pairs")


def _pair(estimate: SavedReport, name: str, peak: int) -> tuple[str, ...]:
    claim = "–"
    if estimate.report.bytes.low is not None and estimate.high is not None:
        least = estimate.lower_end
        ends = "at most" if least is None else f"{known_size(least)} to"
        claim = f"{ends} {known_size(estimate.high)}: {'✘ missed' if _misses(estimate, peak) else 'holds'}"
    sizes = (known_size(estimate.total), name, known_size(peak))
    return (estimate.source, *sizes, _difference(estimate.total, peak), claim)


def _misses(estimate: SavedReport, peak: int) -> bool:
    low, high = estimate.report.bytes.low, estimate.high
    return low is not None and high is not None and not low <= peak <= high


def _notes(contents: PageContents) -> Iterator[str]:
    lines = [f"{log.name}: {note}" for log in contents.logs for note in log.notes]
    for saved in contents.reports:
        lines += [f"{saved.source}: {note}" for note in saved.report.notes]
        items = (item if isinstance(item, dict) else vars(item) for item in saved.report.unmodelled)
        lines += [f"{saved.source}, not in the total: {item['what']}: {item['why']}" for item in items]
    if lines:
        items_shown = "".join(f"<li>{html_text(line, 600)}</li>" for line in lines[:_MOST_NOTES])
        rest = _rest(len(lines) - _MOST_NOTES, "notes")
        yield _folded(f"What the figures leave out ({len(lines)} notes)", f"<ul>{items_shown}</ul>{rest}")


# ------------------------------------------------------------------ tables


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Return a table. On a phone each row becomes a card, so each cell has its column's name.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: cells as plain text; the first of a row is its heading.
        words: columns that hold words rather than numbers.
    """
    look = ['class="words"' if place in words else "" for place in range(len(head))]
    lines = [
        f'<p class="caption">{html_text(caption)}</p>',
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_attribute(caption)}">',
        f'<table aria-label="{html_attribute(caption)}"><thead><tr>',
        *(f'<th scope="col" {style}>{html_text(name)}</th>' for name, style in zip(head, look, strict=True)),
        "</tr></thead><tbody>",
    ]
    names = [html_attribute(name) for name in head]
    for first, *others in rows:
        cells = "".join(
            f'<td data-name="{name}" {style}><span>{html_text(cell) if cell else ""}</span></td>'
            for name, style, cell in zip(names[1:], look[1:], others, strict=True)
        )
        lines.append(f'<tr><th scope="row" class="words">{html_text(first)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _folded(title: str, content: str) -> str:
    """Return content that opens at a click."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"


def _difference(one: int, other: int) -> str:
    """Return one less the other, and that as a share of the other."""
    return signed_size(one - other) + signed_share(one - other, other)


def _rest(count: int, what: str) -> str:
    return f'<p class="soft">and {count:,} more {html_text(what)}</p>' if count > 0 else ""
