"""A StepProfile as text: what was in memory at the peak of a real step, the estimate of the same step beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.report import MemoryReport
from kerasmem.profiling.results import PeakBytes, ProfiledLayer, StepProfile, TimelinePoint
from kerasmem.rendering.comparison_table import signed_size
from kerasmem.rendering.escape import printable
from kerasmem.units import format_size

SORTS = ("size", "order")
_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60  # of the timeline
_LARGEST_CHUNKS = 5
_WIDTH_FOR_DIFFERENCE = 74
_WIDTH_FOR_PARTS = 100
_WORDS = {"allocator": "waste in chunks", "unnamed": "not known"}
_OTHERS = {"optimizer": "optimizer, and what it works in"}


def render_profile(
    profile: StepProfile, estimate: MemoryReport | None = None, *, sort: str = "size", top: int | None = None
) -> str:
    """Return the profile as plain text.

    Args:
        profile: of a real step.
        estimate: of the same step, to be shown beside it.
        sort: "size" (the largest layer first) or "order" (as the model calls them).
        top: how many layers to list; None lists all that hold something.
    """
    buffer = StringIO()
    console = Console(file=buffer, width=400, color_system=None, emoji=False, markup=False, highlight=False)
    console.print(_contents(profile, estimate, sort, top, None))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_profile(
    profile: StepProfile,
    console: Console,
    estimate: MemoryReport | None = None,
    *,
    sort: str = "size",
    top: int | None = None,
) -> None:
    """Print the profile on a terminal, as wide as it is."""
    console.print(_contents(profile, estimate, sort, top, console.width))


def _contents(
    profile: StepProfile, estimate: MemoryReport | None, sort: str, top: int | None, terminal: int | None
) -> RenderableType:
    parts: list[RenderableType] = [_heading(profile), "", _summary(profile), ""]
    if len(profile.timeline) > 1:
        parts += [*_timeline(profile.timeline, min(_COLUMNS, (terminal or 80) - 2)), ""]
    parts += [_categories(profile, estimate, terminal), "", _layers(profile, estimate, sort, top, terminal)]
    if profile.live:
        parts += ["", _chunks(profile, terminal)]
    remarks = list(_remarks(profile, estimate))
    if remarks:
        parts += ["", *remarks]
    return Group(*parts)


def _heading(profile: StepProfile) -> Text:
    model, settings = profile.model, profile.settings
    title = Text(printable(model.name, 60), style="bold")
    if model.source and model.source != model.name:
        title.append(f"  {printable(model.source, 120)}", style="dim")
    words = [
        *([] if settings.batch_size is None else [f"batch {settings.batch_size:,}"]),
        {"train": "training", "evaluate": "evaluation"}.get(settings.mode, "inference"),
        printable(settings.dtype_policy, 30),
        *([printable(settings.optimizer, 30)] if settings.optimizer else []),
        {"graph": "graph mode", "xla": "XLA"}.get(settings.execution, "run eagerly"),
        "one real step",
    ]
    return title.append("\n" + " · ".join(words))


def _summary(profile: StepProfile) -> Table:
    need = profile.bytes
    lines = [("Peak", f"{format_size(need.total)} in use ({need.total:,} B), measured")]
    if need.low is not None and need.high is not None:
        spread = "the same in every step" if need.low == need.high else f"{_range(need)} from step to step"
        lines.append(("Steps", spread))
    if profile.instant is not None:
        lines.append(("Reached", printable(profile.instant.text, 200)))
    lines.append(("Before", f"{format_size(profile.before)} in use when the step began"))
    if profile.reserved is not None:
        lines.append(("Reserved", f"{format_size(profile.reserved)} taken from the device, under memory growth"))
    share = f"{profile.named_share:.2%}".replace("%", " %")
    lines.append(("Named", f"{share} of the peak, in {profile.live_chunks:,} chunks"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, text in lines:
        grid.add_row(Text(name), Text(text))
    return grid


def _range(need: PeakBytes) -> str:
    return f"{format_size(need.low)} to {format_size(need.high)}"


def _timeline(points: Sequence[TimelinePoint], columns: int) -> Iterator[RenderableType]:
    """Yield the bytes in use over the step as a line of blocks, each as high as the most in its part of the events."""
    columns = max(min(columns, len(points)), 1)
    heights = [
        max(point.bytes for point in points[part * len(points) // columns : (part + 1) * len(points) // columns])
        for part in range(columns)
    ]
    most = max(heights) or 1
    blocks = "".join(_BLOCKS[round((len(_BLOCKS) - 1) * height / most)] for height in heights)
    yield Text(blocks, style="cyan")
    yield Text(f"in use over the step, allocation by allocation; full height: {format_size(most)}", style="dim")


def _table(terminal: int | None, *columns: str) -> Table:
    rich_look = terminal is not None
    table = Table(
        box=box.SIMPLE_HEAD if rich_look else None,
        header_style="bold",
        padding=(0, 1) if rich_look else (0, 2, 0, 0),
        pad_edge=rich_look,
    )
    for number, name in enumerate(columns):
        is_text = number == 0 or name == "Mostly"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _names(estimate: MemoryReport | None, terminal: int | None) -> list[str]:
    if estimate is None:
        return ["Measured"]
    with_difference = terminal is None or terminal >= _WIDTH_FOR_DIFFERENCE
    return ["Estimate", "Measured", *(["Difference"] if with_difference else [])]


def _cells(names: list[str], predicted: int | None, measured: int) -> list[RenderableType]:
    """Return the cells of a row; the difference is what was measured beyond the estimate."""
    found: list[RenderableType] = [format_size(measured)]
    if "Estimate" in names:
        found.insert(0, "–" if predicted is None else format_size(predicted))
    if "Difference" in names:
        change = None if predicted is None else measured - predicted
        style = "" if not change else "red" if change > 0 else "green"
        found.append(Text("–" if change is None else signed_size(change), style=style))
    return found


def _categories(profile: StepProfile, estimate: MemoryReport | None, terminal: int | None) -> Table:
    names = _names(estimate, terminal)
    table = _table(terminal, "Category", *names, "Share")
    total = profile.bytes.total
    for name in PeakBytes.CATEGORIES:
        measured = getattr(profile.bytes, name)
        predicted = None if estimate is None else getattr(estimate.bytes, name, None)
        if measured or predicted:
            label = _WORDS.get(name, name).capitalize()
            table.add_row(label, *_cells(names, predicted, measured), _share(measured, total))
    predicted = None if estimate is None else estimate.bytes.total
    table.add_row("In use at the peak", *_cells(names, predicted, total), "100 %", style="bold")
    return table


def _layers(
    profile: StepProfile, estimate: MemoryReport | None, sort: str, top: int | None, terminal: int | None
) -> Table:
    names = _names(estimate, terminal)
    with_parts = terminal is None or terminal >= _WIDTH_FOR_PARTS
    table = _table(terminal, "Layer (class)", *names, *(["Mostly"] if with_parts else []))
    predicted = _predicted(estimate)

    def size(row: ProfiledLayer) -> int:
        return max(row.bytes_at_peak, predicted.get(row.name, 0))

    rows = sorted((row for row in profile.layers if size(row)), key=size, reverse=True)
    shown = rows[:top] if top else rows
    rest = rows[len(shown) :]
    if sort == "order":
        kept = {row.name for row in shown}
        shown = [row for row in profile.layers if row.name in kept]

    def of(row: ProfiledLayer) -> int | None:
        return predicted.get(row.name, 0) if estimate is not None else None

    for row in shown:
        name = Text(f"{printable(row.name, 100)} ({printable(row.class_name, 40)})")
        table.add_row(name, *_cells(names, of(row), row.bytes_at_peak), *([_mostly(row)] if with_parts else []))
    if rest:
        counted = None if estimate is None else sum(of(row) or 0 for row in rest)
        word = "layer" if len(rest) == 1 else "layers"
        table.add_row(f"{len(rest)} more {word}", *_cells(names, counted, sum(row.bytes_at_peak for row in rest)))
    table.add_section()
    for share in profile.shares:
        if share.bytes * 10_000 >= profile.bytes.total:
            other = _OTHERS.get(share.name, share.name)
            table.add_row(Text(printable(other, 80), style="italic"), *_cells(names, None, share.bytes))
    measured = sum(share.bytes for share in profile.shares)
    left = None if estimate is None else estimate.bytes.total - sum(predicted.values())
    table.add_row("In no layer, together", *_cells(names, left, measured), style="bold")
    return table


def _predicted(estimate: MemoryReport | None) -> dict[str, int]:
    rows = () if estimate is None else estimate.layers
    return {row.name: row.bytes_at_peak for row in rows if row.bytes_at_peak is not None}


def _mostly(row: ProfiledLayer) -> str:
    parts = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {format_size(size)}" for name, size in parts)


def _chunks(profile: StepProfile, terminal: int | None) -> Table:
    shown = profile.live[:_LARGEST_CHUNKS]
    table = _table(terminal, "Largest chunks at the peak", "Bytes", "Wasted")
    for chunk in shown:
        shape = f" {chunk.shape}" if chunk.shape else ""
        layer = f"{printable(chunk.layer, 60)}: " if chunk.layer else ""
        name = f"{chunk.category}, {layer}{printable(chunk.what, 90)}{printable(shape, 40)}"
        table.add_row(Text(name), format_size(chunk.bytes), format_size(chunk.bytes - chunk.requested))
    return table


def _remarks(profile: StepProfile, estimate: MemoryReport | None) -> Iterator[Text]:
    if estimate is not None:
        settings = estimate.settings
        yield Text(f"Estimate: {printable(settings.method, 30)}, {format_size(estimate.bytes.total)}; it ran no step.")
    for item in profile.unmodelled:
        yield Text(f"Not seen: {printable(str(item['what']))}: {printable(str(item['why']))}.")
    for note in profile.notes:
        yield Text(f"Note: {printable(note)}.")


def _share(size: int, total: int) -> str:
    return f"{size / total:.1%}".replace("%", " %") if total else "–"
