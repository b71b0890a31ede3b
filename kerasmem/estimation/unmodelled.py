"""Memory that the methods do not model, and bounds of optional scratch.

Sources of the bounds, read in August 2026:

- TensorFlow limits the workspace of a convolution to `GetDnnWorkspaceLimitOrDefault` (tensorflow/core/kernels):
  `TF_CUDNN_WORKSPACE_LIMIT_IN_MB`, else `1 << 33`, 8 GiB. Earlier versions had `1 << 32`, 4 GiB, at each call.
- XLA limits it to `ScratchAllocator::GetDefaultMemoryLimitInBytes` (gpu_conv_algorithm_picker.cc): the same variable,
  else 4096 MiB.
- In the first step TensorFlow tries each algorithm that cuDNN offers for a convolution (`AutotuneConvImpl`,
  autotune_conv_impl.h), one after another. A `RedzoneAllocator` takes a copy of the result and the algorithm's
  workspace from the device's allocator, each with 8 MiB on both sides (`kDefaultRedzoneSize`). If the workspace does
  not fit, the algorithm is skipped.
- TensorFlow keeps the fastest algorithm, and the fastest without a workspace (`BestCudnnConvAlgorithm`, gpu_utils.cc).
  If the workspace does not fit, a step uses the latter (`AllocateScratchOrFallback`, conv_ops_gpu.h). So a step needs
  none.
- XLA skips algorithms that do not fit too, but while it compiles. The workspace of the chosen one is then part of its
  plan and cannot be given up, so a verdict on an XLA plan counts it.
- XLA's autotuner needs a copy of an instruction's operands, between red zones. If they do not fit, it fails for that
  instruction ("Failed to get configs", `ConfigRunner::ProfileAll`). If a kernel's result or workspace does not fit, the
  kernel is skipped (`ProfileCandidate`); at least one must run. So the autotuner needs the operands and the result of
  its largest instruction.
- cuDNN does not document the size of an algorithm's workspace. `graph.cuda` bounds it by the tensors that each
  documented algorithm has to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kerasmem.estimation.report import Bytes, LayerMemory, Unmodelled
from kerasmem.estimation.shapes import ShapedStep
from kerasmem.units import GIB, MIB

TENSORFLOW_WORKSPACE_LIMIT = 8 * GIB
XLA_WORKSPACE_LIMIT = 4 * GIB
_MOST_NAMES = 5  # of layers in one entry
REDZONES = 2 * 8 * MIB  # around each buffer of TensorFlow's autotuning

CUDA_CONTEXT = Unmodelled(
    "CUDA context and libraries",
    "outside the allocator; the bytes available on a card exclude the context, and TensorFlow's reserve for libraries",
)
EXCHANGE_BUFFERS = Unmodelled(
    "buffers of the gradient exchange",
    "NCCL's channels and staging buffers are outside the allocator; gradients of embeddings are gathered by rows",
)
JAX_EXCHANGE = Unmodelled(
    "gradient exchange", "the plan is of one device, and XLA decides how many gradients it sums at once between devices"
)
CPU_SCRATCH = Unmodelled("scratch of kernels", "matrix products and convolutions allocate it from the C library")
XLA_AUTOTUNING = Unmodelled(
    "autotuning",
    "while XLA compiles the first step on the card, it needs copies of one kernel's operands and result, and "
    "workspaces if they fit; all are freed before the step runs",
)


def without_a_rule(operation: str, count: int) -> Unmodelled:
    """Return the entry for operations that the simulation does not know."""
    why = f"no rule for this operation ({count} of them); only its outputs are counted"
    return Unmodelled(f"scratch of {operation}", why)


def copied_operands(dtype: str, count: int) -> Unmodelled:
    """Return the entry for oneDNN's copies of operands of a dtype."""
    why = f"on this CPU oneDNN copies blocks of the operands of {count} operations, a few MB at a time"
    return Unmodelled(f"copies in {dtype} products and convolutions", why)


def beside_a_card(operations: Set[str], workspace: int, host_bytes: int) -> list[Unmodelled]:
    """Return the entries for a step in graph mode on a card.

    Args:
        operations: the types of its operations.
        workspace: bytes that cuDNN's convolutions may use if they are free.
        host_bytes: bytes of the tensors in the host's memory.
    """
    entries = {
        "Conv": Unmodelled(
            "workspace of cuDNN's convolutions",
            "the step needs none; the first step tries all algorithms, and may choose one that uses up to this much if "
            "it is free, within TF_CUDNN_WORKSPACE_LIMIT_IN_MB (8 GiB unless set)",
            workspace,
        ),
        "FusedBatchNorm": Unmodelled("reserve of cuDNN's batch normalisation", "its size is known only on the card"),
        "CudnnRNN": Unmodelled(
            "reserve of cuDNN's recurrent layers", "counted as in cuDNN 7; later versions may keep more"
        ),
        "PartitionedCall": Unmodelled("functions compiled by XLA", "their buffers are counted by a plan for the CPU"),
    }
    missing = [entry for part, entry in entries.items() if any(part in name for name in operations)]
    host = Unmodelled("host memory", "at most; the batch, and small tensors that kernels keep on the host", host_bytes)
    return [*missing, host, CUDA_CONTEXT]


def prefetched_batches(batch_bytes: int) -> Unmodelled:
    """Return the entry for batches copied to a card in advance."""
    return Unmodelled("prefetched batches", "each batch that is copied to the card while a step runs", batch_bytes)


def not_in_the_formula(step: ShapedStep) -> tuple[Unmodelled, ...]:
    """List the memory of a step that the formula leaves out."""
    layers, is_training = step.layers, step.spec.mode == "train"
    missing = [
        Unmodelled("workspace", "scratch memory of convolutions and matrix products"),
        Unmodelled("allocator", "rounding and waste in the allocator's chunks"),
        Unmodelled("buffer reuse", "buffers are freed and reused within the step: deep networks need less"),
    ]
    if is_training:
        slots = step.optimizer or "adam (assumed: no optimizer is stored with the model)"
        why = "values that the optimizer keeps for each weight; the formula has weights and gradients only"
        missing.insert(0, Unmodelled(f"optimizer slots of {slots}", why, step.slots))
    if unknown := [row.name for row in layers if row.activation_elements is None]:
        missing.append(Unmodelled(f"outputs of {_some(unknown)}", "their size depends on the data"))
    if opaque := list(step.opaque):
        why = "it may take many times the output (gates, attention scores, own code), so the upper end is unknown"
        missing.append(Unmodelled(f"the inside of {_some(opaque)}", why))
    if step.spec.replicas > 1 and is_training:
        missing.append(Unmodelled("gradient exchange", "replicas copy gradients to buffers for the exchange"))
    return tuple(missing)


def formula_notes(layers: Iterable[LayerMemory], need: Bytes, plain: int) -> tuple[str, ...]:
    """Return notes on the formula's total.

    Args:
        layers: the rows of the report.
        need: the total at the true sizes of the dtypes.
        plain: the formula's total, with every value as float32.
    """
    rows, notes = list(layers), []
    if need.total != plain:
        notes.append(
            f"at the true sizes of its dtypes the total is {need.total:,} B; "
            f"the formula, with every value as float32, gives {plain:,} B"
        )
    frozen = sum(row.parameters - row.trainable_parameters for row in rows)
    if frozen and need.gradients:
        notes.append(f"the formula counts gradients of {frozen:,} parameters that are not trained")
    if any(row.dtype == "string" for row in rows):
        notes.append("text is counted as 24 bytes an element; longer text takes more")
    return tuple(notes)


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
