"""The results of a method and the report of an estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, all_cards
from kerasmem.devices.kernels import TITLES, CpuKernels
from kerasmem.errors import InputError
from kerasmem.models.op_names import Instant
from kerasmem.models.sizes import Bytes as Bytes
from kerasmem.models.sizes import LayerMemory as LayerMemory
from kerasmem.models.sizes import ModelFacts as ModelFacts
from kerasmem.profiling.results import METHOD, ProfileSettings
from kerasmem.records import Record, html_table
from kerasmem.units import format_count, format_size

_LAYERS_SHOWN = 8  # in a notebook
_MOST_BYTES = 2**60  # in a saved report
VERDICTS = FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"


@dataclass(frozen=True)
class Settings:
    """Settings of an estimate.

    Attributes:
        batch_size: samples. With several replicas, the share of one.
        optimizer: its name, or None if unknown.
        loss: its name, or None if unknown.
        dtype_policy: dtype policy of most layers.
        mode: "train", "evaluate" or "inference".
        method: the method that gave the estimate.
        execution: "graph", "xla", or "none" for the formula.
        device: the named card or size, or None.
        replicas: number of devices that train together. The report is of one.
        stands_in: whether the figure is of this machine's CPU although a card is named. The card usually takes less.
        kernels: the CPU's kernels, "onednn" or "eigen", or None if the method does not depend on them.
        threads: number of operations that run at once, and of threads of each operation; None as for `kernels`.
        intra_op_threads: threads of each operation if different from `threads`, or None.
    """

    batch_size: int
    optimizer: str | None
    loss: str | None
    dtype_policy: str
    mode: str
    method: str
    execution: str
    device: str | None
    replicas: int = 1
    stands_in: bool = False
    kernels: str | None = None
    threads: int | None = None
    intra_op_threads: int | None = None

    @property
    def profile(self) -> str:
        """The kernels and threads as text, or "" if the figures do not depend on them."""
        if self.kernels is None:
            return ""
        inner = "" if self.intra_op_threads is None else f", {self.intra_op_threads} in each operation"
        return f"{TITLES.get(self.kernels, self.kernels)}, threads: {self.threads}{inner}"


@dataclass(frozen=True)
class Formula:
    """The hand formula, every value taken as float32.

    Attributes:
        parameter_bytes: parameters × 2 × 4 (× 1 × 4 for inference).
        activation_elements_per_sample: output elements of all layers for one sample.
        activation_bytes_per_sample: those × 2 × 4 (× 1 × 4 for inference).
        total_bytes: parameter_bytes + batch × activation_bytes_per_sample.
        copies: 2 for training, as each value has a gradient; 1 for inference.
        activation_bytes: outputs of all layers for the batch at their own dtypes, without gradients. The peak
            (`bytes.activations`) has only a part of these, and values inside layers.
    """

    parameter_bytes: int
    activation_elements_per_sample: int
    activation_bytes_per_sample: int
    total_bytes: int
    copies: int = 2
    activation_bytes: int | None = None


@dataclass(frozen=True)
class DeviceVerdict:
    """Whether a step fits a device.

    Attributes:
        name: the card's name, or the size.
        memory_bytes: bytes of the device.
        available_bytes: bytes available to the allocator.
        verdict: "fits", "does not fit" or "too close to call".
        note: source of the figures.
        available_low: lowest limit of such cards in bytes, or None if equal to `available_bytes`.
        available_high: highest limit of such cards in bytes, or None if equal to `available_bytes`.
    """

    name: str
    memory_bytes: int
    available_bytes: int
    verdict: str
    note: str = ""
    available_low: int | None = None
    available_high: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the step surely fits."""
        return self.verdict == FITS

    @property
    def available(self) -> str:
        """The available bytes as text, as a range if the verdict is too close to call: "5.32 GiB to 6.01 GiB"."""
        low, high = self.available_low, self.available_high
        if self.verdict != TOO_CLOSE or low is None or high is None or low == high:
            return format_size(self.available_bytes)
        return f"{format_size(low)} to {format_size(high)}"


def verdict_on(verdict: str, device: str) -> str:
    """Return "fits t4", "does not fit t4" or "too close to call on t4"."""
    return f"{verdict} on {device}" if verdict == TOO_CLOSE else f"{verdict} {device}"


@dataclass(frozen=True)
class Pool:
    """Bytes of the allocator at the peak, or None if unknown.

    Attributes:
        requested: bytes that the step's tensors request.
        in_use: bytes of the chunks for them (the report's total).
        reserved: bytes that the allocator has taken from the device, with memory growth.
        smallest_limit: the smallest memory limit under which the step still trains.
    """

    requested: int | None
    in_use: int
    reserved: int | None
    smallest_limit: int | None = None


@dataclass(frozen=True)
class Unmodelled:
    """Memory that is not in the total: `what`, `why`, and its bytes if known."""

    what: str
    why: str
    bytes: int | None = None


