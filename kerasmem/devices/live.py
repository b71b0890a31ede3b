"""The GPUs and the host memory of this machine now, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kerasmem.devices.host import HostMemory, host_memory
from kerasmem.devices.nvml import DriverMemory, Nvml, NvmlApi, NvmlDevice
from kerasmem.devices.visible import match_card, visible_devices
from kerasmem.records import Record

__all__ = ["HostMemory", "LiveDevice", "LiveMachine", "host_memory", "list_devices", "read_machine"]


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
        api: a stand-in for nvidia-ml-py, such as a recording.
        environ: environment variables that choose GPUs; default: this process's.

    Examples:
        >>> all(device.total_bytes is None or device.total_bytes > 0 for device in list_devices())
        True
    """
    return list(read_machine(api=api, environ=environ).devices)


def find_device(
    ordinal: int, name: str | None = None, *, api: NvmlApi | None = None, environ: Mapping[str, str] | None = None
) -> LiveDevice | None:
    """Return the GPU behind a CUDA ordinal, or None if the driver does not list it.

    Args:
        ordinal: CUDA's number of it in this process.
        name: CUDA's name for it.
        api: a stand-in for nvidia-ml-py, such as a recording.
        environ: environment variables that choose GPUs. Defaults to this process's.
    """
    nvml, _ = Nvml.open(api)
    if nvml is None:
        return None
    with contextlib.closing(nvml):
        match = match_card(nvml.devices, os.environ if environ is None else environ, ordinal, name)
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
