"""What no method models, and the bounds of what libraries take only while memory is free.

Sources of the bounds, read in August 2026:

- TensorFlow gives one convolution at most `GetDnnWorkspaceLimitOrDefault` of scratch (tensorflow/core/kernels):
  `TF_CUDNN_WORKSPACE_LIMIT_IN_MB`, else `1 << 33`, 8 GiB. Versions before had `1 << 32`, 4 GiB, at each call.
- XLA gives `ScratchAllocator::GetDefaultMemoryLimitInBytes` (gpu_conv_algorithm_picker.cc): the same variable, else
  4096 MiB.
- In the first step TensorFlow tries each algorithm that cuDNN offers for a convolution (`AutotuneConvImpl`,
  autotune_conv_impl.h), one after another. A `RedzoneAllocator` takes a copy of the result and the algorithm's
  workspace from the device's allocator, each with 8 MiB on both sides (`kDefaultRedzoneSize`). An algorithm whose
  workspace has no room is passed over.
- The fastest algorithm is kept with the fastest that needs no workspace (`BestCudnnConvAlgorithm`, gpu_utils.cc), and
  a step takes the latter if there is no room (`AllocateScratchOrFallback`, conv_ops_gpu.h). So a step needs none.
- XLA passes over algorithms without room too, but while it compiles. The workspace of the chosen one is then part of
  its plan and cannot be given up, so a verdict on an XLA plan counts it.
- How much an algorithm works in is cuDNN's own; `graph.cuda` bounds it by the tensors that each documented algorithm
  has to hold.
"""

from __future__ import annotations

from kerasmem.estimation.report import Unmodelled
from kerasmem.units import GIB, MIB

TENSORFLOW_WORKSPACE_LIMIT = 8 * GIB
XLA_WORKSPACE_LIMIT = 4 * GIB
REDZONES = 2 * 8 * MIB  # around each buffer of TensorFlow's autotuning

CUDA_CONTEXT = Unmodelled(
    "CUDA context and libraries",
    "outside the allocator; the verdict on a card takes the context off, and TensorFlow leaves room for libraries",
)
XLA_AUTOTUNING = Unmodelled("autotuning", "while the first step is compiled on the card; freed before it runs")
CPU_SCRATCH = Unmodelled("scratch of kernels", "what matrix products and convolutions take from the C library")


def prefetched_batches(batch_bytes: int) -> Unmodelled:
    """Return the entry for batches that the data pipeline puts on a card ahead of time."""
    return Unmodelled("prefetched batches", "each batch that is put on the card while a step runs", batch_bytes)
