"""Whether TensorFlow can run oneDNN's kernels here, and the environment that turns them on.

In graph mode a step's memory depends on the CPU's kernels: oneDNN's and TensorFlow's own take other scratch buffers.
TensorFlow chooses oneDNN by itself on x86 CPUs with AVX512-VNNI, AVX512-BF16 or AMX only, and elsewhere where the
environment asks for it. The figures that the tests hold were taken on CPUs with AVX2 and with AVX-512.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

ENVIRONMENT = {"TF_ENABLE_ONEDNN_OPTS": "1"}


def reason_against() -> str | None:
    """Return why this CPU cannot run the kernels whose figures the tests hold; None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the figures are those of oneDNN's kernels for x86, and this CPU is {platform.machine()}"
    path = Path("/proc/cpuinfo")
    if path.exists() and "avx2" not in path.read_text().split():
        return "the figures are those of oneDNN's kernels for AVX2 or AVX-512, and this CPU has neither"
    return None


needed = pytest.mark.skipif(bool(reason_against()), reason=str(reason_against()))