# Least distance of the interval's ends from the total, as a share of it. In graph mode the medians of processes that
# train the same model differ, and steps of one process by up to 15 %, as threads race. The simulation varies only part
# of that. XLA's plan is exact, but the chunks of the variables depend on earlier allocations.
SPREAD = {"graph": 0.09, "xla": 0.01}


@dataclass(frozen=True, kw_only=True)
class Outcome(Bytes):
    """The result of a method: the bytes of a step at its peak.

    Attributes:
        method: "xla", "graph", "gpu-target", "probe" or "formula".
        execution: "xla" or "graph"; "none" for the formula.
        pool: bytes of the allocator, if known.
        layers: bytes at the peak by layer, weights included; None if unknown.
        instant: the moment of the peak, if known.
        unmodelled: memory that is not in the total.
        notes: how the result was obtained.
        fallback: why the formula answers instead of a method that matches the step, or None.
        stands_in: whether the figure is of this machine's CPU although a card is named. `low` is then the memory that
            the step holds from beginning to end.
        kernels: the CPU's kernels, or None if the result does not depend on them.
        ran_on: device of real steps, such as "CPU:0", or None.
        caveats: differences between the step and the user's, for the first line of the answer.
    """

    method: str
    execution: str
    pool: Pool | None = None
    layers: Mapping[str, int] | None = field(default_factory=dict)
    instant: Instant | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    notes: tuple[str, ...] = ()
    fallback: str | None = None
    stands_in: bool = False
    kernels: CpuKernels | None = None
    ran_on: str | None = None
    caveats: tuple[str, ...] = ()

    @property
    def need(self) -> Bytes:
        """The bytes without the rest of the outcome."""
        return Bytes(**{part.name: getattr(self, part.name) for part in fields(Bytes)})


class Shares:
    """Counts the bytes at a peak by category and by layer.

    Attributes:
        categories: bytes by category of `Bytes`.
        layers: bytes by layer.
    """

    def __init__(self) -> None:
        self.categories: dict[str, Any] = dict.fromkeys(Bytes.CATEGORIES, 0)
        self.layers: Counter[str] = Counter()

    def add(self, size: int, category: str, layer: str | None = None) -> None:
        """Count bytes, for a layer if they belong to one."""
        self.categories[category] += size
        if layer is not None:
            self.layers[layer] += size

    def fill(self, total: int) -> None:
        """Count the rest of a total as the allocator's."""
        self.categories["allocator"] += total - sum(self.categories.values())


@dataclass(frozen=True)
class MemoryReport(Record, what="estimate", version=1, rows="layers"):
    """Memory of a training step, by one method.

    `print(report)` shows the answer in one line. `to_dict` returns the object that `kerasmem estimate --json` prints,
    and `from_dict` reads it back.

    Attributes:
        model: the model's name, source and size.
        settings: settings of the estimate.
        bytes: the peak and its parts.
        formula: figures of the hand formula.
        layers: one row for each input and layer.
        device: the verdict, or None if no device was named.
        unmodelled: memory that is not in the total.
        notes: how the figures were obtained.
        pool: bytes of the allocator, if known.
        instant: the moment of the peak, if known.
        fallback: why the formula answers instead of a method that matches the step, or None.
        caveats: differences between the estimated step and the user's, shown with the answer.
    """

    model: ModelFacts
    settings: Settings
    bytes: Bytes
    formula: Formula
    layers: tuple[LayerMemory, ...]
    device: DeviceVerdict | None = None
    unmodelled: tuple[Unmodelled, ...] = ()
    notes: tuple[str, ...] = ()
    pool: Pool | None = None
    instant: Instant | None = None
    fallback: str | None = None
    caveats: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The bytes in use at the step's peak: `bytes.total`."""
        return self.bytes.total

    @property
    def fits(self) -> bool | None:
        """Whether the step surely fits the device, or None if no device was named."""
        return None if self.device is None else self.device.fits

    @property
    def needs(self) -> str:
        """The peak and its decisive bounds: "needs 2.91 GiB, at most 2.99 GiB"."""
        need = self.bytes
        total = f"{'took' if self.settings.method == 'measure' else 'needs'} {format_size(need.total)}"
        if need.low is None or need.low == need.high:
            return total
        if need.high is None:
            return f"{total}, no upper end known"
        least, most = f"at least {format_size(need.low)}", f"at most {format_size(need.most_needed)}"
        verdict = "fits" if self.device is None else self.device.verdict
        both = most if self.settings.stands_in else f"{least}, {most}"
        return f"{total}, " + {"fits": most, "does not fit": least}.get(verdict, both)

    @property
    def if_free(self) -> str:
        """The optional workspace: "; cuDNN may use up to 4.2 GiB if it is free", or ""."""
        if not self.bytes.optional_workspace:
            return ""
        return f"; cuDNN may use up to {format_size(self.bytes.high)} if it is free"

    @property
    def answer(self) -> str:
        """A summary: "cnn fits 16GB: needs 2.91 GiB, at most 2.99 GiB, of 14.9 GiB"."""
        needs = f"{self.needs}{self.remarks}"
        if self.device is None:
            return f"{self.model.name} {needs}{self.if_free}"
        fits = verdict_on(self.device.verdict, self.device.name)
        return f"{self.model.name} {fits}: {needs}, of {self.device.available}{self.if_free}"

    @property
    def remarks(self) -> str:
        """How the answer differs from the user's step, in brackets: another method, this CPU, assumptions; or ""."""
        formula = () if self.fallback is None else (f"by the formula alone, as {self.fallback}",)
        instead = substitute(self.settings) if self.fallback is None else ""
        return instead + "".join(f" ({remark})" for remark in (*formula, *self.caveats))

    def _repr_html_(self) -> str:
        return html_table(str(self), self._largest_layers(_LAYERS_SHOWN))

    def _largest_layers(self, count: int) -> list[dict[str, Any]]:
        """Return the rows of the largest layers, of the others together, and of the total, as texts."""
        layers = sorted(self.layers, key=lambda row: -(row.bytes or 0))
        rows: list[tuple[str, Any, int, int | None]] = [
            (f"{row.name} ({row.class_name})", row.output_shape, row.parameters, row.bytes) for row in layers[:count]
        ]
        if rest := layers[count:]:
            parameters, size = sum(row.parameters for row in rest), sum(row.bytes or 0 for row in rest)
            rows.append((format_count(len(rest), "smaller layer"), None, parameters, size))
        divided = sum(row[3] or 0 for row in rows)
        if divided and divided < self.bytes.total and self.settings.method != "formula":
            rows.append(("no single layer", None, 0, self.bytes.total - divided))
        rows.append(("Total", None, self.model.parameters, self.bytes.total))
        return [
            {
                "Layer (class)": name,
                "Output shape": "" if shape is None else str(tuple(shape)),
                "Parameters": format_count(parameters),
                "At peak": "–" if size is None else format_size(size),
                "Share": f"{(size or 0) / max(self.bytes.total, 1):.1%}".replace("%", " %"),
            }
            for name, shape, parameters, size in rows
        ]


