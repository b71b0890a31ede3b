"""A StepProfile as text: what was in memory at the peak of a real step, the estimate of the same step beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kerasmem.estimation.report import MemoryReport
from kerasmem.profiling.results import PeakBytes, ProfiledLayer, StepProfile
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import (
    Rows,
    change_text,
    fact_list,
    figures,
    model_heading,
    note_lines,
    percent,
    signed_size,
    table,
    words,
)
from kerasmem.rendering.peak_text import settings_line
from kerasmem.units import format_size

_LARGEST_CHUNKS = 5
_CATEGORIES = {"allocator": "waste in chunks", "unnamed": "not known"}
_SHARES = {"optimizer": "optimizer, and what it works in"}


def profile_table(
    profile: StepProfile,
    terminal: int | None = None,
    *,
    estimate: MemoryReport | None = None,
    sort: str = "size",
    top: int | None = None,
) -> RenderableType:
    """Return what was in memory at the peak of a real step.

    Args:
        profile: of a real step.
        terminal: columns of one, None for plain text.
        estimate: of the same step, to be shown beside it.
        sort: "size" (the largest layer first) or "order" (as the model calls them).
        top: how many layers to list; None lists all that hold something.
    """
    parts: list[RenderableType] = [_heading(profile), "", fact_list(_facts(profile)), ""]
    parts += [_categories(profile, estimate, terminal), "", _layers(profile, estimate, sort, top, terminal)]
    if profile.live:
        parts += ["", _chunks(profile, terminal)]
    remarks = list(_remarks(profile, estimate))
    return Group(*parts, *([""] if remarks else []), *remarks)


def _heading(profile: StepProfile) -> Text:
    execution = {"graph": "graph mode", "xla": "XLA"}.get(profile.settings.execution, "run eagerly")
    return model_heading(profile.model, f"{settings_line(profile.settings)} · {execution} · one real step")


def _facts(profile: StepProfile) -> Iterator[tuple[str, str]]:
    need = profile.bytes
    yield "Peak", f"{format_size(need.total)} in use ({need.total:,} B), measured"
    if need.low is not None and need.high is not None:
        spread = f"{format_size(need.low)} to {format_size(need.high)} from step to step"
        yield "Steps", "the same in every step" if need.low == need.high else spread
    if profile.instant is not None:
        yield "Reached", printable(profile.instant.text, 200)
    yield "Before", f"{format_size(profile.before)} in use when the step began"
    share = f"{profile.named_share:.2%}".replace("%", " %")
    yield "Named", f"{share} of the peak, in {profile.live_chunks:,} chunks"


def _beside(terminal: int | None, estimate: MemoryReport | None, first: str, *more: Column | None) -> Rows:
    """Return an empty table of measured sizes, with those of an estimate beside them."""
    predicted, difference = (None, None) if estimate is None else (figures("Estimate"), figures("Difference"))
    return table(terminal, words(first), predicted, figures("Measured"), difference, *more)


def _cells(predicted: int | None, measured: int) -> tuple[int | None, int, Text]:
    """Return the cells of a row: predicted, measured, and measured minus predicted."""
    change = None if predicted is None else measured - predicted
    return predicted, measured, change_text(change, "–" if change is None else signed_size(change))


def _categories(profile: StepProfile, estimate: MemoryReport | None, terminal: int | None) -> Table:
    rows, total = _beside(terminal, estimate, "Category", figures("Share")), profile.bytes.total
    for name in PeakBytes.CATEGORIES:
        measured = getattr(profile.bytes, name)
        predicted = None if estimate is None else getattr(estimate.bytes, name, None)
        if measured or predicted:
            label = _CATEGORIES.get(name, name).capitalize()
            rows.add(label, *_cells(predicted, measured), percent(measured, total))
    predicted = None if estimate is None else estimate.bytes.total
    rows.add("In use at the peak", *_cells(predicted, total), "100 %", style="bold")
    return rows


def _layers(
    profile: StepProfile, estimate: MemoryReport | None, sort: str, top: int | None, terminal: int | None
) -> Table:
    rows = _beside(terminal, estimate, "Layer (class)", words("Mostly"))
    predicted = _predicted(estimate)

    def size(row: ProfiledLayer) -> int:
        return max(row.bytes_at_peak, predicted.get(row.name, 0))

    def cells(some: Sequence[ProfiledLayer]) -> tuple[int | None, int, Text]:
        estimated = None if estimate is None else sum(predicted.get(row.name, 0) for row in some)
        return _cells(estimated, sum(row.bytes_at_peak for row in some))

    by_size = sorted((row for row in profile.layers if size(row)), key=size, reverse=True)
    shown = by_size[:top] if top else by_size
    rest = by_size[len(shown) :]
    if sort == "order":
        kept = {row.name for row in shown}
        shown = [row for row in profile.layers if row.name in kept]
    for row in shown:
        rows.add(f"{printable(row.name, 100)} ({printable(row.class_name, 40)})", *cells([row]), _mostly(row))
    if rest:
        rows.add(f"{len(rest)} more {'layer' if len(rest) == 1 else 'layers'}", *cells(rest), "")
    rows.add_section()
    for share in profile.shares:
        if share.bytes * 10_000 >= profile.bytes.total:
            name = Text(printable(_SHARES.get(share.name, share.name), 80), style="italic")
            rows.add(name, *_cells(None, share.bytes), "")
    measured = sum(share.bytes for share in profile.shares)
    left = None if estimate is None else estimate.bytes.total - sum(predicted.values())
    rows.add("In no layer, together", *_cells(left, measured), "", style="bold")
    return rows


def _predicted(estimate: MemoryReport | None) -> dict[str, int]:
    rows = () if estimate is None else estimate.layers
    return {row.name: row.bytes_at_peak for row in rows if row.bytes_at_peak is not None}


def _mostly(row: ProfiledLayer) -> str:
    parts = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {format_size(size)}" for name, size in parts)


def _chunks(profile: StepProfile, terminal: int | None) -> Table:
    rows = table(terminal, words("Largest chunks at the peak"), *map(figures, ("Bytes", "Wasted")))
    for chunk in profile.live[:_LARGEST_CHUNKS]:
        shape = f" {chunk.shape}" if chunk.shape else ""
        layer = f"{printable(chunk.layer, 60)}: " if chunk.layer else ""
        name = f"{chunk.category}, {layer}{printable(chunk.what, 90)}{printable(shape, 40)}"
        rows.add(name, chunk.bytes, chunk.bytes - chunk.requested)
    return rows


def _remarks(profile: StepProfile, estimate: MemoryReport | None) -> Iterator[Text]:
    if estimate is not None:
        method, total = printable(estimate.settings.method, 30), format_size(estimate.bytes.total)
        yield Text(f"Estimate: {method}, {total}; it ran no step.")
    for item in profile.unmodelled:
        yield Text(f"Not seen: {printable(str(item['what']))}: {printable(str(item['why']))}.")
    yield from note_lines(profile.notes)
