"""A StepProfile as text: what was in memory at the peak of a real step."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kerasmem.estimation.report import DeviceVerdict
from kerasmem.profiling.results import StepProfile
from kerasmem.rendering.formatting import fact_list, figures, note_lines, table, words
from kerasmem.rendering.peak_text import asked_line, composition, verdict_line
from kerasmem.units import format_size, printable

_LAYERS = 25
_SHARES = {"optimizer": "optimizer, and what it works in"}


def profile_table(
    profile: StepProfile,
    terminal: int | None = None,
    *,
    device: DeviceVerdict | None = None,
    top: int | None = None,
) -> RenderableType:
    """Return what was in memory at the peak of a real step.

    Args:
        profile: of a real step.
        terminal: columns of one, None for plain text.
        device: the verdict, or None without a device.
        top: how many layers to list, the largest first. 0 lists all that hold something. Defaults to 25.
    """
    took = f"took {format_size(profile.bytes.total)}"
    first = Text(took, style="bold") if device is None else verdict_line(device, took)
    parts: list[RenderableType] = [first, Text(asked_line(profile), style="dim"), ""]
    parts += [*composition(profile, terminal), "", fact_list(_facts(profile)), ""]
    parts += [_layers(profile, _LAYERS if top is None else top, terminal)]
    for item in profile.unmodelled:
        parts.append(Text(f"Not seen: {printable(str(item['what']))}: {printable(str(item['why']))}."))
    return Group(*parts, *note_lines(profile.notes))


def _facts(profile: StepProfile) -> Iterator[tuple[str, str]]:
    need = profile.bytes
    yield "Peak", f"{format_size(need.total)} in use ({need.total:,} B), measured"
    yield "Steps", f"{format_size(need.low)} to {format_size(need.high)} from step to step"
    if profile.instant is not None:
        yield "Reached", printable(profile.instant.text, 200)
    yield "Before", f"{format_size(profile.before)} in use when the step began"
    share = f"{profile.named_share:.2%}".replace("%", " %")
    yield "Named", f"{share} of the peak, in {profile.live_chunks:,} chunks"


def _layers(profile: StepProfile, top: int, terminal: int | None) -> Table:
    rows = table(terminal, words("Layer (class)"), figures("Measured"), words("Mostly"))
    layers = sorted((row for row in profile.layers if row.bytes_at_peak), key=lambda row: -row.bytes_at_peak)
    shown, rest = layers[: top or None], layers[top or len(layers) :]
    for row in shown:
        parts = sorted(row.parts.items(), key=lambda part: -part[1])[:2]
        mostly = ", ".join(f"{name} {format_size(size)}" for name, size in parts)
        rows.add(f"{printable(row.name, 100)} ({printable(row.class_name, 40)})", row.bytes_at_peak, mostly)
    if rest:
        rows.add(f"{len(rest)} more layers", sum(row.bytes_at_peak for row in rest), "")
    rows.add_section()
    for share in profile.shares:
        if share.bytes * 10_000 >= profile.bytes.total:
            name = Text(printable(_SHARES.get(share.name, share.name), 80), style="italic")
            rows.add(name, share.bytes, "")
    rows.add("In no layer, together", sum(share.bytes for share in profile.shares), "", style="bold")
    return rows
