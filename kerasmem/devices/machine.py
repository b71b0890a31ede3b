"""GPUs and host memory of this machine without TensorFlow, and the NVML device of a CUDA ordinal.

NVML lists all GPUs by their position on the bus. CUDA lists those in CUDA_VISIBLE_DEVICES, in its order. Numbers in
this variable follow CUDA_DEVICE_ORDER: PCI_BUS_ID or, by default, the fastest first. Only CUDA knows the latter order
if the cards differ, so the card's name decides. Sources: the chapter "CUDA Environment Variables" of NVIDIA's CUDA C++
Programming Guide, and the MIG User Guide.
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
    """GPU of this machine, or MIG instance of one, with its current memory.

    Attributes:
        index: the driver's index of the GPU, or of the parent of a MIG instance.
        kind: "gpu", "mig" (an instance) or "mig parent" (a GPU divided into instances).
        name: the driver's name of the device.
        uuid: its identifier for CUDA_VISIBLE_DEVICES.
        compute_capability: compute capability, such as "7.5".
        total_bytes: memory of the device; None if unknown.
        used_bytes: memory in use by all processes.
        free_bytes: free memory.
        driver_version: version of the NVIDIA driver.
        parent_uuid: UUID of the GPU of a MIG instance.
        cuda_index: CUDA ordinal in this process, which is the N of TensorFlow's GPU:N; None if CUDA_VISIBLE_DEVICES
            hides the device.
        notes: reasons for missing figures or an uncertain ordinal.
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
        """Compute capability as (major, minor), or None if unknown."""
        major, _, minor = (self.compute_capability or "").partition(".")
        return (int(major), int(minor)) if major and minor else None


@dataclass(frozen=True)
class LiveMachine(Record, what="machine", version=1):
    """GPUs and host memory of this machine.

    Attributes:
        devices: the GPUs.
        reason: the reason for missing GPUs, or None.
        host: host memory.
        notes: other messages of the driver, such as a lost card.
    """

    devices: tuple[LiveDevice, ...]
    reason: str | None
    host: HostMemory
    notes: tuple[str, ...] = ()


def read_machine(*, api: NvmlApi | None = None, environ: Mapping[str, str] | None = None) -> LiveMachine:
    """Read the GPUs and the host memory of this machine, without TensorFlow.

    Args:
        api: replacement of nvidia-ml-py, such as a recording.
        environ: environment variables. Defaults to this process's.

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
        reason = None if devices else "the NVIDIA driver lists no GPU that can be opened"
        differ = len({device.name for device in devices if device.parent_uuid is None}) > 1
        if differ and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            nvml.notes.append(
                "the GPUs differ, and CUDA numbers the fastest first, which the driver does not report; set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID for reliable numbers"
            )
        return LiveMachine(devices, reason, host_memory(), tuple(nvml.notes))


def list_devices(*, api: NvmlApi | None = None, environ: Mapping[str, str] | None = None) -> list[LiveDevice]:
    """Return the GPUs of this machine. If there are none, `read_machine` has the reason.

    Args:
        api, environ: arguments of `read_machine`.

    Examples:
        >>> all(device.total_bytes is None or device.total_bytes > 0 for device in list_devices())
        True
    """
    return list(read_machine(api=api, environ=environ).devices)


def find_device(ordinal: int, name: str | None = None) -> LiveDevice | None:
    """Return the GPU with a CUDA ordinal, or None if the driver does not list it.

    Args:
        ordinal: CUDA ordinal in this process.
        name: CUDA's name of the GPU.
    """
    nvml, _ = Nvml.open()
    if nvml is None:
        return None
    with contextlib.closing(nvml):
        device = match_card(nvml.devices, os.environ, ordinal, name)
        return None if device is None else _live(nvml, device, ordinal)


def _live(nvml: Nvml, device: NvmlDevice, cuda_index: int | None) -> LiveDevice:
    memory, reason = nvml.memory(device)
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
        notes=() if reason is None else (reason,),
    )


def visible_devices(devices: Sequence[NvmlDevice], environ: Mapping[str, str]) -> list[NvmlDevice]:
    """Return the devices that CUDA sees, in CUDA's order if the cards are equal.

    As in CUDA, the first MIG instance represents its GPU.

    Args:
        devices: all devices of NVML, including MIG instances.
        environ: environment variables with CUDA_VISIBLE_DEVICES.
    """
    first_instances = {device.parent_uuid: device for device in reversed(devices) if device.parent_uuid}
    cards = sorted((device for device in devices if device.parent_uuid is None), key=_bus)
    cards = [first_instances.get(card.uuid or "", card) for card in cards]
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return cards
    visible: list[NvmlDevice] = []
    for entry in map(str.strip, setting.split(",")):
        if entry.isdecimal():
            matches = cards[int(entry) :][:1]
        elif entry.startswith(("GPU-", "MIG-")):  # a unique prefix is sufficient
            matches = [device for device in devices if (device.uuid or "").startswith(entry)]
        else:
            matches = []
        if len(matches) != 1:  # CUDA ignores the entries after an invalid one
            break
        visible += matches
    return visible


def match_card(
    devices: Sequence[NvmlDevice], environ: Mapping[str, str], ordinal: int, card: str | None = None
) -> NvmlDevice | None:
    """Return the NVML device with a CUDA ordinal, or None if the driver does not list it.

    Args:
        devices: all devices of NVML.
        environ: environment variables with CUDA_VISIBLE_DEVICES.
        ordinal: CUDA ordinal in this process.
        card: CUDA's name of the GPU, which decides if the cards differ.
    """
    visible = visible_devices(devices, environ)
    device = visible[ordinal] if ordinal < len(visible) else None
    if card is None or (device is not None and _has_name(device, card)):
        return device
    matches = [device for device in devices if _has_name(device, card)]
    return matches[0] if len(matches) == 1 else None


def _bus(device: NvmlDevice) -> tuple[bool, str, int]:
    return device.pci_bus_id is None, device.pci_bus_id or "", device.index


def _has_name(device: NvmlDevice, card: str) -> bool:
    return (device.name or "").removeprefix("NVIDIA ") == card.removeprefix("NVIDIA ")


def others_on_card(nvml: Nvml, device: NvmlDevice, total_bytes: int | None) -> list[str]:
    """Describe the other processes with memory on a card, the largest first. It takes milliseconds.

    Args:
        nvml: open connection of the device.
        device: the card.
        total_bytes: the card's memory, or None if unknown.
    """
    import psutil

    others = [(used, pid) for pid, used in nvml.processes(device) if used is not None and pid != os.getpid()]
    descriptions = []
    for used, pid in sorted(others, reverse=True):
        name, share = "", f", {100 * used / total_bytes:.0f} % of the card" if total_bytes else ""
        with contextlib.suppress(psutil.Error, OSError):
            name = f" ({psutil.Process(pid).name()!r})"
        descriptions.append(f"process {pid}{name} has {format_size(used)} there{share}")
    return descriptions
