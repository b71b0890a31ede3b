"""The GPUs and the host memory of this machine now, without TensorFlow, and the NVML device behind a CUDA ordinal.

NVML lists every GPU by its place on the bus. CUDA lists those that CUDA_VISIBLE_DEVICES lets through, in that
variable's order. Numbers in it count GPUs by CUDA_DEVICE_ORDER: PCI_BUS_ID, or (by default) the fastest first. Only
CUDA knows the latter order if the cards differ; then the card's name decides. Sources: the "CUDA Environment Variables"
chapter of NVIDIA's CUDA C++ Programming Guide, and the MIG User Guide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerasmem.devices.host import HostMemory, host_memory
from kerasmem.devices.nvml import DriverMemory, Nvml, NvmlApi, NvmlDevice
from kerasmem.records import Record
from kerasmem.units import format_size


@dataclass(frozen=True)
class LiveDevice(Record, what="device"):
    """A GPU of this machine, or a MIG instance of one, and its memory now.

    Attributes:
        index: the driver's index of the GPU (of the parent, for a MIG instance).
        kind: "gpu", "mig" (an instance) or "mig parent" (a GPU divided into instances).
        name: the driver's name for it.
        uuid: its identifier for CUDA_VISIBLE_DEVICES.
        compute_capability: such as "7.5".
        total_bytes: the device's memory; None if unknown.
        used_bytes: in use, by all processes.
        free_bytes: free.
        driver_version: the NVIDIA driver's version.
        parent_uuid: for a MIG instance, the GPU it is a part of.
        cuda_index: CUDA's number of it in this process, and so the N of TensorFlow's GPU:N;
            None if CUDA_VISIBLE_DEVICES hides it.
        notes: why a figure is missing, or the number is in doubt.
    """

    index: int
    kind: str
    name: str | None
    uuid: str | None
    compute_capability: str | None
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    driver_version: str | None
    parent_uuid: str | None
    cuda_index: int | None
    notes: tuple[str, ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability in numbers, or None if unknown."""
        major, _, minor = (self.compute_capability or "").partition(".")
        return (int(major), int(minor)) if major and minor else None


@dataclass(frozen=True)
class LiveMachine(Record, what="machine", version=1):
    """GPUs and host memory of this machine.

    Attributes:
        devices: its GPUs.
        reason: why there are none to list; None if there are.
        host: its host memory.
        notes: further messages of the driver, such as a lost card.
    """

    devices: tuple[LiveDevice, ...]
    reason: str | None
    host: HostMemory
    notes: tuple[str, ...] = ()


def read_machine(*, api: NvmlApi | None = None, environ: Mapping[str, str] | None = None) -> LiveMachine:
    """Read the GPUs and the host memory of this machine, without TensorFlow.

    Args:
        api: a stand-in for nvidia-ml-py, such as a recording.
        environ: environment variables that choose GPUs; default: this process's.

    Examples:
        >>> machine = read_machine()
        >>> bool(machine.devices) or bool(machine.reason)
        True
    """
    nvml, reason = Nvml.open(api)
    if nvml is None:
        return LiveMachine((), reason, host_memory())
    with contextlib.closing(nvml):
        variables = os.environ if environ is None else environ
        numbers = {id(device): number for number, device in enumerate(visible_devices(nvml.devices, variables))}
        devices = tuple(_live(nvml, device, numbers.get(id(device))) for device in nvml.devices)
        reason = None if devices else "the NVIDIA driver is loaded and lists no GPU that can be opened"
        differ = len({device.name for device in devices if device.parent_uuid is None}) > 1
        if differ and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            nvml.notes.append(
                "the GPUs differ and CUDA numbers the fastest first, which the driver does not tell; "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers certain"
            )
        return LiveMachine(devices, reason, host_memory(), tuple(nvml.notes))


def list_devices(*, api: NvmlApi | None = None, environ: Mapping[str, str] | None = None) -> list[LiveDevice]:
    """Return the GPUs of this machine, an empty list if there are none (`read_machine` has the reason).

    Args:
        api, environ: as for `read_machine`.

    Examples:
        >>> all(device.total_bytes is None or device.total_bytes > 0 for device in list_devices())
        True
    """
    return list(read_machine(api=api, environ=environ).devices)


