"""What a method finds, and the report of an estimate: frozen results in bytes and counts, to and from JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kerasmem.devices.catalogue import DeviceTarget, all_cards
from kerasmem.models.op_names import Instant
from kerasmem.models.sizes import Bytes as Bytes
from kerasmem.models.sizes import LayerMemory as LayerMemory
from kerasmem.models.sizes import ModelFacts as ModelFacts
from kerasmem.records import Record
from kerasmem.units import format_size

VERDICTS = FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"


@dataclass(frozen=True)
class Settings:
    """Settings of an estimate. `execution` is "graph", "xla", or "none" for the formula.

    Of several devices (`replicas`) the report is of one, and `batch_size` its share. `stands_in` is true if the figure
    is of this machine's CPU although a card is named: how much less the card takes is not known.
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


@dataclass(frozen=True)
class Formula:
    """The hand formula, every value taken as float32.

    Attributes:
        parameter_bytes: parameters × 2 × 4 (× 1 × 4 for inference).
        activation_elements_per_sample: output elements of all layers for one sample.
        activation_bytes_per_sample: those × 2 × 4 (× 1 × 4 for inference).
        total_bytes: parameter_bytes + batch × activation_bytes_per_sample.
        copies: 2 where a value has a gradient beside it (training), 1 for inference.
        activation_bytes: outputs of all layers for the batch at their own dtypes, without gradients. At its peak a step
            holds some of them, and values inside layers: `bytes.activations`.
    """

    parameter_bytes: int
    activation_elements_per_sample: int
    activation_bytes_per_sample: int
    total_bytes: int
    copies: int = 2
    activation_bytes: int | None = None


@dataclass(frozen=True)
class DeviceVerdict:
    """Whether it fits: the device, its bytes, those the allocator can have, and the verdict in words.

    `note` says where the figures come from.
    """

    name: str
    memory_bytes: int
    available_bytes: int
    verdict: str
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether it surely fits."""
        return self.verdict == FITS


def verdict_on(verdict: str, device: str) -> str:
    """Return "fits t4", "does not fit t4" or "too close to call on t4"."""
    return f"{verdict} on {device}" if verdict == TOO_CLOSE else f"{verdict} {device}"


@dataclass(frozen=True)
class Pool:
    """Bytes of the allocator at the peak; None if unknown.

    Attributes:
        requested: the bytes that the step's tensors ask for.
        in_use: the chunks handed out for them (the report's total).
        reserved: the regions that the allocator took from the device, under memory growth.
        smallest_limit: the smallest memory limit under which the step still trains.
    """

    requested: int | None
    in_use: int
    reserved: int | None
    smallest_limit: int | None = None


@dataclass(frozen=True)
class Unmodelled:
    """Something that costs memory and is not in the total."""

    what: str
    why: str
    bytes: int | None = None


# How far from a total real steps are said to lie at least, as a share of it. In graph mode processes that train the
# same model differ in their medians, and steps within one by up to 15 %, as threads race; what the simulation varies is
# part of that. XLA's plan is exact; what chunks the variables lie in is not, as it depends on all that was done before.
SPREAD = {"graph": 0.09, "xla": 0.01}


@dataclass(frozen=True, kw_only=True)
class Outcome(Bytes):
    """The bytes of a step at its peak, and how a method got them.

    Attributes:
        method: "xla", "graph", "gpu-target", "probe" or "formula".
        execution: "xla" or "graph"; "none" of the formula.
        pool: requested, in use, reserved, smallest limit.
        layers: bytes at the peak by layer, weights included; None if the method does not know the peak's.
        instant: the moment of the peak, if known.
        unmodelled: memory that is not in the total.
        notes: how it was obtained.
        fallback: why the formula answers in place of a method that matches the step.
        stands_in: whether it is of this machine's CPU although a card is named; `low` is then what the step holds
            from beginning to end, and how much more the card takes is not known.
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

    @property
    def need(self) -> Bytes:
        """The bytes alone."""
        return Bytes(**{each.name: getattr(self, each.name) for each in fields(Bytes)})


class Shares:
    """The bytes at a peak by category and by layer, counted one by one.

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
    """How much memory a training step needs, by one method.

    `to_dict` gives the object that `kerasmem estimate --json` prints; `from_dict` reads it back. `print(report)` says
    the answer in one line.
    `fallback` is the reason if the formula answers in place of a method that matches the step.
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

    @property
    def peak(self) -> int:
        """The bytes in use at the step's peak: `bytes.total`."""
        return self.bytes.total

    @property
    def fits(self) -> bool | None:
        """Whether the step surely fits the device; None if no device was named."""
        return None if self.device is None else self.device.fits

    @property
    def needs(self) -> str:
        """The peak, with the end of its interval that decides: "needs 2.91 GiB, at most 2.99 GiB"."""
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
        """The second figure: "; cuDNN may use up to 4.2 GiB if it is free", or nothing."""
        if not self.bytes.optional_workspace:
            return ""
        return f"; cuDNN may use up to {format_size(self.bytes.high)} if it is free"

    @property
    def answer(self) -> str:
        """The answer: "fits 16GB: needs 2.91 GiB, at most 2.99 GiB, of 14.9 GiB"."""
        if self.device is None:
            return f"{self.model.name} {self.needs}{self.if_free}"
        on = verdict_on(self.device.verdict, self.device.name)
        return f"{self.model.name} {on}: {self.needs}, of {format_size(self.device.available_bytes)}{self.if_free}"


def verdict(need: Bytes, available_bytes: int) -> str:
    """Return "fits", "does not fit", or "too close to call" if the interval straddles the available bytes.

    A method that knows no upper end never says "fits"; one that claims no interval is taken by its total.

    Examples:
        >>> verdict(Bytes(10, 8, 12, *[None] * 7), 11)
        'too close to call'
    """
    return judge(*need.bounds, available_bytes)


def at_most(need: Bytes) -> int:
    """Return the most that a step must have, or the total if no upper end is known."""
    return need.total if need.most_needed is None else need.most_needed


def judge(low: int, high: int | None, limit: int) -> str:
    """Return the verdict on an interval."""
    if low > limit:
        return DOES_NOT_FIT
    return FITS if high is not None and high <= limit else TOO_CLOSE


def fitting_cards(need: Bytes) -> list[str]:
    """List the cards of the catalogue that a step fits, by memory."""
    fitting = (card for card in all_cards() if verdict(need, card.available_bytes) == FITS)
    return [card.name for card in sorted(fitting, key=lambda card: card.memory_bytes)]


def device_verdict(device: DeviceTarget | DeviceVerdict, need: Bytes) -> DeviceVerdict:
    """Return whether a step fits a device, with the device's figures."""
    words = verdict(need, device.available_bytes)
    return DeviceVerdict(device.name, device.memory_bytes, device.available_bytes, words, device.note)
