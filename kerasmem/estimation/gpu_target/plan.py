"""XLA's plan of a step for a card, made in a subprocess, and the memory that the step needs on the card.

Nothing here was fitted to measurements. What the plan leaves out widens the interval by a rule with its reason, and
what has no rule is named without bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources
from string import Template
from tempfile import TemporaryDirectory

from kerasmem.devices.cards import Card, hardware_of
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.estimation.allocator import smallest_limit
from kerasmem.estimation.compiled.plan import CompiledStep, JaxNames, Weights, XlaPlan, product_bytes
from kerasmem.estimation.gpu_target.worker import EXTRA, compile_request, missing_parts
from kerasmem.estimation.report import Outcome, Pool
from kerasmem.estimation.unmodelled import CUDA_CONTEXT, XLA_AUTOTUNING, XLA_WORKSPACE_LIMIT, prefetched_batches
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import Limits, child_environment
from kerasmem.processes.forking import run_child, start_server
from kerasmem.units import GIB

DEFAULT_TIMEOUT = 600.0
DEFAULT_MEMORY_LIMIT = 8 * GIB
# A process that compiles must reach no GPU, no other backend, and no settings meant for the program that the user
# trains with.
ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
# XLA writes matrix products with Triton from Ampere on; before, there is nothing to choose.
_TRITON_CAPABILITY = (8, 0)


def start_compiler(card: Card) -> None:
    """Start the process that compiles, so that it loads its libraries in the background."""
    if not missing_parts() and hardware_of(card) is not None:
        start_server(child_environment(**ENVIRONMENT))


def gpu_target_plan(
    request: StepSpec,
    card: Card,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit: int | None = DEFAULT_MEMORY_LIMIT,
) -> CompiledStep:
    """Plan the step of a model for a card with XLA, without a GPU.

    The step is compiled with Triton for matrix products and without, as on the card the faster of the two is taken
    at run time; and where XLA recomputes to keep within the card's memory, also without that limit.

    Args:
        request: the model and its training.
        card: a card of the catalogue, from compute capability 7.0 on.
        timeout: seconds for all of it.
        memory_limit: bytes of this machine's memory that the process may take.

    Raises:
        UsageError: the card's hardware figures are not known, or the model's step is written for TensorFlow alone.
        MissingExtraError: JAX and its compiler for NVIDIA's GPUs are not installed.
        ChildFailure: it took too long or too much memory, or XLA refused; the reason says which.
    """
    target = target_text(card)
    if missing_parts():
        raise MissingExtraError("compiling for a GPU that is not there", EXTRA)
    has_triton = card.compute_capability >= _TRITON_CAPABILITY
    with TemporaryDirectory(prefix="kerasmem-") as folder:
        data = {"model": request.to_dict(), "target": target, "has_triton": has_triton, "folder": folder}
        limits = Limits(timeout, memory_limit)
        answer = run_child(compile_request, data, limits=limits, environ=child_environment(**ENVIRONMENT))
    return CompiledStep.from_dict(answer)


def target_text(card: Card) -> str:
    """Return the target configuration of a card.

    What stands as a number in `data/gpu_target.txtpb` is the same on every card since compute capability 7.0
    (see `devices.cards`), but the versions of cuDNN and CUDA: those that the step would run with,
    which choose among kernels, and no buffer depends on them that was found to.

    Args:
        card: a row of the catalogue.

    Raises:
        UsageError: the card's hardware figures are not known.
    """
    hardware, (major, minor) = hardware_of(card), card.compute_capability
    if hardware is None:
        raise UsageError(
            f"gpu-target does not know {card.name} (compute capability {major}.{minor}): "
            "its hardware figures are not in kerasmem's catalogue, which begins at compute capability 7.0; "
            "use method='xla' or 'graph'"
        )
    text = resources.files("kerasmem.estimation").joinpath("data/gpu_target.txtpb").read_text("utf-8")
    return Template(text).substitute(
        hardware,
        memory_bytes=card.memory_bytes,
        major=major,
        minor=minor,
        extension=" feature_extension: ACCELERATED_FEATURES" if hardware["is_accelerated"] else "",
        name=card.name,
    )


def gpu_target_outcome(
    compiled: CompiledStep, card: Card, rows: Collection[str] = (), weights: Weights | None = None
) -> Outcome:
    """Return the outcome of XLA's plans for a card, their buffers replayed through the allocator.

    The total is the plan that XLA makes by itself. The interval spans all plans, from what none of the allocator's
    waste is added to (where it holds all of the card's memory from the start, that is next to nothing) to what cuDNN or
    cuBLAS may take besides.

    Args:
        compiled: the step, compiled for the card.
        card: a card of the catalogue.
        rows: names of the layers in the report; what belongs to another one counts as the row that has it inside.
        weights: for "trainable" and "non_trainable" each weight's bytes and row, in the model's order.
    """
    plan, plans = compiled.likely, (*compiled.plans, *compiled.unlimited)
    allocator = compiled.allocated(plan)
    limit = max(smallest_limit(compiled.requests(each)) for each in plans)
    workspace, product = workspace_bytes(plan), product_bytes(plans, card.compute_capability)
    return plan.outcome(
        "gpu-target",
        Pool(plan.total, allocator.in_use, allocator.reserved, None, limit),
        compiled.held(weights or {}),
        JaxNames(compiled.layers, compiled.optimizer, frozenset(rows)),
        low=min(each.total for each in plans),
        high=max(max(compiled.allocated(each).in_use for each in plans) + max(workspace, product), limit),
        unmodelled=(CUDA_CONTEXT, XLA_AUTOTUNING, prefetched_batches(compiled.batch_bytes)),
        notes=_notes(compiled, card, workspace, product),
    )


def workspace_bytes(plan: XlaPlan) -> int:
    """Return the most that cuDNN may take for its convolutions beside the plan.

    Without the card XLA cannot ask cuDNN which of its algorithms it will run, and counts 0 bytes for each. Many need
    none. Those that work in another layout hold a copy of the input, the filter and the output of one convolution,
    and convolutions run one after another, so the largest convolution's three bound that. FFT and some Winograd
    algorithms may want more; XLA gives none more than `XLA_WORKSPACE_LIMIT`.
    """
    return min(max((size for size, _ in plan.convolutions), default=0), XLA_WORKSPACE_LIMIT)


def _notes(compiled: CompiledStep, card: Card, workspace: int, product: int) -> tuple[str, ...]:
    plan = compiled.likely
    notes = [f"XLA's plan for {card.key}, made without the card"]
    if plan.is_recomputed:
        wanted = f"; without that limit it would take {compiled.unlimited[0].total:,} B" if compiled.unlimited else ""
        notes.append(f"XLA recomputes values to keep within {card.memory_bytes:,} B{wanted}")
    notes += compiled.notes
    if plan.convolutions:
        notes.append(
            f"cuDNN's workspace for {len(plan.convolutions)} convolutions: up to {workspace:,} B more (the algorithm "
            "is chosen when XLA compiles on the card, and the verdict counts it; at most a copy of the input, filter "
            f"and output of the largest, {max(plan.convolutions)[1]})"
        )
    if product:
        notes.append(f"a matrix product in cuBLAS: up to {product:,} B more (the fastest kernel is chosen on the card)")
    return tuple(notes)
