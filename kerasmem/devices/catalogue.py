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

import difflib
import functools
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import unquote

from kerasmem.devices.cards import Card, all_cards, families
from kerasmem.devices.driver_memory import context_for, context_of
from kerasmem.errors import UsageError
from kerasmem.units import GIB, MIB, format_size, is_size, parse_size

__all__ = ["Card", "DeviceTarget", "available_bytes", "find_card", "resolve_device"]

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

    def to_dict(self) -> dict[str, Any]:
        """Return the device as JSON values: sizes in bytes, the compute capability as "7.5" or None.

        Returns:
            A new dictionary with one entry a field.

        Examples:
            >>> resolve_device("8GB").to_dict()["compute_capability"] is None
            True
        """
        capability = self.compute_capability
        return {**asdict(self), "compute_capability": None if capability is None else "{}.{}".format(*capability)}


def available_bytes(card_or_memory_bytes: Card | int, compute_capability: tuple[int, int] | None = None) -> int:
    """Return how many bytes of a GPU's memory TensorFlow's allocator can get by default.

    TensorFlow leaves a part of the free memory to the system: 225 MiB where less than 2 GiB are free; else,
    by the major compute capability, 500 MiB up to 6, 1050 MiB for 7, 1536 MiB for 8 and 1800 MiB from 9 on.
    There is no percentage in the rule. If the part would take everything, nothing is left out and the
    allocator gets all of it. It holds with and without memory growth. Not by default, and not modelled:
    `TF_DEVICE_MIN_SYS_MEMORY_IN_MB` and `gpu_options.experimental.gpu_system_memory_size_in_mb` put their
    own figure in place of this one, `per_process_gpu_memory_fraction` and a logical device's `memory_limit`
    replace the rule.

    TensorFlow applies the rule to the memory that is *free* when it looks, and by then its CUDA context and
    other processes have taken theirs. Of a card of the catalogue the context is taken off, as
    `kerasmem.devices.driver_memory` has it; plain bytes are taken for what is free. Other processes are not modelled.

    Source: `MinSystemMemory` and `SingleVirtualDeviceMemoryLimit` in
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/common_runtime/gpu/gpu_device.cc;
    the thresholds agree with the machine code in the Linux wheel of TensorFlow 2.21.0
    (`BaseGPUDeviceFactory::CreateDevices` in libtensorflow_framework.so.2).
    Earlier versions knew no step at 9 and left 1536 MiB from 8 on.

    Args:
        card_or_memory_bytes: a card of the catalogue, or memory in bytes.
        compute_capability: (major, minor). None takes the card's own; for plain bytes it means unknown, and
            then the bytes are the allocator's own and come back as they are.

    Returns:
        Bytes for the allocator, at most the memory given.

    Raises:
        UsageError: If the memory is negative.

    Examples:
        >>> available_bytes(8 * 2**30, (8, 6)) == 8 * 2**30 - 1536 * 2**20
        True
        >>> available_bytes(8 * 2**30)
        8589934592
    """
    if isinstance(card_or_memory_bytes, Card):
        card = card_or_memory_bytes
        return available_bytes(card.memory_bytes - context_of(card)[0], compute_capability or card.compute_capability)
    memory = card_or_memory_bytes
    if memory < 0:
        raise UsageError(f"device memory: {memory} is negative")
    if compute_capability is None:
        return memory
    reserve = _system_reserve(memory, compute_capability[0])
    return memory - reserve if reserve < memory else memory


def available_on_device(memory_bytes: int, name: str, compute_capability: tuple[int, int]) -> int:
    """Return how many bytes of a GPU's memory TensorFlow's allocator can get, less the CUDA context.

    Args:
        memory_bytes: the GPU's total memory, as the driver reports it.
        name: its name; the context of a card in the catalogue is that card's.
        compute_capability: (major, minor).
    """
    card = _by_name().get(_normal(name))
    context = context_for(compute_capability) if card is None else context_of(card)[0]
    return available_bytes(memory_bytes - context, compute_capability)


def _system_reserve(memory: int, major: int) -> int:
    """Return the bytes that TensorFlow leaves to the system on a GPU with `memory` bytes free."""
    if memory < 2 * GIB:
        return 225 * MIB
    return {7: 1050, 8: 1536}.get(major, 500 if major < 7 else 1800) * MIB


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
    near = _nearest(wanted)
    hint = f" (nearest: {', '.join(near)})" if near else ""
    raise UsageError(f"device {name!r} is not in the catalogue{hint}: name a card, {_WAY_OUT}")


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
    return DeviceTarget(text.strip(), memory, available_bytes(memory), None, "size", note)


def _target(card: Card) -> DeviceTarget:
    basis = "reported by the driver" if card.memory_basis == "driver" else "nominal, from the datasheet"
    context, how = context_of(card)
    note = (
        f"total {basis} ({unquote(card.memory_source)}); available: less {format_size(context)} for the CUDA context "
        f"({how}) and TensorFlow's system reserve, out of which cuBLAS, cuDNN and NCCL take theirs. Other processes "
        f"are not modelled. {card.note}"
    )
    return DeviceTarget(card.name, card.memory_bytes, available_bytes(card), card.compute_capability, "catalogue", note)


def _normal(name: str) -> str:
    """Normalize a name for comparison: no case, separators and brand words."""
    return _BRANDS.sub("", re.sub(r"[^a-z0-9]+", "", name.lower()))


def _nearest(wanted: str) -> list[str]:
    """Return up to three keys with names like `wanted`, the nearest first."""
    cards = _by_name()
    names = difflib.get_close_matches(wanted, [*cards, *families()], n=8, cutoff=0.6)
    keys = [key for name in names for key in ([cards[name].key] if name in cards else families()[name])]
    return list(dict.fromkeys(keys))[:3]


@functools.cache
def _by_name() -> dict[str, Card]:
    return {_normal(name): card for card in all_cards() for name in (card.key, card.name, *card.aliases)}
