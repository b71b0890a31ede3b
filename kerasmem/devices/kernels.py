"""TensorFlow's CPU kernels in this process (oneDNN or Eigen), and their threads.

In graph mode the kernels decide a step's memory: oneDNN's and TensorFlow's own, which rest on Eigen, take other
scratch. TensorFlow chooses oneDNN by itself on x86 CPUs with AVX512-VNNI, AVX512-BF16, AVX-VNNI or AMX (and on some ARM
CPUs), and elsewhere where TF_ENABLE_ONEDNN_OPTS asks for it; it reads the variable once, when it starts. Source:
tensorflow/core/util/port.cc. Threads: tensorflow/core/common_runtime/process_util.cc and local_device.cc.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kerasmem.compat.tensorflow_runtime import onednn_is_on
from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.devices.host import usable_cores
from kerasmem.units import KIB, MIB

ONEDNN, EIGEN, CUDA = "onednn", "eigen", "cuda"
TITLES = {
    ONEDNN: "oneDNN's CPU kernels",
    EIGEN: "TensorFlow's own CPU kernels (Eigen)",
    CUDA: "TensorFlow's CUDA kernels: predicted, not read off a card yet",
}

# What oneDNN computes only where the CPU can (tensorflow/core/util/util.cc); elsewhere TensorFlow's own kernels do.
_NEEDED_FOR = {
    "float32": None,
    "bfloat16": ("avx512f", "avx_ne_convert"),
    "float16": ("avx512_fp16", "amx_fp16", "avx_ne_convert"),
}
# There its products and convolutions copy blocks of their operands, whose sizes it chooses by heuristics of its own.
_COPIED_WHERE = {"bfloat16": ("amx_bf16",), "float16": ("avx512_fp16", "amx_fp16")}


@dataclass(frozen=True)
class CpuKernels:
    """The kernels that run on this machine's CPU, as this process is set.

    Attributes:
        kind: "onednn" or "eigen".
        dtypes: dtypes that oneDNN's kernels take here; none if they are off.
        inter_op_threads: how many operations run at once.
        intra_op_threads: among how many threads an operation is divided.
        copied: the dtypes in which oneDNN's products and convolutions copy blocks of their operands here.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    inter_op_threads: int = 2
    intra_op_threads: int = 2
    copied: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name for people."""
        return TITLES[self.kind]


@dataclass(frozen=True)
class CardKernels:
    """The kernels of a card, which need not be here.

    Attributes:
        capability: the card's compute capability.
        available_bytes: the memory available to TensorFlow's allocator.
        beside: the kernels of the CPU that starts them, taken to be this machine's.
        workspace: the most bytes that cuDNN's algorithm for a convolution may work in. Defaults to 0.
    """

    capability: tuple[int, int]
    available_bytes: int
    beside: CpuKernels
    workspace: int = 0


def kernels_on(device: DeviceTarget | None) -> CpuKernels | CardKernels:
    """Return the kernels of a step: a card's if a device names one, else this machine's."""
    if device is None or device.compute_capability is None:
        return cpu_kernels()
    return CardKernels(device.compute_capability, device.available_bytes, cpu_kernels())


def cpu_kernels() -> CpuKernels:
    """Return the kernels of a step in this process, from TensorFlow."""
    flags = cpu_flags()
    inter_op, intra_op = _threads()
    if not onednn_is_on():
        return CpuKernels(EIGEN, (), inter_op, intra_op)
    copied = tuple(dtype for dtype, features in _COPIED_WHERE.items() if not flags.isdisjoint(features))
    return CpuKernels(ONEDNN, onednn_dtypes(flags), inter_op, intra_op, copied)


def last_cache_bytes() -> int:
    """Return the size of this CPU's last cache, by Linux (32 MiB if unknown).

    Eigen takes as many samples of a convolution over volumes at a time as it takes this cache to hold. On AMD's
    processors it takes it to be larger.
    """
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()
        return int(text.strip().removesuffix("K")) * KIB
    except (OSError, ValueError):
        return 32 * MIB


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features by Linux's names (empty if unknown)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.split())


def onednn_dtypes(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the dtypes that oneDNN's kernels compute in on a CPU with these features."""
    return tuple(dtype for dtype, needed in _NEEDED_FOR.items() if needed is None or not flags.isdisjoint(needed))


def _threads() -> tuple[int, int]:
    """Return inter-op and intra-op threads: set in Python, or by TensorFlow's variables, or one for each CPU."""
    import tensorflow as tf

    threading = tf.config.threading
    return (
        threading.get_inter_op_parallelism_threads() or _variable("TF_NUM_INTEROP_THREADS") or usable_cores(),
        threading.get_intra_op_parallelism_threads() or _variable("TF_NUM_INTRAOP_THREADS") or usable_cores(),
    )


def _variable(name: str) -> int:
    try:
        return max(int(os.environ.get(name, "")), 0)
    except ValueError:
        return 0
