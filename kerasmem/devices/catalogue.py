"""Cards by name, and how much of a card TensorFlow's allocator can get.

    >>> find_card("Tesla T4").key
    't4'
    >>> resolve_device("t4").available_bytes < find_card("t4").memory_bytes
    True

A device is either a card or a size:

- **A card** ("t4", "a100-80", "NVIDIA GeForce RTX 3090"): `memory_bytes` is the card's total, and `available_bytes` is
  what TensorFlow's allocator takes of it by default, without the CUDA context.
- **A size** ("16GB", "11GiB"): the memory that the allocator has. Nothing is subtracted, because TensorFlow's reserve
  depends on the compute capability, which is unknown, and because the size may be a limit set for the allocator.

The rows are in `data/cards.json`. docs/dev/cards.md has the rules for their figures.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote

from kerasmem.checks import nearest
from kerasmem.errors import UsageError
from kerasmem.files import package_data
from kerasmem.units import GIB, MIB, format_size, is_size, parse_size

_BRANDS = re.compile(r"^(nvidia|tesla|geforce)+")
_OTHER_DEVICES = "or a size such as 16GB (`kerasmem devices` lists the cards)"
_LEAST_SIZE = MIB


@dataclass(frozen=True)
class LoggedLimit:
    """Limit of TensorFlow's allocator on a card in public logs.

    Attributes:
        mib: median, in MiB.
        lowest: lowest reading, in MiB.
        highest: highest reading, in MiB.
        logs: number of logs.
        source: versions of TensorFlow.
    """

    mib: int
    lowest: int
    highest: int
    logs: int
    source: str


@dataclass(frozen=True)
class Card:
    """A card of the catalogue.

    Args:
        key: short name for command lines, such as "a100-40".
        name: full name with the nominal size.
        aliases: other names, including those of NVML.
        memory_bytes: total memory in bytes, by the rules of docs/dev/cards.md.
        compute_capability: (major, minor).
        memory_source: address of the source of the memory.
        memory_basis: "driver" for a total of the driver, "log" for one derived from TensorFlow's limit, "datasheet" for
            the nominal capacity.
        capability_source: address of the source of the compute capability.
        context_bytes: size of a process's CUDA context.
        context_basis: "read" or "predicted".
        note: kind of the memory figure, and other reported figures.
        limit: limit of the allocator in logs, or None if there are none.

    Examples:
        >>> find_card("t4").compute_capability
        (7, 5)
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    compute_capability: tuple[int, int]
    memory_source: str
    memory_basis: Literal["driver", "log", "datasheet"]
    capability_source: str
    context_bytes: int
    context_basis: Literal["read", "predicted"]
    note: str
    limit: LoggedLimit | None = None

    @property
    def available_bytes(self) -> int:
        """Default limit of TensorFlow's allocator, from logs or else by its rule."""
        if self.limit is not None:
            return self.limit.mib * MIB
        return self.rule_bytes

    @property
    def rule_bytes(self) -> int:
        """Limit of an idle card by TensorFlow's rule."""
        return allocator_bytes(self.memory_bytes - self.context_bytes, self.compute_capability)

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest limit of TensorFlow's allocator.

        They span the logs and TensorFlow's rule for an idle card. Without logs, both are by the rule.
        """
        limit, rule = self.limit, self.rule_bytes
        readings = (rule,) if limit is None else (rule, limit.lowest * MIB, limit.highest * MIB)
        return min(readings), max(readings)

    def to_dict(self) -> dict[str, Any]:
        """Return the card as a dictionary for JSON: sizes in bytes, the compute capability as "8.6".

        Examples:
            >>> find_card("t4").to_dict()["compute_capability"]
            '7.5'
        """
        capability = "{}.{}".format(*self.compute_capability)
        row = {**asdict(self), "aliases": list(self.aliases), "compute_capability": capability}
        return {**row, "available_bytes": self.available_bytes}


def allocator_bytes(free_bytes: int, compute_capability: tuple[int, int]) -> int:
    """Return the default limit of TensorFlow's allocator for a GPU's free memory.

    TensorFlow reserves 225 MiB for the system if less than 2 GiB are free. Otherwise, the reserve depends on the major
    compute capability: 500 MiB up to 6, 1050 MiB for 7, 1536 MiB for 8 and 1800 MiB from 9 on. If that would leave
    nothing, the reserve is 0. cuBLAS, cuDNN and NCCL allocate from the reserve. The rule is the same with memory
    growth. `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` and `gpu_options.experimental.gpu_system_memory_size_in_mb` change the
    reserve; `per_process_gpu_memory_fraction` and a logical device's `memory_limit` change the limit.

    Source: `MinSystemMemory` and `SingleVirtualDeviceMemoryLimit` in
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/gpu/gpu_device.cc. The
    thresholds are also in the machine code of TensorFlow 2.21.0 for Linux (`BaseGPUDeviceFactory::CreateDevices` in
    libtensorflow_framework.so.2). Earlier versions reserve 1536 MiB from 8 on.

    Args:
        free_bytes: free memory in bytes after the CUDA context is created.
        compute_capability: (major, minor).

    Raises:
        UsageError: If the memory is negative.

    Examples:
        >>> allocator_bytes(8 * 2**30, (8, 6)) == 8 * 2**30 - 1536 * 2**20
        True
    """
    if free_bytes < 0:
        raise UsageError(f"device memory must not be negative; got {free_bytes}")
    major = compute_capability[0]
    reserve = 225 * MIB
    if free_bytes >= 2 * GIB:
        reserve = {7: 1050, 8: 1536}.get(major, 500 if major < 7 else 1800) * MIB
    return free_bytes - reserve if reserve < free_bytes else free_bytes


def largest_context(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of the largest CUDA context of a compute capability, or of the next lower one."""
    known = {card.compute_capability for card in all_cards()}
    closest = max((capability for capability in known if capability <= compute_capability), default=min(known))
    return max(card.context_bytes for card in all_cards() if card.compute_capability == closest)


