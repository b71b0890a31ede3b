"""A MemoryReport's answer: one line that says it, what the peak is made of, and the largest layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kerasmem.estimation.report import Bytes, DeviceVerdict, MemoryReport
from kerasmem.rendering.estimate_table import layers_table
from kerasmem.rendering.layout import verdict_heading
from kerasmem.rendering.peak_text import asked_line, missing_line
from kerasmem.units import format_size

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_BAR = 60
_LAYERS = 8
_STAND_INS = ("graph", "xla", "probe")
_LEAST_SHARE = 0.005  # what is less is not named


def answer(
    report: MemoryReport,
    terminal: int | None = None,
    *,
    cards: Sequence[str] = (),
    sort: str = "size",
    top: int | None = None,
) -> RenderableType:
    """Return the answer first, then what it is made of, in at most 24 lines.

    Args:
        report: an estimate or a measurement.
        terminal: columns of one, None for plain text.
        cards: the known cards on which it fits, the smallest first; said where the report names no device.
        sort: "size" (the largest layers first) or "order" (as the model calls them).
        top: how many layers to list; 0 for all.
    """
    layers = layers_table(report, sort, _LAYERS if top is None else top, terminal, brief=True)
    apart: list[RenderableType] = [""] if terminal is None else []  # on a terminal a table has room around it
    head: list[RenderableType] = [_first_line(report, cards), Text(asked_line(report), style="dim"), ""]
    return Group(*head, *_made_of(report.bytes, terminal), *apart, layers, *apart, *_last_lines(report))


def _first_line(report: MemoryReport, cards: Sequence[str]) -> Text:
    device = report.device
    if device is None:
        where = f"fits {len(cards)} of the known cards, from {cards[0]} up" if cards else "fits no known card"
        return Text(f"{report.needs}: {where}", style="bold")
    line = verdict_heading(device.verdict, device.name)
    line.append(f": {report.needs}, of {format_size(device.available_bytes)}", style="not bold default")
    if _is_card(device) and report.settings.method in _STAND_INS:
        line.append(" (a CPU's plan; --method gpu-target plans for the card)", style="not bold default")
    return line


def _is_card(device: DeviceVerdict) -> bool:
    return device.available_bytes < device.memory_bytes  # TensorFlow leaves a part of a card's memory alone


def _made_of(need: Bytes, terminal: int | None) -> Iterator[Text]:
    """Yield a bar, on a terminal, and the shares of the peak, the largest first."""
    known = {name: size for name in Bytes.CATEGORIES if (size := getattr(need, name))}
    if rest := need.total - sum(known.values()):
        known["not divided further"] = rest
    shares = sorted(known.items(), key=lambda pair: -pair[1])
    bar, names = Text(), Text()
    for number, (name, size) in enumerate(shares):
        share = size / need.total if need.total else 0
        if share < _LEAST_SHARE:
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        bar.append("█" * round(_BAR * share), style=colour)
        names.append(" · " if names.plain else "")
        names.append("■ " if terminal is not None else "", style=colour)
        names.append(f"{'allocator waste' if name == 'allocator' else name} {format_size(size)}")
    if terminal is not None:
        yield bar
    yield names


def _last_lines(report: MemoryReport) -> Iterator[Text]:
    if missing := missing_line(report):
        yield Text(missing)
    notes = f", {len(report.notes)} notes" if report.notes else ""
    yield Text(f"-v shows the interval, bytes by category, the formula, other methods{notes}", style="dim")
