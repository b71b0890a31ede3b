"""XLA's plan of a step for a card that is not there, and the memory that the step needs on the card.

`compile_request` runs in a process of its own: Keras on JAX on the CPU, XLA's compiler for the card that is described
to it. It allocates no weight, no batch and nothing on a GPU, and does not run what it compiled.

Nothing here was fitted to measurements. What the plan leaves out widens the interval by a rule with its reason, and
what has no rule is named without bytes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from importlib import resources
from string import Template
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.catalogue import Card, hardware_of
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.estimation.allocator import smallest_limit
from kerasmem.estimation.report import Outcome, Pool
from kerasmem.estimation.unmodelled import CUDA_CONTEXT, XLA_AUTOTUNING, XLA_WORKSPACE_LIMIT, prefetched_batches
from kerasmem.estimation.xla import compile_lowered, dumped_plan, lower
from kerasmem.estimation.xla_plan import CompiledStep, JaxNames, Weights, XlaPlan, product_bytes
from kerasmem.models.inputs import model_inputs
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import prepare_step
from kerasmem.models.training import with_replaced
from kerasmem.processes.children import POLL_SECONDS, Limits, child_environment
from kerasmem.processes.forking import run_child, start_server
from kerasmem.units import GIB, format_size

EXTRA = "gpu-targets"
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
MEMORY_LIMIT = 8 * GIB  # of this machine, for the process that compiles
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
# XLA begins to recompute where more than this per cent of the memory would be needed. So many are never needed.
_NO_LIMIT = {"xla_gpu_memory_limit_slop_factor": 100_000}
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def start_compiler(card: Card) -> None:
    """Start the process that compiles, so that it loads its libraries in the background."""
    if not missing_parts() and hardware_of(card) is not None:
        start_server(child_environment(**ENVIRONMENT))


def gpu_target_plan(request: StepSpec, card: Card, *, timeout: float = 600.0) -> CompiledStep:
    """Plan the step of a model for a card with XLA, without a GPU.

    The step is compiled with Triton for matrix products and without, as on the card the faster of the two is taken
    at run time; and where XLA recomputes to keep within the card's memory, also without that limit.

    Args:
        request: the model and its training.
        card: a card of the catalogue, from compute capability 7.0 on.
        timeout: seconds for all of it.

    Raises:
        UsageError: the card's hardware figures are not known, or the model's step is written for TensorFlow alone.
        MissingExtraError: JAX and its compiler for NVIDIA's GPUs are not installed.
        ModelError: XLA refused.
        ChildFailure: it took too long or too much memory; the reason says which.
    """
    target = target_text(card)
    if missing_parts():
        raise MissingExtraError("compiling for a GPU that is not there", EXTRA)
    has_triton = card.compute_capability >= _TRITON_CAPABILITY
    with TemporaryDirectory(prefix="kerasmem-") as folder:
        compiled: CompiledStep = run_child(
            compile_request, request, target, has_triton, folder,
            limits=Limits(timeout, MEMORY_LIMIT), environ=child_environment(**ENVIRONMENT),
        )  # fmt: skip
    return compiled


def target_text(card: Card) -> str:
    """Return the target configuration of a card.

    What stands as a number in `data/gpu_target.txtpb` is the same on every card since compute capability 7.0
    (see docs/dev/cards.md), but the versions of cuDNN and CUDA: those that the step would run with,
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
    limit = max(smallest_limit(compiled.requests(variant)) for variant in plans)
    workspace, product = workspace_bytes(plan), product_bytes(plans, card.compute_capability)
    outcome = Outcome(
        method="gpu-target",
        execution="xla",
        total=allocator.in_use,
        low=min(variant.total for variant in plans),
        high=max(max(compiled.allocated(variant).in_use for variant in plans) + max(workspace, product), limit),
        pool=Pool(plan.total, allocator.in_use, allocator.reserved, limit),
        unmodelled=(CUDA_CONTEXT, XLA_AUTOTUNING, prefetched_batches(sum(compiled.arguments.get("inputs", ())))),
        notes=_notes(compiled, card, workspace, product),
    )
    names = JaxNames(compiled.layers, compiled.optimizer, rows)
    return plan.divided(outcome, compiled.held(weights or {}), names)


