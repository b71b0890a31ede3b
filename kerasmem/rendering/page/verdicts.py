"""The first lines of a page: does it fit; and the limit that its charts show."""

from __future__ import annotations

from collections.abc import Iterator

from kerasmem.estimation.report import verdict_on
from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.monitoring.phases import largest_known
from kerasmem.rendering.contents import PageContents, SavedReport
from kerasmem.rendering.escape import html_text
from kerasmem.rendering.layout import VERDICT_MARKS
from kerasmem.rendering.page.charts import Limit
from kerasmem.units import format_size

_MOST = 8
_CLOSE = 0.95  # of a card: what the driver takes beside may be the rest


def limit_of(contents: PageContents, log: LogSummary | None = None) -> Limit | None:
    """Return the memory available: of the card that a log names, or of the first device of an estimate.

    Args:
        contents: of the page.
        log: one of its logs, or None for a chart of several results, which takes the smallest card of all logs.
    """
    logs = contents.logs if log is None else (log,)
    cards = [run.driver_total_bytes for each in logs for run in each.runs if run.driver_total_bytes]
    if cards:
        return Limit(min(cards), "card")
    devices = (report.device for report in contents.reports if report.device is not None)
    return next((Limit(each.available_bytes, f"{each.name}, for TensorFlow") for each in devices), None)


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
