"""Texts on a peak that several views share: settings, parts, interval and verdict."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from kerasmem.estimation.report import Bytes, DeviceVerdict, MemoryReport, Settings, verdict_on
from kerasmem.profiling.results import ProfileSettings, StepProfile
from kerasmem.rendering.formatting import VERDICT_MARKS, VERDICT_STYLES
from kerasmem.units import format_size, printable

_MODES = {"train": "training", "evaluate": "evaluation"}  # and inference
_CATEGORIES = {"activations": "activations held", "allocator": "allocator waste", "unnamed": "not known"}
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
_BAR = 60
_LEAST_SHARE = 0.005  # smaller parts are left out


def settings_line(settings: Settings | ProfileSettings, *, with_batch: bool = True) -> str:
    """Return batch, mode, dtype policy, optimizer and method of a report."""
    replicas = getattr(settings, "replicas", 1)
    words = [
        *([f"batch {settings.batch_size:,}"] if with_batch else []),
        _MODES.get(settings.mode, "inference"),
        printable(settings.dtype_policy, 30),
        *([printable(settings.optimizer, 30)] if settings.optimizer else []),
        *([f"one of {replicas} devices (data parallel)"] if replicas > 1 else []),
        f"method {printable(settings.method, 30)}",
    ]
    return " · ".join(words)


def model_line(report: MemoryReport | StepProfile) -> str:
    """Return the model and the settings in one line."""
    return f"{printable(report.model.name, 60)} · {settings_line(report.settings)}"


def verdict_line(device: DeviceVerdict, needs: str, how: str = "") -> Text:
    """Return the verdict on a device with its mark and in its colour: "✔ fits t4: needs 3 GiB, of 13.4 GiB".

    Args:
        device: verdict on the device.
        needs: memory of the step, as text.
        how: text after the device, such as "with 4 micro-batches".
    """
    mark = VERDICT_MARKS.get(device.verdict, "?")
    text = f"{mark} {verdict_on(device.verdict, printable(device.name, 80))}"
    line = Text(text, style=VERDICT_STYLES.get(device.verdict, "bold"))
    line.append(f" {how}" if how else "", style="bold")
    return line.append(f": {needs}, of {device.available}", style="not bold default")


def interval(need: Bytes, stands_in: bool) -> str:
    """Return the interval of an estimate.

    Args:
        need: bytes of a step.
        stands_in: whether this machine's CPU stands in for a card.
    """
    if need.low is None:
        return "not known"
    if need.high is None:
        return f"at least {format_size(need.low)}, no upper end known"
    if stands_in:
        return f"at most {format_size(need.high)}; the card's own plan may take less"
    return f"{format_size(need.low)} to {format_size(need.most_needed)}"


def category_name(name: str, method: str | None = None) -> str:
    """Return the name of a category of bytes. The formula counts all activations, other methods those held."""
    return name if method == "formula" else _CATEGORIES.get(name, name)


def composition(report: MemoryReport | StepProfile, terminal: int | None) -> Iterator[Text]:
    """Yield a bar, on a terminal, and the parts of the peak, the largest first."""
    need, method = report.bytes, report.settings.method
    known = {category_name(name, method): getattr(need, name) or 0 for name in need.CATEGORIES}
    known["not divided further"] = need.total - sum(known.values())
    bar, names = Text(), Text()
    for number, (name, size) in enumerate(sorted(known.items(), key=lambda pair: -pair[1])):
        if size > _LEAST_SHARE * need.total:
            colour = _COLOURS[number % len(_COLOURS)]
            bar.append("█" * round(_BAR * size / need.total), style=colour)
            names.append(" · " if names.plain else "")
            names.append("■ " if terminal is not None else "", style=colour)
            names.append(f"{name} {format_size(size)}")
    if terminal is not None:
        yield bar
    yield names
