"""What methods do not model, and the bounds of what libraries take only while memory is free.

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
- XLA's autotuner must have a copy of an instruction's operands, between red zones. Without, it fails for that
  instruction ("Failed to get configs", `ConfigRunner::ProfileAll`). A kernel whose result or workspace has no room is
  passed over (`ProfileCandidate`); one at least must run. So it needs the operands and the result of its largest
  instruction.
- How much an algorithm works in is cuDNN's own; `graph.cuda` bounds it by the tensors that each documented algorithm
  has to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kerasmem.estimation.formula import opaque_layers
from kerasmem.estimation.report import Bytes, LayerMemory, Unmodelled
from kerasmem.estimation.shapes import ShapedStep
from kerasmem.units import GIB, MIB

TENSORFLOW_WORKSPACE_LIMIT = 8 * GIB
XLA_WORKSPACE_LIMIT = 4 * GIB
_MOST_NAMES = 5  # of layers in one entry
REDZONES = 2 * 8 * MIB  # around each buffer of TensorFlow's autotuning

CUDA_CONTEXT = Unmodelled(
    "CUDA context and libraries",
    "outside the allocator; the verdict on a card takes the context off, and TensorFlow leaves room for libraries",
)
EXCHANGE_BUFFERS = Unmodelled(
    "buffers of the exchange of gradients",
    "NCCL's channels and staging buffers lie outside the allocator; rows of embeddings' gradients are gathered",
)
CPU_SCRATCH = Unmodelled("scratch of kernels", "what matrix products and convolutions take from the C library")
XLA_AUTOTUNING = Unmodelled(
    "autotuning",
    "while XLA compiles the first step on the card: it needs copies of one kernel's operands and result beside the "
    "weights, and takes workspaces while there is room; freed before the step runs",
)


def without_a_rule(operation: str, count: int) -> Unmodelled:
    """Return the entry for operations that the simulation does not know."""
    why = f"no rule for this operation ({count} of them): its outputs are counted"
    return Unmodelled(f"scratch of {operation}", why)


def copied_operands(dtype: str, count: int) -> Unmodelled:
    """Return the entry for what oneDNN copies in products and convolutions of a dtype."""
    why = f"on this CPU oneDNN copies blocks of their operands ({count} operations), some MB at a time"
    return Unmodelled(f"copies in {dtype} products and convolutions", why)


def beside_a_card(operations: Set[str], workspace: int, host_bytes: int) -> list[Unmodelled]:
    """Return the entries for a step in graph mode on a card.

    Args:
        operations: the types of its operations.
        workspace: bytes that cuDNN's convolutions may take if they are free.
        host_bytes: bytes of the tensors in the host's memory.
    """
    entries = {
        "Conv": Unmodelled(
            "workspace of cuDNN's convolutions",
            "the step needs none; the first step tries all algorithms and may choose one that takes up to this much, "
            "if it is free, within TF_CUDNN_WORKSPACE_LIMIT_IN_MB (8 GiB unless set)",
            workspace,
        ),
        "FusedBatchNorm": Unmodelled("reserve of cuDNN's batch normalisation", "known on the card alone"),
        "CudnnRNN": Unmodelled(
            "reserve of cuDNN's recurrent layers", "counted as cuDNN 7 did; later versions may keep more"
        ),
        "PartitionedCall": Unmodelled("functions compiled by XLA", "their buffers are those of a plan for the CPU"),
    }
    missing = [entry for part, entry in entries.items() if any(part in name for name in operations)]
    host = Unmodelled("host memory", "at most: the batch, and numbers that kernels keep beside the card", host_bytes)
    return [*missing, host, CUDA_CONTEXT]


def prefetched_batches(batch_bytes: int) -> Unmodelled:
    """Return the entry for batches that the data pipeline puts on a card ahead of time."""
    return Unmodelled("prefetched batches", "each batch that is put on the card while a step runs", batch_bytes)


def not_in_the_formula(step: ShapedStep) -> tuple[Unmodelled, ...]:
    """List the memory of a step that the formula leaves out."""
    layers, is_training = step.layers, step.spec.mode == "train"
    missing = [
        Unmodelled("workspace", "scratch memory of convolutions and matrix products"),
        Unmodelled("allocator", "rounding and waste in the chunks that the allocator hands out"),
        Unmodelled("buffer reuse", "buffers are freed and reused within the step: deep networks need less"),
    ]
    if is_training:
        slots = step.optimizer or "adam (assumed: no optimizer is stored with the model)"
        why = "what the optimizer keeps for each weight; the formula has weights and gradients only"
        missing.insert(0, Unmodelled(f"optimizer slots of {slots}", why, step.slots))
    if unknown := [row.name for row in layers if row.activation_elements is None]:
        missing.append(Unmodelled(f"outputs of {_some(unknown)}", "their size depends on the data"))
    if opaque := opaque_layers(layers):
        why = "gates, states and attention scores, often many times the output, so no upper end is given"
        missing.append(Unmodelled(f"the inside of {_some(opaque)}", why))
    if step.spec.replicas > 1 and is_training:
        why = "gradients are gathered in buffers of their own where replicas exchange them"
        missing.append(Unmodelled("exchange of gradients", why))
    return tuple(missing)


def formula_notes(layers: Iterable[LayerMemory], need: Bytes, plain: int) -> tuple[str, ...]:
    """Return remarks on the formula's figure.

    Args:
        layers: the rows of the report.
        need: the figure at the true sizes of the dtypes.
        plain: the total of the formula, every value taken as float32.
    """
    rows, notes = list(layers), []
    if need.total != plain:
        notes.append(
            f"at the true sizes of its dtypes the total is {need.total:,} B; "
            f"the formula, which takes every value as float32, gives {plain:,} B"
        )
    frozen = sum(row.parameters - row.trainable_parameters for row in rows)
    if frozen and need.gradients:
        notes.append(f"the formula counts a gradient for {frozen:,} parameters that are not trained")
    if any(row.dtype == "string" for row in rows):
        notes.append("text is counted as 24 bytes an element; longer text takes more")
    return tuple(notes)


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
