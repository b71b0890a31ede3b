"""Memory and processes of NVIDIA's driver, from NVML. No other module uses it.

The driver counts all memory of the card: the memory that each process's allocator has reserved, in use or not, and the
CUDA contexts. A memory query takes about 12 µs. A list of processes takes milliseconds, so do not request it in a
training loop. `Nvml.open` initializes NVML, and `close` shuts it down.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_NOT_AVAILABLE = 2**64 - 1  # the driver's value of unknown counts

# The module `pynvml` of nvidia-ml-py, or a recording with the functions used here. They may raise `NVMLError`, with
# NVML's code in its `value`.
NvmlApi = Any


class DriverMemory(NamedTuple):
    """Memory of a device in bytes. `used_bytes` includes the driver's own memory."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class NvmlDevice:
    """GPU of the driver, or MIG instance of one.

    Attributes:
        index: NVML's index of the GPU, or of the parent of a MIG instance.
        name: the driver's name; None if unknown.
        uuid: "GPU-…" or "MIG-…"; None if unknown.
        pci_bus_id: position on the bus, such as "00000000:00:04.0"; None if unknown.
        compute_capability: major and minor, such as (7, 5); None if unknown.
        mig: whether the GPU is divided into MIG instances, which are separate devices.
        parent_uuid: UUID of the GPU of a MIG instance.
        handle: NVML's handle, valid while its `Nvml` is open.
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
        """Name for messages."""
        return self.name or self.uuid or f"GPU {self.index}"


class Nvml:
    """Open connection to the driver.

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
        self.driver_version: str | None = self._query(api.nvmlSystemGetDriverVersion)
        self.notes: list[str] = []
        self.devices: tuple[NvmlDevice, ...] = tuple(self._describe_all())

    @classmethod
    def open(cls, api: NvmlApi | None = None) -> tuple[Nvml | None, str | None]:
        """Initialize NVML and list the devices.

        Args:
            api: replacement of nvidia-ml-py, such as a recording.

        Returns:
            The connection and None, or None and the reason if there is no driver.
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
        """Return the device's memory and None, or None and the reason if it is unknown."""
        if not self._open or os.getpid() != self._pid:
            return None, "this connection to the driver is closed, or was opened before a fork"
        try:
            info = self._api.nvmlDeviceGetMemoryInfo(device.handle)
            total, used, free = info.total, info.used, info.free
        except self._api.NVMLError as error:
            return None, _why_no_memory(device, error)
        if not isinstance(total, int) or total in (0, _NOT_AVAILABLE) or used == _NOT_AVAILABLE:
            return None, _shared_memory(device)
        return DriverMemory(total, used, free), None

    def processes(self, device: NvmlDevice) -> list[tuple[int, int | None]]:
        """List the ids of processes with memory on the device, and their bytes (None if unknown). Takes milliseconds.

        The list is empty if the driver does not provide it.
        """
        api = self._api
        processes: dict[int, int | None] = {}
        with contextlib.suppress(api.NVMLError):
            for query in (api.nvmlDeviceGetComputeRunningProcesses, api.nvmlDeviceGetGraphicsRunningProcesses):
                for process in query(device.handle):
                    used = process.usedGpuMemory
                    processes[process.pid] = None if used == _NOT_AVAILABLE else used
        return sorted(processes.items())

    def close(self) -> None:
        """Shut NVML down. Repeated calls have no effect."""
        if not self._open:
            return
        self._open = False
        if os.getpid() == self._pid:
            self._query(self._api.nvmlShutdown)

    def _describe_all(self) -> Iterator[NvmlDevice]:
        for index in range(self._api.nvmlDeviceGetCount()):
            try:
                handle = self._api.nvmlDeviceGetHandleByIndex(index)
            except self._api.NVMLError as error:  # a lost card must not hide the others
                self.notes.append(f"GPU {index} cannot be opened: {error}")
                continue
            device = self._describe(index, handle)
            yield device
            if device.mig:
                yield from self._instances(device)

    def _describe(self, index: int, handle: Any, parent: NvmlDevice | None = None) -> NvmlDevice:
        api = self._api
        if parent is None:
            pci = self._query(api.nvmlDeviceGetPciInfo, handle)
            bus = pci.busId if pci is not None else None
            capability = self._query(api.nvmlDeviceGetCudaComputeCapability, handle)
            mode = self._query(api.nvmlDeviceGetMigMode, handle)
        else:
            bus, capability, mode = parent.pci_bus_id, parent.compute_capability, None
        return NvmlDevice(
            index=index,
            name=self._query(api.nvmlDeviceGetName, handle),
            uuid=self._query(api.nvmlDeviceGetUUID, handle),
            pci_bus_id=bus,
            compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
            mig=bool(mode and mode[0]),
            parent_uuid=parent.uuid if parent else None,
            handle=handle,
        )

    def _instances(self, parent: NvmlDevice) -> Iterator[NvmlDevice]:
        count = self._query(self._api.nvmlDeviceGetMaxMigDeviceCount, parent.handle) or 0
        for slot in range(count):
            handle = self._query(self._api.nvmlDeviceGetMigDeviceHandleByIndex, parent.handle, slot)
            if handle is not None:  # None for an empty slot
                yield self._describe(parent.index, handle, parent)

    def _query(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a query, or None if it fails."""
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
        4: "no permission to use the NVIDIA driver; if this is a container, start it with its GPUs",
    }
    return reasons.get(_code(error) or 0, f"the NVIDIA driver cannot be reached: {error}")


def _why_no_memory(device: NvmlDevice, error: Exception) -> str:
    name, code = device.label, _code(error)
    if code == 3:
        return _shared_memory(device)
    if code == 4:
        whole = " as a whole; its MIG instances are listed separately" if device.mig else ""
        return f"{name}: no permission to read its memory{whole}"
    if code in (15, 16):
        return f"{name}: the driver has lost this GPU ({error}); it needs a reset"
    return f"{name}: the driver does not report its memory: {error}"


def _shared_memory(device: NvmlDevice) -> str:
    return f"{device.label}: the driver does not report its memory, as on systems with memory shared by GPU and CPU"