def substitute(settings: Settings | ProfileSettings) -> str:
    """Return a remark in brackets if a figure is of this machine's CPU although a card is named, or ""."""
    if not settings.stands_in:
        return ""
    if settings.method in ("measure", "probe", METHOD):
        return " (measured on this CPU, not on the card)"
    return " (planned for this CPU; kerasmem[gpu-targets] plans for the card)"


def check_sizes(report: Any) -> None:
    """Refuse a saved estimate or profile with impossible numbers, such as sizes that charts and shares cannot show.

    Raises:
        InputError: If a number is negative or too large.
    """
    for name, part in (*vars(report).items(), *(("layers", layer) for layer in report.layers)):
        for field_name, size in getattr(part, "__dict__", {}).items():
            if isinstance(size, int) and not 0 <= size <= _MOST_BYTES:
                raise InputError(f"{name}.{field_name} must be from 0 to 2**60")


def verdict(need: Bytes, limit: int, highest: int | None = None) -> str:
    """Return "fits", "does not fit", or "too close to call" if the interval and the limits overlap.

    Without an upper end the verdict is never "fits". Without an interval the total decides.

    Args:
        need: bytes of a step.
        limit: bytes available, or their lowest number.
        highest: their highest number. Defaults to `limit`.

    Examples:
        >>> verdict(Bytes(10, 8, 12, *[None] * 7), 11)
        'too close to call'
    """
    return interval_verdict(*need.bounds, limit, highest)


def at_most(need: Bytes) -> int:
    """Return the upper end of a step's need, or its total if unknown."""
    return need.total if need.most_needed is None else need.most_needed


def interval_verdict(low: int, high: int | None, limit: int, highest: int | None = None) -> str:
    """Return the verdict on an interval under a limit, or under one from `limit` to `highest`."""
    if low > (limit if highest is None else highest):
        return DOES_NOT_FIT
    return FITS if high is not None and high <= limit else TOO_CLOSE


def fitting_cards(need: Bytes) -> list[str]:
    """Return the names of the cards that a step fits, the smallest first."""
    fitting = (card for card in all_cards() if verdict(need, *card.limits) == FITS)
    return [card.name for card in sorted(fitting, key=lambda card: card.memory_bytes)]


def device_verdict(device: DeviceTarget | DeviceVerdict, need: Bytes | str) -> DeviceVerdict:
    """Judge whether a step fits a device, or return the device with a known verdict."""
    low, high, available = device.available_low, device.available_high, device.available_bytes
    limits = available if low is None else low, available if high is None else high
    words = need if isinstance(need, str) else verdict(need, *limits)
    return DeviceVerdict(device.name, device.memory_bytes, available, words, device.note, low, high)
