"""What goes onto a page or a picture: trainings, and what saved estimates and profiles say a peak is made of.

Estimates and profiles are read from their JSON, each value checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import InputError
from kerasmem.estimation.report import FORMAT_VERSION, Bytes
from kerasmem.monitoring.log_summary import LogSummary
from kerasmem.monitoring.rank_logs import TrainingLogs

_MEASURED = ("measure", "measured", "profile")  # methods that ran the step
_MOST_BYTES = 2**60
_MOST_LAYERS = 20_000


@dataclass(frozen=True)
class LayerShare:
    """One layer: its path, its class, and what it holds at the peak in bytes; None where not known."""

    name: str
    class_name: str
    bytes: int | None


@dataclass(frozen=True)
class Composition:
    """A peak and what it is made of; sizes in bytes.

    Attributes:
        source: the file.
        model: the model's name.
        batch_size, mode, method, execution, optimizer: the settings; None where the file does not say.
        is_measured: whether a step was run, rather than estimated.
        total: the peak.
        low, high: the interval that the method claims.
        categories: category → bytes, largest parts of a step first as kerasmem lists them.
        layers: in the model's order.
        is_at_peak: whether the layers' bytes are those at the peak, rather than a division of the total.
        device: the device named, with the verdict; None where none was.
        unmodelled: what costs memory and is not in the total.
        notes: what the method says beside.
    """

    source: str
    model: str
    batch_size: int | None
    mode: str | None
    method: str
    execution: str | None
    optimizer: str | None
    is_measured: bool
    total: int
    low: int | None
    high: int | None
    categories: tuple[tuple[str, int], ...]
    layers: tuple[LayerShare, ...]
    is_at_peak: bool
    device: tuple[str, str] | None
    unmodelled: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def how(self) -> str:
        """How the total was obtained: "measured", or the method of the estimate."""
        return "measured" if self.is_measured else self.method

    @property
    def largest_layers(self) -> list[LayerShare]:
        """The layers that hold something, the largest first."""
        return sorted((layer for layer in self.layers if layer.bytes), key=lambda layer: -(layer.bytes or 0))

    @property
    def unnamed(self) -> int | None:
        """What of the total no layer holds; None where the layers' bytes are not known."""
        known = [layer.bytes for layer in self.layers if layer.bytes is not None]
        return max(0, self.total - sum(known)) if known else None


@dataclass(frozen=True)
class PageContents:
    """Results for one page.

    Attributes:
        trainings: what was logged, ranks together.
        compositions: estimates and profiles.
        title: of the page.
    """

    trainings: tuple[TrainingLogs, ...]
    compositions: tuple[Composition, ...]
    title: str = "Memory report"

    @property
    def logs(self) -> tuple[LogSummary, ...]:
        """Every log of every training."""
        return tuple(log for training in self.trainings for log in training.logs)

    @property
    def estimates(self) -> tuple[Composition, ...]:
        """Those that were estimated."""
        return tuple(each for each in self.compositions if not each.is_measured)

    @property
    def profiles(self) -> tuple[Composition, ...]:
        """Those that were measured."""
        return tuple(each for each in self.compositions if each.is_measured)

    def profile_for(self, estimate: Composition) -> Composition | None:
        """Return the profile that shares the most layers with an estimate; None where none shares any."""
        names = {layer.name for layer in estimate.layers if layer.bytes is not None}
        shared = [len(names & {layer.name for layer in p.layers if layer.bytes is not None}) for p in self.profiles]
        most = max(shared, default=0)
        return self.profiles[shared.index(most)] if most else None


def is_report(data: object) -> bool:
    """Return whether JSON data looks like an estimate or a profile, whole or not."""
    return isinstance(data, dict) and "bytes" in data and "kind" not in data


def read_composition(data: Mapping[str, Any], source: str) -> Composition:
    """Return what the JSON of an estimate or a profile says.

    Args:
        data: the object in the file; fields that are not known are passed over.
        source: the file's name, for the page and for errors.

    Raises:
        InputError: a field is missing or not of its kind, or the format is a later one.
    """
    reader = _Reader(source)
    if data.get("format_version") != FORMAT_VERSION:
        raise reader.refusal(f"format_version is {_short(data.get('format_version'))}, not {FORMAT_VERSION}")
    model, settings, sizes = (reader.mapping(data, field) for field in ("model", "settings", "bytes"))
    total = reader.size(sizes, "total", "bytes.")
    if total is None:
        raise reader.refusal("bytes.total is not known")
    named = [*Bytes.CATEGORIES, *(name for name in sizes if name not in (*Bytes.CATEGORIES, "total", "low", "high"))]
    categories = [(str(name), value) for name in named if (value := reader.size(sizes, name, "bytes.")) is not None]
    rows = data.get("layers") or []
    if not isinstance(rows, list) or len(rows) > _MOST_LAYERS:
        raise reader.refusal(f"layers is not a list of at most {_MOST_LAYERS:,} layers")
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise reader.refusal(f"layers[{place}] is not an object")
    is_at_peak = any(row.get("bytes_at_peak") is not None for row in rows)
    field = "bytes_at_peak" if is_at_peak else "bytes"
    layers = [
        LayerShare(
            name=str(row.get("name", "")),
            class_name=str(row.get("class", "")),
            bytes=reader.size(row, field, f"layers[{place}]."),
        )
        for place, row in enumerate(rows)
    ]
    method = str(settings.get("method") or "not said")
    device = data.get("device")
    return Composition(
        source=source,
        model=str(model.get("name") or "model"),
        batch_size=reader.size(settings, "batch_size", "settings."),
        mode=_text(settings.get("mode")),
        method=method,
        execution=_text(settings.get("execution")),
        optimizer=_text(settings.get("optimizer")),
        is_measured=method in _MEASURED or data.get("measured") is True,
        total=total,
        low=reader.size(sizes, "low", "bytes."),
        high=reader.size(sizes, "high", "bytes."),
        categories=tuple(categories),
        layers=tuple(layers),
        is_at_peak=is_at_peak,
        device=(str(device.get("name")), str(device.get("verdict"))) if isinstance(device, dict) else None,
        unmodelled=tuple(
            f"{item.get('what')}: {item.get('why')}" for item in _list(data.get("unmodelled")) if isinstance(item, dict)
        ),
        notes=tuple(str(note) for note in _list(data.get("notes"))),
    )


class _Reader:
    """Reads fields of one file, and says what is wrong with them."""

    def __init__(self, source: str) -> None:
        self._source = source

    def refusal(self, what: str) -> InputError:
        return InputError(
            f"{self._source}: no kerasmem estimate or profile: {what}; "
            "write it anew: kerasmem estimate MODEL --json > estimate.json"
        )

    def mapping(self, data: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        value = data.get(field)
        if not isinstance(value, dict):
            raise self.refusal(f"{field} is {_short(value)}, not an object")
        return value

    def size(self, data: Mapping[str, Any], field: str, path: str) -> int | None:
        value = data.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_BYTES:
            raise self.refusal(f"{path}{field} is {_short(value)}, not a whole number from 0 to 2**60")
        return value


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(value: object) -> str:
    """Return the value for an error message; a number of thousands of digits is not written out."""
    if value is None:
        return "missing"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MOST_BYTES:
        return "a number beyond all memory"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"