def workspace_bytes(plan: XlaPlan) -> int:
    """Return the bytes that cuDNN may take for its convolutions beside the plan.

    Without the card XLA cannot ask cuDNN which of its algorithms it will run, and counts 0 bytes for each. Many need
    none. Those that work in another layout hold a copy of the input, the filter and the output of one convolution,
    and convolutions run one after another, so the largest convolution's three bound that. FFT and some Winograd
    algorithms may take more, which is not counted: at most `XLA_WORKSPACE_LIMIT`.
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
            f"cuDNN's workspace for {len(plan.convolutions)} convolutions: {workspace:,} B more in the upper end, "
            "which the verdict counts: a copy of the input, filter and output of the largest, "
            f"{max(plan.convolutions)[1]}; XLA chooses the algorithm when it compiles on the card, and a Fourier "
            f"transform may take more, at most {format_size(XLA_WORKSPACE_LIMIT)}"
        )
    if product:
        notes.append(f"a matrix product in cuBLAS: up to {product:,} B more (the fastest kernel is chosen on the card)")
    return tuple(notes)


def compile_request(request: StepSpec, target: str, has_triton: bool, folder: str) -> CompiledStep:
    """Compile the step of a model for a target and return XLA's plans.

    Args:
        request: the model and its training.
        target: the card, as text.
        has_triton: whether XLA has the choice of Triton for matrix products on it.
        folder: an empty one for XLA's dumps, which grow until this process ends.

    Raises:
        ModelError: If Keras or XLA refuses.
        UsageError: If the model has a training step of its own.
    """
    from jax.experimental import topologies

    # One thread writes machine code, which nobody waits for.
    options = {"xla_gpu_cuda_data_dir": cuda_folder(), "xla_gpu_force_compilation_parallelism": 1}
    device = topologies.get_topology_desc("target", "cuda", target_config=target, topology="1x1x1").devices[0]
    with request.opened() as opened:
        model, mode = opened.model, request.mode
        if mode != "inference" and has_own_step(model):
            raise UsageError(
                f"model {model.name!r} has a train_step of its own, written for TensorFlow: gpu-target compiles "
                "through JAX, on which it does not run; use method='xla' or 'graph'"
            )
        structure, inputs = model_inputs(model, request.input_shapes())
        training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
        step = prepare_step(model, training, structure, inputs, request.batch_size, mode, jit_compile=True)
        lowered, compiled = lower(step, device)
        notes = (*compiled.notes, *recurrent_notes(model))

    def plan(more: dict[str, Any]) -> XlaPlan:
        return plan_early(lowered, {**options, **more}, mkdtemp(dir=folder))

    variants = [{}, _NO_TRITON] if has_triton else [{}]
    with ThreadPoolExecutor(2) as pool:  # XLA's compiler spends most of its time in one thread
        plans = tuple(pool.map(plan, variants))
        is_recomputed = any(variant.is_recomputed for variant in plans)
        unlimited = pool.map(plan, [{**_NO_LIMIT, **more} for more in variants]) if is_recomputed else ()
        return replace(compiled, plans=plans, unlimited=tuple(unlimited), notes=notes)


def recurrent_notes(model: Any) -> list[str]:
    """Return a note if the model has a layer that is planned otherwise than Keras on JAX runs it."""
    names = [layer.name for layer in flatten_layers(model) if type(layer).__name__ in ("LSTM", "GRU")]
    return [
        f"{name} is planned as a loop; Keras on JAX has cuDNN run it on a card, which no plan without the card knows: "
        "a step may take twice as much"
        for name in names[:1]
    ]


def plan_early(lowered: Any, options: dict[str, Any], folder: str) -> XlaPlan:
    """Compile a lowered step until XLA has planned its memory, and return the plan.

    Machine code comes last, takes two thirds of the time and changes nothing of the plan. No call stops XLA before it,
    so compiling goes on in a thread, and the process must end without waiting for it, as a fork does.

    Args:
        lowered: the step.
        options: of the compiler.
        folder: an empty one for XLA's dumps; XLA goes on writing to it.

    Raises:
        ModelError: If XLA refuses.
    """
    compiled = ThreadPoolExecutor(1).submit(compile_lowered, lowered, options, folder)
    while not compiled.done():
        if (plan := dumped_plan(folder)) is not None:
            return plan
        wait([compiled], POLL_SECONDS)
    return compiled.result()


def missing_parts() -> bool:
    """Return whether a package of the compiler is missing, without importing any."""
    return not _folders("jax") or not any(map(_folders, PLUGINS))


def cuda_folder() -> str:
    """Return the folder with NVIDIA's assembler (ptxas) and its library of functions.

    The package that the extra installs comes first, as CUDA 13's assembler no longer takes cards before Turing. Then
    the package that `jax[cuda13]` installs.

    Raises:
        MissingExtraError: there is none.
    """
    for folder in (*_folders("nvidia.cuda_nvcc"), *_folders("nvidia.cu13")):
        if os.path.exists(os.path.join(folder, "bin", "ptxas")):
            return folder
    raise MissingExtraError(
        "NVIDIA's assembler ptxas (nvidia-cuda-nvcc-cu12), with which XLA compiles for a GPU,", EXTRA
    )


def _folders(package: str) -> list[str]:
    """Return the folders of a package, none if it is not installed."""
    try:
        specification = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # nor is the package around it
        return []
    return [] if specification is None else list(specification.submodule_search_locations or ())
