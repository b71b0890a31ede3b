"""Cards by name, and how much of a card TensorFlow's allocator can get.

    >>> find_card("Tesla T4").key
    't4'
    >>> resolve_device("t4").available_bytes < find_card("t4").memory_bytes
    True

A device is named in one of two ways, and they mean different things:

- **a card** ("t4", "a100-80", "NVIDIA GeForce RTX 3090"): `memory_bytes` is the card's total, and
  `available_bytes` is what TensorFlow's allocator may take of it by default, beside its CUDA context;
- **a size** ("16GB", "11GiB"): the memory that the allocator has, as it is. Nothing is subtracted, because
  the compute capability, on which TensorFlow's reserve depends, is not known, and because whoever gives a
  size may mean a limit that was set for the allocator.

The rule by which a card's total was chosen is in `kerasmem.devices.cards`, beside the rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from kerasmem.checks import nearest
from kerasmem.devices.cards import Card, all_cards, allocator_bytes, families, largest_context
from kerasmem.errors import UsageError
from kerasmem.units import MIB, format_size, is_size, parse_size

_BRANDS = re.compile(r"^(nvidia|tesla|geforce)+")
_WAY_OUT = "or give a size such as 16GB; `kerasmem devices` lists the cards"
_LEAST_SIZE = MIB


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
