"""The GPUs and the host memory of this machine now, without TensorFlow, and the NVML device behind a CUDA ordinal.

NVML lists every GPU by its place on the bus. CUDA lists those that CUDA_VISIBLE_DEVICES lets through, in that
variable's order; if it holds numbers they count GPUs in the order that CUDA_DEVICE_ORDER asks for:
PCI_BUS_ID, or (by default) the fastest first, which only CUDA knows where the cards differ. Sources: the
"CUDA Environment Variables" chapter of NVIDIA's CUDA C++ Programming Guide, and the MIG User Guide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        matches = visible_devices(nvml.devices, os.environ if environ is None else environ)
        seen = {
            id(match.device): (number, match.doubt) for number, match in enumerate(matches) if match.device is not None
        }
        found = tuple(_live(nvml, device, *seen.get(id(device), (None, None))) for device in nvml.devices)
        reason = None if found else "the NVIDIA driver is loaded and lists no GPU that can be opened"
        return LiveMachine(found, reason, host_memory(), tuple(nvml.notes))


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
        match = match_card(nvml.devices, os.environ, ordinal, name)
        return None if match.device is None else _live(nvml, match.device, ordinal, match.doubt)


def _live(nvml: Nvml, device: NvmlDevice, cuda_index: int | None, doubt: str | None) -> LiveDevice:
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
        notes=tuple(note for note in (why_not, doubt) if note),
    )


@dataclass(frozen=True)
class Match:
    """The NVML device behind a CUDA ordinal.

    Attributes:
        device: the device, or None if none was found.
        doubt: why the match is only the likeliest one, or why there is none; None when it is certain.
    """

    device: NvmlDevice | None
    doubt: str | None = None


def visible_devices(devices: Sequence[NvmlDevice], environ: Mapping[str, str]) -> list[Match]:
    """Return the devices that CUDA sees, in CUDA's order.

    Args:
        devices: everything that NVML lists, MIG instances included.
        environ: environment variables; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read.

    Returns:
        One match for each CUDA ordinal.
    """
    whole = sorted((device for device in devices if device.parent_uuid is None), key=_bus)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({device.name for device in whole}) < 2:
        doubt = None
    else:
        doubt = (
            "the GPUs here differ and CUDA numbers the fastest first, which the driver does not tell; "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers certain"
        )
    if wanted is None:
        return _enumerated([Match(device, doubt) for device in whole], devices)
    found: list[Match] = []
    for entry in (part.strip() for part in wanted.split(",")):
        match = _entry_match(entry, whole, devices, doubt)
        if match is None:  # CUDA stops at the first entry that is not a device
            break
        found.append(match)
    return _enumerated(found, devices)


def match_card(
    devices: Sequence[NvmlDevice], environ: Mapping[str, str], ordinal: int, card: str | None = None
) -> Match:
    """Return the NVML device behind a CUDA ordinal.

    Args:
        devices: everything that NVML lists.
        environ: environment variables, as in `visible_devices`.
        ordinal: the ordinal of the GPU in the list that CUDA gives to this process.
        card: the name that CUDA gives the GPU, which settles the matter where the cards differ.
    """
    visible = visible_devices(devices, environ)
    chosen = visible[ordinal] if ordinal < len(visible) else Match(None)
    if card is None or (chosen.device is not None and _same_name(chosen.device, card)):
        if chosen.device is None:
            return Match(None, f"the driver lists {len(visible)} visible GPUs, and this is number {ordinal}")
        if chosen.doubt and sum(_same_name(device, card or "") for device in devices) == 1:
            return Match(chosen.device)
        return chosen
    named = [device for device in devices if _same_name(device, card)]
    if len(named) == 1:
        return Match(named[0])
    if not named:
        return Match(None, f"the driver lists no {card}")
    return Match(None, f"the driver lists {len(named)} devices called {card}, and which one this is is not known")


def _entry_match(
    entry: str, whole: Sequence[NvmlDevice], devices: Sequence[NvmlDevice], doubt: str | None
) -> Match | None:
    """Return the device of one entry of CUDA_VISIBLE_DEVICES."""
    if entry.isdecimal():
        return Match(whole[int(entry)], doubt) if int(entry) < len(whole) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    named = [device for device in devices if (device.uuid or "").startswith(entry)]
    return Match(named[0]) if len(named) == 1 else None  # a beginning is enough if it fits one device only


def _enumerated(found: list[Match], devices: Sequence[NvmlDevice]) -> list[Match]:
    """Replace divided GPUs by instances. CUDA gives a process one instance of each."""
    result = []
    for match in found:
        device = match.device
        if device is not None and device.mig:
            inside = [other for other in devices if other.parent_uuid == device.uuid]
            doubt = None
            if len(inside) != 1:
                doubt = f"{device.name} is divided into {len(inside)} MIG instances; CUDA takes the first"
            match = replace(match, device=inside[0] if inside else None, doubt=doubt or match.doubt)
        result.append(match)
    return result


def _bus(device: NvmlDevice) -> tuple[bool, str, int]:
    return device.pci_bus_id is None, device.pci_bus_id or "", device.index


def _same_name(device: NvmlDevice, card: str) -> bool:
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
