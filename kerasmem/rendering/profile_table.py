"""A StepProfile as text: what was in memory at the peak of a real step."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.profiling.results import PeakBytes, ProfiledLayer, StepProfile
from kerasmem.rendering.escape import printable
from kerasmem.rendering.layout import (
    fact_list,
    figures,
    model_heading,
    note_lines,
    percent,
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
    sort: str = "size",
    top: int | None = None,
) -> RenderableType:
    """Return what was in memory at the peak of a real step.

    Args:
        profile: of a real step.
        terminal: columns of one, None for plain text.
        sort: "size" (the largest layer first) or "order" (as the model calls them).
        top: how many layers to list; None lists all that hold something.
    """
    parts: list[RenderableType] = [_heading(profile), "", fact_list(_facts(profile)), ""]
    parts += [_categories(profile, terminal), "", _layers(profile, sort, top, terminal)]
    if profile.live:
        parts += ["", _chunks(profile, terminal)]
    remarks = list(_remarks(profile))
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


def _categories(profile: StepProfile, terminal: int | None) -> Table:
    rows, total = table(terminal, words("Category"), *map(figures, ("Measured", "Share"))), profile.bytes.total
    for name in PeakBytes.CATEGORIES:
        if measured := getattr(profile.bytes, name):
            rows.add(_CATEGORIES.get(name, name).capitalize(), measured, percent(measured, total))
    rows.add("In use at the peak", total, "100 %", style="bold")
    return rows


def _layers(profile: StepProfile, sort: str, top: int | None, terminal: int | None) -> Table:
    rows = table(terminal, words("Layer (class)"), figures("Measured"), words("Mostly"))
    by_size = sorted((row for row in profile.layers if row.bytes_at_peak), key=lambda row: -row.bytes_at_peak)
    shown = by_size[:top] if top else by_size
    rest = by_size[len(shown) :]
    if sort == "order":
        kept = {row.name for row in shown}
        shown = [row for row in profile.layers if row.name in kept]
    for row in shown:
        rows.add(f"{printable(row.name, 100)} ({printable(row.class_name, 40)})", row.bytes_at_peak, _mostly(row))
    if rest:
        size = sum(row.bytes_at_peak for row in rest)
        rows.add(f"{len(rest)} more {'layer' if len(rest) == 1 else 'layers'}", size, "")
    rows.add_section()
    for share in profile.shares:
        if share.bytes * 10_000 >= profile.bytes.total:
            name = Text(printable(_SHARES.get(share.name, share.name), 80), style="italic")
            rows.add(name, share.bytes, "")
    rows.add("In no layer, together", sum(share.bytes for share in profile.shares), "", style="bold")
    return rows


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


def _remarks(profile: StepProfile) -> Iterator[Text]:
    for item in profile.unmodelled:
        yield Text(f"Not seen: {printable(str(item['what']))}: {printable(str(item['why']))}.")
    yield from note_lines(profile.notes)
