"""CUDA's libraries and driver, where no framework says more: cuDNN, cuBLAS, cuFFT, CuPy."""

from __future__ import annotations

import re

from kerasmem.diagnosis.clues import SIZE, Clue, Rule, rule, says, size


@rule("_ALLOC_FAILED", r"(CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CURAND)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED")
def _library(match: re.Match[str]) -> Clue:
    return Clue("failure", "cuda", "library", {"device": "GPU", "note": match[0]})


@rule("OutOfMemoryError", rf"OutOfMemoryError: [Oo]ut of memory (?:to allocate|allocating) {SIZE}")
def _cupy(match: re.Match[str]) -> Clue:
    return Clue(
        "failure", "cuda", "driver", {"requested_bytes": size(match[1].replace(",", ""), match[2]), "device": "GPU"}
    )


RULES: tuple[Rule, ...] = (
    _library,
    _cupy,
    says("CUDA_ERROR_OUT_OF_MEMORY", r"CUDA_ERROR_OUT_OF_MEMORY", "failure", "cuda", "driver", device="GPU"),
    says("rrorOutOfMemory", r"hipErrorOutOfMemory", "failure", "cuda", "driver", device="GPU"),
    says("rrorMemoryAllocation", r"cudaErrorMemoryAllocation", "failure", "cuda", "driver", device="GPU"),
)
