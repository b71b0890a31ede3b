"""What `gpu_truth.py` asks of the machine: its card, what the driver counts, and the environment of a fresh process."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import ROOT

HERE = Path(__file__).resolve().parent


def has(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def nvidia_smi(query: str, table: str = "gpu") -> list[str]:
    """Return the lines that nvidia-smi prints; none where there is no such program or no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, f"--query-{table}={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


@functools.cache
def _nvml() -> tuple[Any, Any] | None:
    """Return NVML and the first GPU's handle, open until this process ends; None where there is none."""
    if not has("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None


def gpu_name() -> str | None:
    """Return the first GPU's name, as the driver has it."""
    names = nvidia_smi("name")
    if not names and (open_nvml := _nvml()) is not None:
        nvml, handle = open_nvml
        names = [str(nvml.nvmlDeviceGetName(handle))]
    return names[0] if names else None


def gpu_bytes() -> dict[str, int] | None:
    """Return the first GPU's memory as NVML has it: total, used by all processes, free; None without a driver."""
    if (open_nvml := _nvml()) is None:
        return None
    nvml, handle = open_nvml
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    return {"total": int(memory.total), "used": int(memory.used), "free": int(memory.free)}


def driver_bytes() -> int | None:
    """Return the bytes of the first GPU that the driver counts as used, by all processes."""
    if (memory := gpu_bytes()) is not None:
        return memory["used"]
    used = nvidia_smi("memory.used")
    return int(used[0]) * 2**20 if used and used[0].isdigit() else None


def card_key(name: str) -> str | None:
    """Return the catalogue's key for the driver's name of a card; None where it has no such row."""
    sys.path.insert(0, str(ROOT))
    from kerasmem.devices.catalogue import find_card
    from kerasmem.errors import KerasmemError

    try:
        return str(find_card(name).key)
    except KerasmemError:
        return None


def environ_of(framework: str, device: str, **more: str) -> dict[str, str]:
    """Return the environment of a fresh process: no preallocation, and TensorFlow's BFC allocator on a CPU too.

    Args:
        framework: Keras's backend.
        device: "gpu" or "cpu".
        more: variables that one part sets.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": framework,
    }
    if device == "cpu":
        environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPU_ALLOCATOR_USE_BFC": "true"}
    return environ | more
