"""NVML's answers written down in the form of `tests/data/nvml`, without what names the machine."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

_NOT_AVAILABLE = 2**64 - 1


class Recorder:
    """Asks NVML what kerasmem asks it, and keeps the answers and the errors.

    Args:
        api: nvidia-ml-py's `pynvml`, or a stand-in with its functions.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._init: Any = None
        self._handles: list[Any] = []
        self._readings: list[list[Any]] = []

    def __enter__(self) -> Recorder:
        self._init = self._asked(self._api.nvmlInit)
        if self._init is None:
            self._handles = [
                self._asked(self._api.nvmlDeviceGetHandleByIndex, index)
                for index in range(self._api.nvmlDeviceGetCount())
            ]
            self._readings = [[] for _ in self._handles]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._init is None:
            self._api.nvmlShutdown()

    def read(self) -> None:
        """Read the memory of every device once."""
        for handle, readings in zip(self._handles, self._readings, strict=True):
            if not _is_error(handle):
                readings.append(self._memory(handle))

    def recording(self, what: str) -> dict[str, Any]:
        """Return everything that was answered.

        Args:
            what: the situation, in words.
        """
        if self._init is not None:
            return {"what": what, "init": self._init}
        return {
            "what": what,
            "init": None,
            "driver_version": self._asked(self._api.nvmlSystemGetDriverVersion),
            "devices": [
                handle if _is_error(handle) else self._device(handle, index, readings)
                for index, (handle, readings) in enumerate(zip(self._handles, self._readings, strict=True))
            ],
        }

    def _device(self, handle: Any, index: int, readings: list[Any]) -> dict[str, Any]:
        api = self._api
        mode = self._asked(api.nvmlDeviceGetMigMode, handle)
        found = {
            "name": self._asked(api.nvmlDeviceGetName, handle),
            "uuid": f"GPU-00000000-0000-0000-0000-{index:012}",
            "pci_bus_id": self._asked(lambda each: api.nvmlDeviceGetPciInfo(each).busId, handle),
            "compute_capability": self._asked(api.nvmlDeviceGetCudaComputeCapability, handle),
            "memory": readings[0] if all(each == readings[0] for each in readings) else readings,
            "mig_mode": mode,
            "processes": self._processes(handle),
        }
        if not _is_error(mode):
            found["max_mig_devices"] = self._asked(api.nvmlDeviceGetMaxMigDeviceCount, handle)
            found["instances"] = self._instances(handle, found["max_mig_devices"] if mode[0] else 0, index)
        return found

    def _instances(self, handle: Any, count: Any, index: int) -> list[Any]:
        found: list[Any] = []
        for slot in range(count if isinstance(count, int) else 0):
            instance = self._asked(self._api.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
            if not _is_error(instance):
                instance = {
                    "name": self._asked(self._api.nvmlDeviceGetName, instance),
                    "uuid": f"MIG-00000000-0000-0000-{index:04}-{slot:012}",
                    "memory": self._memory(instance),
                    "processes": self._processes(instance),
                }
            found.append(instance)
        while found and _is_error(found[-1]):  # slots that are empty
            found.pop()
        return found

    def _memory(self, handle: Any) -> Any:
        def sizes(each: Any) -> dict[str, int]:
            memory = self._api.nvmlDeviceGetMemoryInfo(each)
            return {"total": memory.total, "used": memory.used, "free": memory.free}

        return self._asked(sizes, handle)

    def _processes(self, handle: Any) -> Any:
        def listed(each: Any) -> list[dict[str, int | None]]:
            found = self._api.nvmlDeviceGetComputeRunningProcesses(each)
            sizes = [None if one.usedGpuMemory == _NOT_AVAILABLE else one.usedGpuMemory for one in found]
            return [{"pid": number, "usedGpuMemory": size} for number, size in enumerate(sizes, 1001)]

        return self._asked(listed, handle)

    def _asked(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = question(*arguments)
        except self._api.NVMLError as error:
            return {"error": error.value}
        if isinstance(answer, bytes):
            return answer.decode(errors="replace")
        return list(answer) if isinstance(answer, tuple) else answer


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and set(answer) == {"error"}
