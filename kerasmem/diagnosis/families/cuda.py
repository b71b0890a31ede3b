"""CUDA's libraries and driver, where no framework says more: cuDNN, cuBLAS, cuFFT, CuPy."""

from __future__ import annotations

from kerasmem.diagnosis.rules import Rule, rule, sized

_LIBRARIES = r"(?P<note>(?:CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CURAND)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED)"
_CUPY = rf"OutOfMemoryError: [Oo]ut of memory (?:to allocate|allocating) {sized('requested_bytes')}"


def _driver(needle: str, pattern: str) -> Rule:
    return rule(needle, pattern, "failure", "cuda", "driver", device="GPU")


RULES: tuple[Rule, ...] = (
    rule("_ALLOC_FAILED", _LIBRARIES, "failure", "cuda", "library", device="GPU"),
    _driver("OutOfMemoryError", _CUPY),
    _driver("CUDA_ERROR_OUT_OF_MEMORY", r"CUDA_ERROR_OUT_OF_MEMORY"),
    _driver("rrorOutOfMemory", r"hipErrorOutOfMemory"),
    _driver("rrorMemoryAllocation", r"cudaErrorMemoryAllocation"),
)