def find_device(ordinal: int, name: str | None = None) -> LiveDevice | None:
    """Return the GPU behind a CUDA ordinal, or None if the driver does not list it.

    Args:
        ordinal: CUDA's number of it in this process.
        name: CUDA's name for it.
    """
    nvml, _ = Nvml.open()
    if nvml is None:
        return None
    with contextlib.closing(nvml):
        device = match_card(nvml.devices, os.environ, ordinal, name)
        return None if device is None else _live(nvml, device, ordinal)


def _live(nvml: Nvml, device: NvmlDevice, cuda_index: int | None) -> LiveDevice:
    memory, why_not = nvml.memory(device)
    capability = device.compute_capability
    return LiveDevice(
        index=device.index,
        kind="mig parent" if device.mig else "mig" if device.parent_uuid else "gpu",
        name=device.name,
        uuid=device.uuid,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        **(memory._asdict() if memory else dict.fromkeys(DriverMemory._fields)),
        driver_version=nvml.driver_version,
        parent_uuid=device.parent_uuid,
        cuda_index=cuda_index,
        notes=() if why_not is None else (why_not,),
    )


def visible_devices(devices: Sequence[NvmlDevice], environ: Mapping[str, str]) -> list[NvmlDevice]:
    """Return the devices that CUDA sees, in CUDA's order if the cards are alike.

    A GPU that is divided into MIG instances is represented by its first instance, as in CUDA.

    Args:
        devices: everything that NVML lists, MIG instances included.
        environ: environment variables; CUDA_VISIBLE_DEVICES is read.
    """
    first_instances = {device.parent_uuid: device for device in reversed(devices) if device.parent_uuid}
    cards = sorted((device for device in devices if device.parent_uuid is None), key=_bus)
    cards = [first_instances.get(card.uuid or "", card) for card in cards]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return cards
    visible: list[NvmlDevice] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.isdecimal():
            named = cards[int(entry) :][:1]
        elif entry.startswith(("GPU-", "MIG-")):  # a beginning is enough if it fits one device only
            named = [device for device in devices if (device.uuid or "").startswith(entry)]
        else:
            named = []
        if len(named) != 1:  # CUDA stops at the first entry that is not a device
            break
        visible += named
    return visible


def match_card(
    devices: Sequence[NvmlDevice], environ: Mapping[str, str], ordinal: int, card: str | None = None
) -> NvmlDevice | None:
    """Return the NVML device behind a CUDA ordinal, or None if the driver does not list it.

    Args:
        devices: everything that NVML lists.
        environ: environment variables, as in `visible_devices`.
        ordinal: the ordinal of the GPU in the list that CUDA gives to this process.
        card: the name that CUDA gives the GPU, which decides if the cards differ.
    """
    visible = visible_devices(devices, environ)
    device = visible[ordinal] if ordinal < len(visible) else None
    if card is None or (device is not None and _has_name(device, card)):
        return device
    named = [device for device in devices if _has_name(device, card)]
    return named[0] if len(named) == 1 else None


def _bus(device: NvmlDevice) -> tuple[bool, str, int]:
    return device.pci_bus_id is None, device.pci_bus_id or "", device.index


def _has_name(device: NvmlDevice, card: str) -> bool:
    return (device.name or "").removeprefix("NVIDIA ") == card.removeprefix("NVIDIA ")


def others_on_card(nvml: Nvml, device: NvmlDevice, total_bytes: int | None) -> list[str]:
    """Describe the other processes with memory on a card, the largest first. Takes milliseconds.

    Args:
        nvml: the open connection that the device came from.
        device: the card.
        total_bytes: the card's memory, or None if unknown.
    """
    import psutil

    others = [(used, pid) for pid, used in nvml.processes(device) if used is not None and pid != os.getpid()]
    found = []
    for used, pid in sorted(others, reverse=True):
        name, share = "", f", {100 * used / total_bytes:.0f} % of the card" if total_bytes else ""
        with contextlib.suppress(psutil.Error, OSError):
            name = f" ({psutil.Process(pid).name()!r})"
        found.append(f"process {pid}{name} has {format_size(used)} there{share}")
    return found