@functools.cache
def all_cards() -> tuple[Card, ...]:
    """Return all cards of the catalogue, the oldest architecture first."""
    return tuple(_card(row) for row in package_data(__package__, "cards")["cards"])


def families() -> dict[str, list[str]]:
    """Return the keys of the cards by the family's name."""
    keys: dict[str, list[str]] = package_data(__package__, "cards")["families"]
    return keys


def hardware_of(card: Card) -> dict[str, Any] | None:
    """Return the figures of a card that XLA needs to compile for it, or None if they are unknown.

    Per multiprocessor (SM): `shared_memory_per_sm`, `shared_memory_per_block` (opt-in, above 48 KiB), `threads_per_sm`,
    `fpus_per_sm` (float32 units). Per card: `sms`, `clock_ghz` (boost), `bandwidth` in bytes per second, `l2_bytes`,
    and their `source`. `is_accelerated`: whether XLA compiles for the variant with features of this capability only
    ("sm_90a").
    """
    data = package_data(__package__, "cards")
    shared = data["capabilities"].get("{}.{}".format(*card.compute_capability))
    own = next(row.get("hardware") for row in data["cards"] if row["key"] == card.key)
    return None if shared is None or own is None else {**shared, **own}


def _card(row: dict[str, Any]) -> Card:
    major, minor = map(int, row["compute_capability"].split("."))
    values = {name: value for name, value in row.items() if name != "hardware"}
    values |= {"aliases": tuple(row["aliases"]), "compute_capability": (major, minor)}
    if "limit" in row:
        values["limit"] = LoggedLimit(**row["limit"])
    return Card(**values)


