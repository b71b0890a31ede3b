"""Cards by name, and how much of a card TensorFlow's allocator can get.

    >>> find_card("Tesla T4").key
    't4'
    >>> resolve_device("t4").available_bytes < find_card("t4").memory_bytes
    True

A device is either a card or a size:

- **A card** ("t4", "a100-80", "NVIDIA GeForce RTX 3090"): `memory_bytes` is the card's total, and `available_bytes` is
  what TensorFlow's allocator takes of it by default, beside its CUDA context.
- **A size** ("16GB", "11GiB"): the memory that the allocator has. Nothing is subtracted, because TensorFlow's reserve
  depends on the compute capability, which is unknown, and because the size may be a limit set for the allocator.

The rows are in `data/cards.json`. docs/dev/cards.md has the rules for their figures.
"""

from __future__ import annotations

import functools
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import unquote

from kerasmem.checks import nearest
from kerasmem.errors import UsageError
from kerasmem.files import package_data
from kerasmem.units import GIB, MIB, format_size, is_size, parse_size

_BRANDS = re.compile(r"^(nvidia|tesla|geforce)+")
_WAY_OUT = "or give a size such as 16GB; `kerasmem devices` lists the cards"
_LEAST_SIZE = MIB


@dataclass(frozen=True)
class LoggedLimit:
    """The limit of TensorFlow's allocator on a card, by public logs.

    Attributes:
        mib: median, in MiB.
        lowest: lowest reading, in MiB.
        highest: highest reading, in MiB.
        logs: number of logs.
        source: TensorFlow's versions.
    """

    mib: int
    lowest: int
    highest: int
    logs: int
    source: str


@dataclass(frozen=True)
class Card:
    """One GPU card as the catalogue knows it.

    Args:
        key: the short name to write on a command line, such as "a100-40".
        name: the name for people, with the nominal size.
        aliases: other names, among them those that NVML reports.
        memory_bytes: total memory in bytes, chosen as the module's docstring tells.
        compute_capability: (major, minor).
        memory_source: the address of the memory figure.
        memory_basis: "driver" for a total that the driver reported, "log" for one derived from TensorFlow's limit,
            "datasheet" for the nominal capacity.
        capability_source: the address of the compute capability.
        context_bytes: size of a process's CUDA context.
        context_basis: "read" or "predicted".
        note: kind of the figure, and other reported ones.
        limit: the allocator's limit by logs, or None if there are none.

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
        """Bytes that TensorFlow's allocator can get by default: the logged limit, or the rule's."""
        if self.limit is not None:
            return self.limit.mib * MIB
        return allocator_bytes(self.memory_bytes - self.context_bytes, self.compute_capability)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values: sizes in bytes, the compute capability as "8.6".

        Examples:
            >>> find_card("t4").to_dict()["compute_capability"]
            '7.5'
        """
        capability = "{}.{}".format(*self.compute_capability)
        row = {**asdict(self), "aliases": list(self.aliases), "compute_capability": capability}
        return {**row, "available_bytes": self.available_bytes}


def allocator_bytes(free_bytes: int, compute_capability: tuple[int, int]) -> int:
    """Return how many bytes of a GPU's free memory TensorFlow's allocator takes by default.

    TensorFlow leaves a part to the system: 225 MiB if less than 2 GiB are free; else, by the major compute
    capability, 500 MiB up to 6, 1050 MiB for 7, 1536 MiB for 8 and 1800 MiB from 9 on. If that would leave nothing,
    the allocator gets all of it. cuBLAS, cuDNN and NCCL take theirs out of that part. The rule holds with and without
    memory growth. `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` and `gpu_options.experimental.gpu_system_memory_size_in_mb` put
    another figure in its place; `per_process_gpu_memory_fraction` and a logical device's `memory_limit` replace it.

    Source: `MinSystemMemory` and `SingleVirtualDeviceMemoryLimit` in
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/gpu/gpu_device.cc;
    the thresholds agree with the machine code in the Linux wheel of TensorFlow 2.21.0
    (`BaseGPUDeviceFactory::CreateDevices` in libtensorflow_framework.so.2).
    Earlier versions knew no step at 9 and left 1536 MiB from 8 on.

    Args:
        free_bytes: memory that is free when TensorFlow starts, with its CUDA context.
        compute_capability: (major, minor).

    Raises:
        UsageError: If the memory is negative.

    Examples:
        >>> allocator_bytes(8 * 2**30, (8, 6)) == 8 * 2**30 - 1536 * 2**20
        True
    """
    if free_bytes < 0:
        raise UsageError(f"device memory: {free_bytes} is negative")
    major = compute_capability[0]
    reserve = 225 * MIB
    if free_bytes >= 2 * GIB:
        reserve = {7: 1050, 8: 1536}.get(major, 500 if major < 7 else 1800) * MIB
    return free_bytes - reserve if reserve < free_bytes else free_bytes


