"""Renders a report as one HTML page without scripts: verdicts, charts, and a table for each chart.

The page needs no network, and its content security policy allows none.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from string import Template

import kerasmem
from kerasmem.estimation.report import verdict_on
from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.monitoring.timeline import PhasePeaks, largest_known
from kerasmem.rendering.charts import Limit, bars, over_time
from kerasmem.rendering.formatting import (
    VERDICT_MARKS,
    html_attribute,
    html_text,
    known_size,
    signed_share,
    signed_size,
)
from kerasmem.rendering.peak_text import model_line
from kerasmem.rendering.report_contents import RUN_COLUMNS, PageContents, SavedReport, run_name, run_rows
from kerasmem.units import format_size

_POLICY = "default-src 'none'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"


def render_page(contents: PageContents) -> str:
    """Return the page as HTML, about 30 KB and 10 KB for each line of a chart."""
    style = _file("page.css")
    names = [*(log.name for log in contents.logs), *(report.source for report in contents.reports)]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Template(_file("page.html")).substitute(
        policy=_POLICY.format(style=_hash(style)),
        title=html_attribute(contents.title),
        style=style,
        heading=html_text(contents.title),
        verdicts=verdicts(contents),
        sources=", ".join(html_text(name, 80) for name in names[:8]) + more,
        body="\n".join(f"<section>{section}</section>" for section in sections(contents)),
        version=html_attribute(kerasmem.__version__),
    )


@cache
def _file(name: str) -> str:
    return files("kerasmem.rendering").joinpath(f"data/{name}").read_text(encoding="utf-8")


def _hash(style: str) -> str:
    """Return the hash of a style for the policy. Browsers read every line end as a line feed."""
    digest = hashlib.sha256(style.replace("\r\n", "\n").replace("\r", "\n").encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


_MOST_LINES = 8  # of verdicts
_MOST_CHARTS = 16  # of runs over time
_MOST_BARS = 20
_MOST_NOTES = 40
_MOST_ROWS = 200


def limit_of(contents: PageContents, log: LogSummary | None = None) -> Limit | None:
    """Return the memory of a log's card, or of the first device of an estimate.

    Args:
        contents: of the page.
        log: one of its logs, or None for a chart of several results, which takes the smallest card of all logs.
    """
    logs = contents.logs if log is None else (log,)
    cards = [run.driver_total_bytes for one in logs for run in one.runs if run.driver_total_bytes]
    if cards:
        return Limit(min(cards), "card")
    devices = (getattr(saved.report, "device", None) for saved in contents.reports)
    return next((Limit(device.available_bytes, f"{device.name}, for TensorFlow") for device in devices if device), None)


def verdicts(contents: PageContents) -> str:
    """Return the first lines of the page, the most important first."""
    lines = [*_of_reports(contents), *_of_logs(contents)]
    if limit_of(contents) is None:
        lines.append("No verdict without a device: <code>kerasmem estimate MODEL --device t4 --json</code> adds one.")
    paragraphs = "\n".join(f'<p class="verdict">{line}</p>' for line in lines[:_MOST_LINES])
    return paragraphs + _rest(len(lines) - _MOST_LINES, "")


def _of_reports(contents: PageContents) -> Iterator[str]:
    for saved in contents.reports:
        device, need = getattr(saved.report, "device", None), saved.report.bytes
        if device is None:
            continue
        kind = device.verdict.replace(" ", "-") if device.verdict in VERDICT_MARKS else ""
        needs = f"{'took' if saved.is_measured else 'needs'} {format_size(need.total)}"
        most = f", at most {format_size(need.high)}" if need.high and not saved.is_measured else ""
        verdict = f"{VERDICT_MARKS.get(device.verdict, '?')} {verdict_on(device.verdict, device.name)}"
        line = f'<b class="{kind}">{html_text(verdict, 120)}</b>: {html_text(saved.report.model.name, 60)}'
        yield f"{line} {needs}{most}, of {format_size(device.available_bytes)}"


def _of_logs(contents: PageContents) -> Iterator[str]:
    for log in contents.logs:
        limit = limit_of(contents, log)
        on_device = largest_known(run.driver_used_bytes for run in log.runs) or log.peak_bytes
        of = ""
        if limit and on_device:
            share = f"{on_device / limit.bytes:.0%}".replace("%", " %")
            of = f", {share} of {format_size(limit.bytes)} ({html_text(limit.name, 60)})"
        if most := on_device or log.rss_bytes:
            yield f"{html_text(log.name, 80)}: at most <b>{format_size(most)}</b>{of}"


def sections(contents: PageContents) -> Iterator[str]:
    """Yield the HTML of each section with content."""
    parts = (_runs, _time, _composition, _beside, _notes)
    yield from filter(None, ("\n".join(part(contents)) for part in parts))


def _runs(contents: PageContents) -> Iterator[str]:
    rows, left_out = run_rows(contents.logs)
    if not rows:
        return
    yield "<h2>Runs</h2>"
    runs = [(log, run) for log in contents.logs for run in log.runs][:_MOST_BARS]
    if len(runs) > 1:
        peaks = {run_name(log, run): {"allocator peak": run.peak_bytes or 0} for log, run in runs}
        yield bars("Peak of each run", peaks, limit_of(contents))
    yield _table("Peak, mean and growth of each run", RUN_COLUMNS, rows, words=(0, 2))
    yield _rest(left_out, "runs; kerasmem report --json has them")
    yield (
        '<p class="soft">Growth is the median of the last fifth of the batches minus that of the second fifth. '
        "The first fifth is the warm-up.</p>"
    )


def _time(contents: PageContents) -> Iterator[str]:
    stretches = [(log, stretch) for log in contents.logs for stretch in log.curves if stretch.lines]
    if not stretches:
        return
    yield "<h2>Memory over time</h2>"
    for log, stretch in stretches[:_MOST_CHARTS]:
        first, last = stretch.runs
        runs = "" if len(log.runs) < 2 else f", run {first + 1}" + (f" to {last + 1}" if last > first else "")
        yield f"<h3>{html_text(log.name)}{runs}</h3>"
        yield over_time(stretch, "Dotted lines mark the start of epochs.", limit_of(contents, log))
        if log.phases and stretch is log.curves[0]:
            yield _details("Table of phases", _phases(log.phases))
    yield _rest(len(stretches) - _MOST_CHARTS, "stretches of time")


def _phases(phases: Sequence[PhasePeaks]) -> str:
    sizes = ("rss_bytes", "tree_bytes", "swap_bytes", "driver_used_bytes")
    rows = [
        (peaks.phase or "between two readings", *(known_size(getattr(peaks, size)) for size in sizes))
        for peaks in phases[:_MOST_ROWS]
    ]
    head = ("Phase", "Host process", "With workers", "In swap", "Card")
    return _table("Largest background readings in each phase", head, rows)


def _composition(contents: PageContents) -> Iterator[str]:
    reports = contents.reports[:_MOST_BARS]
    if not reports:
        return
    yield "<h2>Composition of the peak</h2>"
    parts = {saved.source: _categories(saved) for saved in reports}
    names = list(dict.fromkeys(name for sizes in parts.values() for name in sizes))
    if names:
        yield bars("Peak by category", parts, limit_of(contents))
        rows = [(name, *(known_size(sizes.get(name)) for sizes in parts.values())) for name in names]
        rows.append(("total", *(known_size(saved.report.bytes.total) for saved in reports)))
        yield _details("Table of categories", _table("Peak by category", ("Category", *parts), rows))
    for saved in reports:
        yield f"<h3>{html_text(saved.source)}</h3><p>{html_text(model_line(saved.report))}</p>"
        yield from _layers(saved)


def _categories(saved: SavedReport) -> dict[str, int]:
    """Return the parts of the peak that are not empty."""
    need = saved.report.bytes
    parts = {name: getattr(need, name) for name in need.CATEGORIES}
    return {name: size for name, size in parts.items() if size}


def _layers(saved: SavedReport) -> Iterator[str]:
    """Yield a chart of the largest layers, and a table of all layers with memory."""
    layers = sorted((layer for layer in saved.report.layers if layer.bytes), key=lambda layer: -(layer.bytes or 0))
    if not layers:
        yield "<p>This method does not divide the peak by layer.</p>"
        return
    largest = {layer.name: {"bytes": layer.bytes or 0} for layer in layers[:_MOST_BARS]}
    yield bars(f"Largest of {len(saved.report.layers)} layers", largest)
    total = saved.report.bytes.total
    rest = max(0, total - sum(layer.bytes or 0 for layer in layers))
    rows = [(layer.name, layer.class_name, known_size(layer.bytes)) for layer in layers[:_MOST_ROWS]]
    rows += [("no single layer", "", known_size(rest)), ("total", "", known_size(total))]
    table = _table("Peak by layer, the largest first", ("Layer", "Class", "Bytes"), rows, words=(0, 1))
    yield _details("Table of layers", table + _rest(len(layers) - _MOST_ROWS, "layers"))


def _beside(contents: PageContents) -> Iterator[str]:
    measured = [(saved.source, saved.report.bytes.total) for saved in contents.reports if saved.is_measured]
    runs = ((log, run) for log in contents.logs for run in log.runs)
    measured += [(run_name(log, run), run.peak_bytes) for log, run in runs if run.peak_bytes is not None]
    estimates = [saved for saved in contents.reports if not saved.is_measured]
    rows = [_pair(estimate, name, peak) for estimate in estimates for name, peak in measured]
    if rows:
        yield "<h2>Estimates and measurements</h2>"
        sizes = {saved.source: {"estimated": saved.report.bytes.total} for saved in estimates[:_MOST_BARS]}
        sizes.update((name, {"measured": peak}) for name, peak in measured[:_MOST_BARS])
        yield bars("Peaks", sizes, limit_of(contents))
        head = ("Estimate", "Estimated", "Measurement", "Measured", "Difference", "Interval")
        yield _table("Estimated and measured peaks", head, rows[:_MOST_ROWS], words=(0, 2))
        yield _rest(len(rows) - _MOST_ROWS, "pairs")


def _pair(estimate: SavedReport, name: str, peak: int) -> tuple[str, ...]:
    need, claim = estimate.report.bytes, "–"
    if need.low is not None and need.high is not None:
        ends = "at most" if estimate.low is None else f"{known_size(estimate.low)} to"
        result = "✔ inside" if need.low <= peak <= need.high else "✘ outside"
        claim = f"{ends} {known_size(need.high)}: {result}"
    change = need.total - peak
    difference = signed_size(change) + signed_share(change, peak)
    return (estimate.source, known_size(need.total), name, known_size(peak), difference, claim)


def _notes(contents: PageContents) -> Iterator[str]:
    lines = [f"{log.name}: {note}" for log in contents.logs for note in log.notes]
    for saved in contents.reports:
        lines += [f"{saved.source}: {note}" for note in saved.report.notes]
        items = (item if isinstance(item, dict) else vars(item) for item in saved.report.unmodelled)
        lines += [f"{saved.source}, not in the total: {item['what']}: {item['why']}" for item in items]
    if lines:
        items_shown = "".join(f"<li>{html_text(line, 600)}</li>" for line in lines[:_MOST_NOTES])
        rest = _rest(len(lines) - _MOST_NOTES, "notes")
        yield _details(f"Notes ({len(lines)})", f"<ul>{items_shown}</ul>{rest}")


# ------------------------------------------------------------------ tables


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Return a table. On a phone each row is a card, so each cell has the name of its column.

    Args:
        caption: text above the table.
        head: names of the columns.
        rows: cells as plain text. The first cell is the heading of the row.
        words: indices of columns with words instead of numbers.
    """
    look = ['class="words"' if number in words else "" for number in range(len(head))]
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


def _details(title: str, content: str) -> str:
    """Return content that opens on a click."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"


def _rest(count: int, nouns: str) -> str:
    return f'<p class="soft">and {count:,} more {html_text(nouns)}</p>' if count > 0 else ""
