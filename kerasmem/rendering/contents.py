"""What goes onto a page or a picture: trainings, and what saved estimates and profiles say a peak is made of.

Estimates and profiles are read from their JSON, each value checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerasmem.errors import InputError
from kerasmem.estimation.report import FORMAT_VERSION, Bytes, lower_end
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
        limit: what TensorFlow can use of that device.
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
    limit: int | None = None

    @property
    def how(self) -> str:
        """How the total was obtained: "measured", or the method of the estimate."""
        return "measured" if self.is_measured else self.method

    @property
    def lower_end(self) -> int | None:
        """The least that a step takes; None where that is not known."""
        return lower_end(self.method, self.total, self.low)

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
    top = _Fields(source, data)
    if data.get("format_version") != FORMAT_VERSION:
        raise top.refusal(f"format_version is {_short(data.get('format_version'))}, not {FORMAT_VERSION}")
    model, settings, sizes = top.inside("model"), top.inside("settings"), top.inside("bytes")
    total = sizes.size("total")
    if total is None:
        raise top.refusal("bytes.total is not known")
    named = dict.fromkeys((*Bytes.CATEGORIES, *sizes.data))
    categories = [(name, sizes.size(name)) for name in named if name not in ("total", "low", "high")]
    rows = data.get("layers") or []
    if not isinstance(rows, list) or len(rows) > _MOST_LAYERS:
        raise top.refusal(f"layers is not a list of at most {_MOST_LAYERS:,} layers")
    layers = [top.inside(f"layers[{place}]", row) for place, row in enumerate(rows)]
    is_at_peak = any(row.get("bytes_at_peak") is not None for row in rows)
    layer_bytes = "bytes_at_peak" if is_at_peak else "bytes"
    method = settings.text("method") or "not said"
    device = data.get("device")
    return Composition(
        source=source,
        model=model.text("name") or "model",
        batch_size=settings.size("batch_size"),
        mode=settings.text("mode"),
        method=method,
        execution=settings.text("execution"),
        optimizer=settings.text("optimizer"),
        is_measured=method in _MEASURED or data.get("measured") is True,
        total=total,
        low=sizes.size("low"),
        high=sizes.size("high"),
        categories=tuple((str(name), size) for name, size in categories if size is not None),
        layers=tuple(
            LayerShare(each.text("name") or "", each.text("class") or "", each.size(layer_bytes)) for each in layers
        ),
        is_at_peak=is_at_peak,
        device=(str(device.get("name")), str(device.get("verdict"))) if isinstance(device, dict) else None,
        unmodelled=tuple(
            f"{item.get('what')}: {item.get('why')}" for item in top.items("unmodelled") if isinstance(item, dict)
        ),
        notes=tuple(map(str, top.items("notes"))),
        limit=top.inside("device").size("available_bytes") if isinstance(device, dict) else None,
    )


@dataclass(frozen=True)
class _Fields:
    """Reads the fields of an object in a file, and says what is wrong with them."""

    source: str
    data: Mapping[str, Any]
    path: str = ""

    def refusal(self, what: str) -> InputError:
        return InputError(
            f"{self.source}: no kerasmem estimate or profile: {what}; "
            "write it again: kerasmem estimate MODEL --json > estimate.json"
        )

    def inside(self, name: str, *found: Any) -> _Fields:
        value = found[0] if found else self.data.get(name)
        if not isinstance(value, dict):
            problem = "is not an object" if found else f"is {_short(value)}, not an object"
            raise self.refusal(f"{name} {problem}")
        return _Fields(self.source, value, f"{name}.")

    def size(self, name: str) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_BYTES:
            raise self.refusal(f"{self.path}{name} is {_short(value)}, not a whole number from 0 to 2**60")
        return value

    def text(self, name: str) -> str | None:
        value = self.data.get(name)
        return None if value is None else str(value)

    def items(self, name: str) -> list[Any]:
        value = self.data.get(name)
        return value if isinstance(value, list) else []


def _short(value: object) -> str:
    """Return the value for an error message; a number of thousands of digits is not written out."""
    if value is None:
        return "missing"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MOST_BYTES:
        return "a number beyond all memory"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"
