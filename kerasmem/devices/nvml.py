"""The NVIDIA driver's view, through NVML. The only module that touches it.

The driver counts everything on the card: what every process's allocator has reserved, handed out or not,
and the CUDA contexts. A memory query takes some 12 µs; a list of processes takes milliseconds, so it does not
belong in a training loop. NVML is initialised by `Nvml.open` and shut down by `close`, never at import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_NOT_AVAILABLE = 2**64 - 1  # what the driver writes in place of a count that it does not keep


# nvidia-ml-py's module `pynvml`, or a recorded stand-in with the functions of it that are called here; each of them may
# raise `NVMLError`, whose `value` is NVML's code.
NvmlApi = Any


class DriverMemory(NamedTuple):
    """The driver's figures of a device's memory, in bytes. `used` includes the driver's own share."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU, or a MIG instance of one, as the driver describes it.

    Attributes:
        index: NVML's index of the GPU (of the parent, for a MIG instance).
        name: the driver's name for it; None if unknown.
        uuid: "GPU-…" or "MIG-…"; None if unknown.
        pci_bus_id: position on the bus, such as "00000000:00:04.0"; None if unknown.
        compute_capability: major and minor, such as (7, 5); None if unknown.
        mig: True if the GPU is divided into MIG instances; those are devices of their own.
        parent_uuid: for a MIG instance, the GPU it is a part of.
        handle: NVML's own handle, good while the `Nvml` it came from is open.
    """

    index: int
    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    mig: bool = False
    parent_uuid: str | None = None
    handle: Any = None

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.name or self.uuid or f"GPU {self.index}"


class Nvml:
    """An open connection to the driver.

    Examples:
        >>> nvml, reason = Nvml.open()
        >>> if nvml is None:
        ...     assert reason
        ... else:
        ...     used = [nvml.memory(device) for device in nvml.devices]
        ...     nvml.close()
    """

    def __init__(self, api: NvmlApi) -> None:
        self._api = api
        self._pid = os.getpid()
        self._open = True
        self.driver_version: str | None = self._ask(api.nvmlSystemGetDriverVersion)
        self.notes: list[str] = []
        self.devices: tuple[NvmlDevice, ...] = tuple(self._describe_all())

    @classmethod
    def open(cls, api: NvmlApi | None = None) -> tuple[Nvml | None, str | None]:
        """Initialise NVML and describe the devices.

        Args:
            api: a stand-in for nvidia-ml-py, such as a recording.

        Returns:
            The connection and None; or None and the reason, if there is no driver to ask.
        """
        if api is None:
            import pynvml

            api = pynvml
        try:
            api.nvmlInit()
            return cls(api), None
        except api.NVMLError as error:
            return None, _why_no_driver(error)
        except OSError as error:
            return None, f"the NVIDIA driver's library cannot be loaded: {error}"

    def memory(self, device: NvmlDevice) -> tuple[DriverMemory | None, str | None]:
        """Return the device's memory and None, or None and the reason why it is not known."""
        if not self._open or os.getpid() != self._pid:
            return None, "this connection to the driver is closed, or belongs to the process that was forked"
        try:
            info = self._api.nvmlDeviceGetMemoryInfo(device.handle)
            total, used, free = info.total, info.used, info.free
        except self._api.NVMLError as error:
            return None, _why_no_memory(device, error)
        if not isinstance(total, int) or total in (0, _NOT_AVAILABLE) or used == _NOT_AVAILABLE:
            return None, _shared_memory(device)
        return DriverMemory(total, used, free), None

    def processes(self, device: NvmlDevice) -> list[tuple[int, int | None]]:
        """List the processes with memory on the device by number, with their bytes (None: unknown). Takes milliseconds.

        The list is empty if the driver does not list them.
        """
        api = self._api
        found: dict[int, int | None] = {}
        with contextlib.suppress(api.NVMLError):
            for ask in (api.nvmlDeviceGetComputeRunningProcesses, api.nvmlDeviceGetGraphicsRunningProcesses):
                for process in ask(device.handle):
                    used = process.usedGpuMemory
                    found[process.pid] = None if used == _NOT_AVAILABLE else used
        return sorted(found.items())

    def close(self) -> None:
        """Shut NVML down. May be called more than once."""
        if not self._open:
            return
        self._open = False
        if os.getpid() == self._pid:
            self._ask(self._api.nvmlShutdown)

    def _describe_all(self) -> Iterator[NvmlDevice]:
        for index in range(self._api.nvmlDeviceGetCount()):
            try:
                handle = self._api.nvmlDeviceGetHandleByIndex(index)
            except self._api.NVMLError as error:  # one lost card must not hide the others
                self.notes.append(f"GPU {index} cannot be opened: {error}")
                continue
            device = self._describe(index, handle)
            yield device
            if device.mig:
                yield from self._instances(device)

    def _describe(self, index: int, handle: Any, parent: NvmlDevice | None = None) -> NvmlDevice:
        api = self._api
        if parent is None:
            pci = self._ask(api.nvmlDeviceGetPciInfo, handle)
            bus = pci.busId if pci is not None else None
            capability = self._ask(api.nvmlDeviceGetCudaComputeCapability, handle)
            mode = self._ask(api.nvmlDeviceGetMigMode, handle)
        else:
            bus, capability, mode = parent.pci_bus_id, parent.compute_capability, None
        return NvmlDevice(
            index=index,
            name=self._ask(api.nvmlDeviceGetName, handle),
            uuid=self._ask(api.nvmlDeviceGetUUID, handle),
            pci_bus_id=bus,
            compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
            mig=bool(mode and mode[0]),
            parent_uuid=parent.uuid if parent else None,
            handle=handle,
        )

    def _instances(self, parent: NvmlDevice) -> Iterator[NvmlDevice]:
        count = self._ask(self._api.nvmlDeviceGetMaxMigDeviceCount, parent.handle) or 0
        for slot in range(count):
            handle = self._ask(self._api.nvmlDeviceGetMigDeviceHandleByIndex, parent.handle, slot)
            if handle is not None:  # an empty slot answers "Not Found"
                yield self._describe(parent.index, handle, parent)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the answer, or None if the driver has none."""
        try:
            return function(*args)
        except self._api.NVMLError:
            return None


def _code(error: Exception) -> int | None:
    return getattr(error, "value", None)


def _why_no_driver(error: Exception) -> str:
    reasons = {
        12: "no NVIDIA driver here: its library libnvidia-ml.so.1 is not found",
        9: "the NVIDIA driver is installed but not loaded",
        18: "the NVIDIA driver's library does not match its kernel module, as after an update; reboot",
        4: "no permission to talk to the NVIDIA driver; in a container, pass the GPUs in",
    }
    return reasons.get(_code(error) or 0, f"the NVIDIA driver cannot be reached: {error}")


def _why_no_memory(device: NvmlDevice, error: Exception) -> str:
    name, code = device.label, _code(error)
    if code == 3:
        return _shared_memory(device)
    if code == 4:
        whole = " as a whole; its MIG instances are listed apart" if device.mig else ""
        return f"{name}: no permission to read its memory{whole}"
    if code in (15, 16):
        return f"{name}: the driver has lost this GPU ({error}); it needs a reset"
    return f"{name}: the driver does not tell its memory: {error}"


def _shared_memory(device: NvmlDevice) -> str:
    return f"{device.label}: the driver keeps no count of its memory, as on systems where GPU and CPU share it"