@dataclass(frozen=True)
class DeviceTarget:
    """Device to compare an estimate with.

    Args:
        name: name of the card, or the user's text of the size.
        memory_bytes: total memory in bytes.
        available_bytes: limit of TensorFlow's allocator in bytes.
        compute_capability: (major, minor), or None for a size.
        source: "catalogue" for a card, "size" for a size.
        note: origin and limitations of the figures.
        available_low: lowest limit of such cards in bytes. Defaults to `available_bytes`.
        available_high: highest limit of such cards in bytes. Defaults to `available_bytes`.

    Examples:
        >>> resolve_device("16GiB").available_bytes
        17179869184
    """

    name: str
    memory_bytes: int
    available_bytes: int
    compute_capability: tuple[int, int] | None
    source: Literal["catalogue", "size"]
    note: str
    available_low: int | None = None
    available_high: int | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest limit, between which a verdict is too close to call."""
        low, high = self.available_low, self.available_high
        return (self.available_bytes if low is None else low, self.available_bytes if high is None else high)

    def with_available(self, change: Callable[[int], int]) -> DeviceTarget:
        """Return the device with each limit changed by a function."""
        low, high = map(change, self.limits)
        return replace(self, available_bytes=change(self.available_bytes), available_low=low, available_high=high)


def available_on_device(memory_bytes: int, name: str, compute_capability: tuple[int, int]) -> int:
    """Return the default limit of TensorFlow's allocator on a GPU.

    Args:
        memory_bytes: total memory in bytes, as reported by the driver.
        name: name of the GPU. The catalogue has the CUDA context of known cards.
        compute_capability: (major, minor).
    """
    card = _by_name().get(_normal(name))
    context = largest_context(compute_capability) if card is None else card.context_bytes
    return allocator_bytes(memory_bytes - context, compute_capability)


def find_card(name: str) -> Card:
    """Return the card with this name.

    Case, spaces, dashes and the words NVIDIA, Tesla and GeForce are ignored, so names of NVML and nvidia-smi match too.

    Args:
        name: a key or alias, such as "a100-40", "3090", "Tesla V100-SXM2-16GB".

    Raises:
        UsageError: If no card, or more than one, has the name.

    Examples:
        >>> find_card("NVIDIA A100-SXM4-80GB").key
        'a100-80'
    """
    normalized = _normal(name)
    card = _by_name().get(normalized)
    if card is not None:
        return card
    if normalized in families():
        cards = [card for card in all_cards() if card.key in families()[normalized]]
        several = ", ".join(f"{card.key} ({format_size(card.memory_bytes)})" for card in cards)
        raise UsageError(f"device must be one of {several}, {_OTHER_DEVICES}; got {name!r}")
    names = [known for card in all_cards() for known in (card.key, *card.aliases)]
    raise UsageError(f"device must be a card of the catalogue, {_OTHER_DEVICES}; got {name!r}{nearest(name, names)}")


def resolve_device(text: str) -> DeviceTarget:
    """Return the device with a card's name or a size.

    Args:
        text: name of a card for `find_card`, or size for `kerasmem.units.parse_size`. A number that is the name of a
            card ("3090") means the card.

    Returns:
        The device. For a card, `available_bytes` excludes the CUDA context and TensorFlow's reserve.

    Raises:
        UsageError: If the text is neither, is the name of several cards, or is a size below 1 MiB.

    Examples:
        >>> resolve_device("rtx 3090").source, resolve_device("24GB").source
        ('catalogue', 'size')
    """
    if not is_size(text) or _normal(text) in _by_name():
        return _target(find_card(text))
    memory = parse_size(text, field="device")
    if memory < _LEAST_SIZE:
        raise UsageError(
            f"device must have at least {format_size(_LEAST_SIZE)}; got {text!r}, that is {format_size(memory)}. Write "
            "the unit, as in 16GB, or a card's name"
        )
    note = "a size from the user: the allocator's memory, from which nothing is subtracted"
    return DeviceTarget(text.strip(), memory, memory, None, "size", note)


def _target(card: Card) -> DeviceTarget:
    bases = {
        "driver": "reported by the driver",
        "log": "derived from a log",
        "datasheet": "nominal, from the datasheet",
    }
    total = f"total {bases[card.memory_basis]} ({unquote(card.memory_source)})"
    if card.limit is None:
        available = (
            f"less {format_size(card.context_bytes)} for the CUDA context ({card.context_basis}) and TensorFlow's "
            "system reserve, which cuBLAS, cuDNN and NCCL use; other processes are not modelled"
        )
    else:
        logs = "one log" if card.limit.logs == 1 else f"the median of {card.limit.logs} logs"
        lowest, highest = (format_size(size * MIB) for size in (card.limit.lowest, card.limit.highest))
        available = (
            f"{logs} of {card.limit.source}, from {lowest} to {highest}; by TensorFlow's rule an idle card has "
            f"{format_size(card.rule_bytes)}"
        )
    note = f"{total}; available: {available}. {card.note}"
    name, memory, capability = card.name, card.memory_bytes, card.compute_capability
    limits = () if card.limit is None else card.limits
    return DeviceTarget(name, memory, card.available_bytes, capability, "catalogue", note, *limits)


def _normal(name: str) -> str:
    """Normalize a name for comparison, without case, separators and brands."""
    return _BRANDS.sub("", re.sub(r"[^a-z0-9]+", "", name.lower()))


@functools.cache
def _by_name() -> dict[str, Card]:
    return {_normal(name): card for card in all_cards() for name in (card.key, card.name, *card.aliases)}
