"""TensorFlow's CPU kernels (oneDNN or Eigen) and their threads, in this process or as named, and a card's kernels.

In graph mode, oneDNN's kernels and TensorFlow's own, which use Eigen, have different scratch memory. TensorFlow uses
oneDNN by default on x86 CPUs with AVX512-VNNI, AVX512-BF16, AVX-VNNI or AMX, and on some ARM CPUs. The environment
variable TF_ENABLE_ONEDNN_OPTS overrides it when TensorFlow starts. Source: tensorflow/core/util/port.cc. Threads:
tensorflow/core/common_runtime/process_util.cc and local_device.cc.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

# CPU features that oneDNN needs (tensorflow/core/util/util.cc). Without them, TensorFlow uses its own kernels.
_NEEDED_FOR = {
    "float32": None,
    "bfloat16": ("avx512f", "avx_ne_convert"),
    "float16": ("avx512_fp16", "amx_fp16", "avx_ne_convert"),
}
# Features of named kernels, so that an estimate does not depend on this machine: a server without AMX. This machine's
# cache does not count either.
_NAMED_FLAGS, _NAMED_CACHE = frozenset({"avx512f", "avx512_vnni"}), 32 * MIB
# With these features, its products and convolutions copy blocks of their operands, of sizes by internal heuristics.
_COPIED_WITH = {"bfloat16": ("amx_bf16",), "float16": ("avx512_fp16", "amx_fp16")}
# With AVX-512 but without these features, they convert bfloat16 and sum in float32 (gemm_bf16_matmul.hpp).
_NATIVE_BFLOAT16 = ("amx_bf16", "avx512_bf16")
# The last of these features that oneDNN may use, by ONEDNN_MAX_CPU_ISA (cpu_isa_traits.cpp). TensorFlow's choice of
# dtypes does not depend on it.
_FEATURES = ("avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
_LAST_FEATURE = {
    "avx512_core": "avx512f",
    "avx512_core_vnni": "avx512f",
    "avx512_core_bf16": "avx512_bf16",
    "avx512_core_fp16": "avx512_fp16",
    "avx512_core_amx": "amx_bf16",
    "avx10_1_512": "avx512_fp16",
    "avx10_1_512_amx": "amx_bf16",
}
_WITHOUT_AVX512 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")


@dataclass(frozen=True)
class CpuKernels:
    """Kernels of a CPU.

    Attributes:
        kind: "onednn" or "eigen".
        dtypes: dtypes that oneDNN's kernels support here; empty if oneDNN is off.
        inter_op_threads: number of operations that run in parallel.
        intra_op_threads: number of threads of an operation.
        copied: dtypes in which oneDNN's products and convolutions copy blocks of their operands.
        converted: dtypes that oneDNN converts to float32, because the CPU cannot multiply them.
        cache_bytes: size of the last-level cache in bytes.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    inter_op_threads: int = 2
    intra_op_threads: int = 2
    copied: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    cache_bytes: int = _NAMED_CACHE

    @property
    def title(self) -> str:
        """Full name."""
        return TITLES[self.kind]

    @property
    def profile(self) -> dict[str, Any]:
        """The fields of an estimate's `Settings` that describe the kernels."""
        threads, intra_op = self.inter_op_threads, self.intra_op_threads
        differs = {} if intra_op == threads else {"intra_op_threads": intra_op}
        return {"kernels": self.kind, "threads": threads, **differs}


@dataclass(frozen=True)
class CardKernels:
    """Kernels of a card, which need not be present.

    Attributes:
        capability: compute capability of the card.
        available_bytes: limit of TensorFlow's allocator in bytes.
        beside: kernels of the host's CPU, assumed to be this machine's.
        workspace: maximum workspace of cuDNN's algorithm for a convolution in bytes. Defaults to 0.
    """

    capability: tuple[int, int]
    available_bytes: int
    beside: CpuKernels
    workspace: int = 0


def kernels_on(
    device: DeviceTarget | None, kind: str | None = None, threads: int | None = None
) -> CpuKernels | CardKernels:
    """Return the kernels of a card, or those of `cpu_kernels` if the device is not a card."""
    here = cpu_kernels(kind, threads)
    if device is None or device.compute_capability is None:
        return here
    return CardKernels(device.compute_capability, device.available_bytes, here)


def cpu_kernels(kind: str | None = None, threads: int | None = None) -> CpuKernels:
    """Return TensorFlow's CPU kernels in this process, or named ones.

    Args:
        kind: "onednn" or "eigen", of a CPU with AVX-512 and without AMX. Defaults to this process's.
        threads: number of inter-op and of intra-op threads. Defaults to this process's.
    """
    inter_op, intra_op = (threads, threads) if threads is not None else _threads()
    flags, cache = (cpu_flags(), last_cache_bytes()) if kind is None else (_NAMED_FLAGS, _NAMED_CACHE)
    if kind == EIGEN or (kind is None and not onednn_is_on()):
        return CpuKernels(EIGEN, (), inter_op, intra_op, cache_bytes=cache)
    used = usable_features(flags) if kind is None else flags
    copied = tuple(dtype for dtype, features in _COPIED_WITH.items() if not used.isdisjoint(features))
    converted = ("bfloat16",) if "avx512f" in used and used.isdisjoint(_NATIVE_BFLOAT16) else ()
    return CpuKernels(ONEDNN, onednn_dtypes(flags), inter_op, intra_op, copied, converted, cache)


def kernel_variables(kind: str | None = None, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that give a new process the arguments of `cpu_kernels`."""
    variables: dict[str, str] = {}
    if kind is not None:
        variables["TF_ENABLE_ONEDNN_OPTS"] = str(int(kind == ONEDNN))
    if threads is not None:
        variables |= dict.fromkeys(("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"), str(threads))
    return variables


def usable_features(flags: frozenset[str]) -> frozenset[str]:
    """Return the CPU's features that oneDNN may use, without those that ONEDNN_MAX_CPU_ISA excludes."""
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").lower()
    if limit in _WITHOUT_AVX512:
        return flags.difference(_FEATURES)
    last = _LAST_FEATURE.get(limit, _FEATURES[-1])
    return flags.difference(_FEATURES[_FEATURES.index(last) + 1 :])


def last_cache_bytes() -> int:
    """Return the size of this CPU's last-level cache from Linux, or 32 MiB if unknown.

    Eigen processes as many samples of a 3D convolution at a time as fit this cache. On AMD's processors, it assumes a
    larger cache.
    """
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()
        return int(text.strip().removesuffix("K")) * KIB
    except (OSError, ValueError):
        return _NAMED_CACHE


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features by their names in Linux (empty if unknown)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.split())


def onednn_dtypes(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the dtypes that oneDNN supports on a CPU with these features."""
    return tuple(dtype for dtype, needed in _NEEDED_FOR.items() if needed is None or not flags.isdisjoint(needed))


def _threads() -> tuple[int, int]:
    """Return inter-op and intra-op threads, set in Python or in the environment. Defaults to one per core."""
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
