"""A stand-in for nvidia-ml-py's `pynvml` that plays a recording from tests/data/nvml.

The files are composed by hand in the driver's units from public figures and NVML's documented errors; they were not
read off a card yet. `what` in each says which situation it plays.

It has the functions that `kerasmem.devices.nvml.NvmlApi` names, and raises pynvml's own errors. Where a
recording has a list of memory readings, each query takes the next one and the last one repeats;
`{"error": code}` in place of an answer is raised as that NVML error.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pynvml

FOLDER = Path(__file__).parents[1] / "data" / "nvml"


class RecordedNvml:
    NVMLError = pynvml.NVMLError

    def __init__(self, name):
        self.data = json.loads((FOLDER / f"{name}.json").read_text())
        self.initialised = 0
        self.queries = 0
        self._read = {}

    def nvmlInit(self):
        self._answer(self.data.get("init"))
        self.initialised += 1

    def nvmlShutdown(self):
        assert self.initialised > 0, "shut down more often than initialised"
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self):
        return self._answer(self.data["driver_version"])

    def nvmlDeviceGetCount(self):
        return len(self.data["devices"])

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._handle(self.data["devices"][index])

    def nvmlDeviceGetName(self, handle):
        return self._answer(handle["name"])

    def nvmlDeviceGetUUID(self, handle):
        return self._answer(handle["uuid"])

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=self._answer(handle["pci_bus_id"]))

    def nvmlDeviceGetMemoryInfo(self, handle):
        self.queries += 1
        readings = handle["memory"]
        if isinstance(readings, list):
            turn = self._read.get(id(handle), 0)
            self._read[id(handle)] = turn + 1
            readings = readings[min(turn, len(readings) - 1)]
        return SimpleNamespace(**self._answer(readings))

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self._answer(handle["compute_capability"])

    def nvmlDeviceGetMigMode(self, handle):
        return self._answer(handle["mig_mode"])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return self._answer(handle["max_mig_devices"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot):
        instances = handle["instances"]
        return self._handle(instances[slot] if slot < len(instances) else {"error": 6})

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(**process) for process in self._answer(handle["processes"])]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return []

    def _handle(self, device):
        return self._answer(device)

    def _answer(self, value):
        assert not isinstance(value, dict) or "error" not in value or set(value) == {"error"}
        if isinstance(value, dict) and "error" in value:
            raise pynvml.NVMLError(value["error"])
        return value
