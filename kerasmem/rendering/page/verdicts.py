"""What the page says first: does it fit; and the limit that its charts show."""

from __future__ import annotations

from collections.abc import Iterator

from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.monitoring.phases import largest_known
from kerasmem.rendering.contents import Composition, PageContents
from kerasmem.rendering.escape import html_text
from kerasmem.rendering.layout import VERDICT_MARKS
from kerasmem.rendering.page.charts import Limit
from kerasmem.units import format_size

_MOST = 8
_CLOSE = 0.95  # of a card: what the driver takes beside may be the rest


def limit_of(contents: PageContents, log: LogSummary | None = None) -> Limit | None:
    """Return how much there is: the card that a log names, or else the device of the first estimate that names one.

    Args:
        contents: of the page.
        log: one of its logs; None for a chart of several results, which takes the smallest card of all logs.
    """
    logs = contents.logs if log is None else (log,)
    cards = [run.driver_total_bytes for each in logs for run in each.runs if run.driver_total_bytes]
    if cards:
        return Limit(min(cards), "card")
    named = (each for each in contents.compositions if each.limit is not None and each.device is not None)
    return next((Limit(each.limit or 0, f"{(each.device or ('',))[0]}, for TensorFlow") for each in named), None)


def verdicts(contents: PageContents) -> str:
    """Return the first lines of the page, the most important first."""
    found = [*map(_of_estimate, (each for each in contents.compositions if each.device)), *_of_logs(contents)]
    if not found:
        found = ['<p class="verdict">No device was named: <code>kerasmem estimate MODEL --device t4 --json</code> '
                 "has a verdict for this page.</p>"]  # fmt: skip
    rest = f'<p class="soft">and {len(found) - _MOST} more</p>' if len(found) > _MOST else ""
    return "\n".join(found[:_MOST]) + rest


def _of_estimate(each: Composition) -> str:
    name, verdict = each.device or ("", "")
    kind = verdict.replace(" ", "-") if verdict in VERDICT_MARKS else ""
    joined = " on " if verdict == "too close to call" else " "
    needs = f"{'took' if each.is_measured else 'needs'} {format_size(each.total)}"
    most = f", at most {format_size(each.high)}" if each.high and not each.is_measured else ""
    room = f", of {format_size(each.limit)}" if each.limit else ""
    mark = VERDICT_MARKS.get(verdict, "?")
    line = f'<b class="{kind}">{mark} {html_text(verdict, 40)}{joined}{html_text(name, 80)}</b>'
    return f'<p class="verdict">{line}: {html_text(each.model, 60)} {needs}{most}{room}</p>'


def _of_logs(contents: PageContents) -> Iterator[str]:
    for log in contents.logs:
        limit = limit_of(contents, log)
        card = largest_known(run.driver_used_bytes for run in log.runs)
        most = log.peak_bytes if card is None else card
        if limit is None or most is None:
            continue
        kind = "does-not-fit" if most > limit.bytes else "too-close-to-call" if most > _CLOSE * limit.bytes else "fits"
        share = f"{most / limit.bytes:.0%}".replace("%", " %") if limit.bytes else "–"
        yield (
            f'<p class="verdict">{html_text(log.name, 80)}: at most <b class="{kind}">{format_size(most)}</b>, '
            f"{share} of {format_size(limit.bytes)} ({html_text(limit.name, 60)})</p>"
        )