def largest_context(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of the largest CUDA context of a compute capability, or of the nearest one below it."""
    known = {card.compute_capability for card in all_cards()}
    nearest = max((one for one in known if one <= compute_capability), default=min(known))
    return max(card.context_bytes for card in all_cards() if card.compute_capability == nearest)


@functools.cache
def all_cards() -> tuple[Card, ...]:
    """Return every card of the catalogue, oldest architecture first."""
    return tuple(_card(row) for row in package_data(__package__, "cards")["cards"])


def families() -> dict[str, list[str]]:
    """Return the names that stand for several cards, and the keys of those cards."""
    keys: dict[str, list[str]] = package_data(__package__, "cards")["families"]
    return keys


def hardware_of(card: Card) -> dict[str, Any] | None:
    """Return the figures that XLA needs to compile for a card, or None if they are not known.

    Per multiprocessor (SM): `shared_memory_per_sm`, `shared_memory_per_block` (beyond the usual 48 KiB),
    `threads_per_sm`, `fpus_per_sm` (float32 units). For the card: `sms`, `clock_ghz` (boost), `bandwidth` in bytes a
    second, `l2_bytes`, and the `source` of these. `is_accelerated`: XLA compiles for the variant with features of this
    capability alone ("sm_90a").
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
    """The device that an estimate is compared with.

    Args:
        name: the card's name, or the size as it was written.
        memory_bytes: total memory in bytes.
        available_bytes: bytes that TensorFlow's allocator can get; of a card, after the CUDA context.
        compute_capability: (major, minor); None if only a size is known.
        source: "catalogue" for a card, "size" for a size.
        note: origin of the figures, and what they leave out.

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


def available_on_device(memory_bytes: int, name: str, compute_capability: tuple[int, int]) -> int:
    """Return how many bytes of a GPU's memory TensorFlow's allocator can get, less the CUDA context.

    Args:
        memory_bytes: the GPU's total memory, as the driver reports it.
        name: its name; the context of a card in the catalogue is that card's.
        compute_capability: (major, minor).
    """
    card = _by_name().get(_normal(name))
    context = largest_context(compute_capability) if card is None else card.context_bytes
    return allocator_bytes(memory_bytes - context, compute_capability)


def find_card(name: str) -> Card:
    """Return the card with this name.

    Case, spaces, dashes and the words NVIDIA, Tesla and GeForce do not matter, so the names that NVML and
    nvidia-smi report are found as well as short ones.

    Args:
        name: a key or alias, such as "a100-40", "3090", "Tesla V100-SXM2-16GB".

    Returns:
        The row of the catalogue.

    Raises:
        UsageError: If no card has the name, or several do; the message lists the nearest, or the several.

    Examples:
        >>> find_card("NVIDIA A100-SXM4-80GB").key
        'a100-80'
    """
    wanted = _normal(name)
    card = _by_name().get(wanted)
    if card is not None:
        return card
    if wanted in families():
        several = ", ".join(
            f"{each.key} ({format_size(each.memory_bytes)})" for each in all_cards() if each.key in families()[wanted]
        )
        raise UsageError(f"device {name!r} is more than one card: name one of {several}, {_WAY_OUT}")
    names = [known for card in all_cards() for known in (card.key, *card.aliases)]
    raise UsageError(f"device {name!r} is not in the catalogue: name a card, {_WAY_OUT}{nearest(name, names)}")


def resolve_device(text: str) -> DeviceTarget:
    """Return the device that a text names: a card of the catalogue, or a size.

    Args:
        text: a card's name as `find_card` takes it, or a size as `kerasmem.units.parse_size` takes it. A
            number that is a card's name ("3090") means the card.

    Returns:
        The device. For a card, `available_bytes` leaves out the CUDA context and TensorFlow's system reserve; for
        a size it is the size.

    Raises:
        UsageError: If the text is neither, names several cards, or is a size below 1 MiB.

    Examples:
        >>> resolve_device("rtx 3090").source, resolve_device("24GB").source
        ('catalogue', 'size')
    """
    if not is_size(text) or _normal(text) in _by_name():
        return _target(find_card(text))
    memory = parse_size(text, field="device")
    if memory < _LEAST_SIZE:
        raise UsageError(
            f"device {text!r} reads as {format_size(memory)}, less than any device has: "
            f"write the unit, as in 16GB, or a card's name; `kerasmem devices` lists the cards"
        )
    note = "a size given by the user, taken as the memory that the allocator has; nothing was subtracted"
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
            "system reserve, out of which cuBLAS, cuDNN and NCCL take theirs; other processes are not modelled"
        )
    else:
        logs = "one log" if card.limit.logs == 1 else f"the median of {card.limit.logs} logs"
        lowest, highest = (format_size(size * MIB) for size in (card.limit.lowest, card.limit.highest))
        available = f"{logs} of {card.limit.source}, from {lowest} to {highest}"
    note = f"{total}; available: {available}. {card.note}"
    return DeviceTarget(card.name, card.memory_bytes, card.available_bytes, card.compute_capability, "catalogue", note)


def _normal(name: str) -> str:
    """Normalize a name for comparison: no case, separators and brand words."""
    return _BRANDS.sub("", re.sub(r"[^a-z0-9]+", "", name.lower()))


@functools.cache
def _by_name() -> dict[str, Card]:
    return {_normal(name): card for card in all_cards() for name in (card.key, card.name, *card.aliases)}
