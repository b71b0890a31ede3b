"""The gpu-target method: XLA's plan of a step for an absent card.

`compile_request` runs Keras on JAX in a subprocess, and XLA's compiler for a description of the card. It allocates no
weights and no batch, uses no GPU and does not run the step.

No constant is fitted to measurements. Documented rules bound the memory that is not in the plan and widen the interval;
memory without a rule is listed without bytes.
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
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import prepare_step
from kerasmem.processes.children import POLL_SECONDS, Limits, child_environment
from kerasmem.processes.forking import run_child, start_server
from kerasmem.units import GIB, format_size

EXTRA = "gpu-targets"
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
MEMORY_LIMIT = 8 * GIB  # of host memory, for the compiling subprocess
# That subprocess must use no GPU, no other backend, and no settings for the user's own training.
ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
_TRITON_CAPABILITY = (8, 0)  # XLA can use Triton for matrix products from Ampere on
# XLA recomputes values if a step needs more than this percentage of the memory. No step needs as much.
_NO_LIMIT = {"xla_gpu_memory_limit_slop_factor": 100_000}
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def start_compiler(card: Card) -> None:
    """Start the compiling subprocess to load its libraries in the background."""
    if not missing_parts() and hardware_of(card) is not None:
        start_server(child_environment(**ENVIRONMENT))


def gpu_target_plan(request: StepSpec, card: Card, *, timeout: float = 600.0) -> CompiledStep:
    """Plan a step for a card with XLA, without a GPU.

    The step is compiled with and without Triton for matrix products, as XLA chooses the faster one on the card. If XLA
    recomputes values to stay within the card's memory, it is also compiled without that limit.

    Args:
        request: the model and its training.
        card: a card of the catalogue, from compute capability 7.0 on.
        timeout: seconds for the subprocess. Defaults to 600.

    Raises:
        UsageError: If the card's hardware figures are unknown, or the model has a training step for TensorFlow only.
        MissingExtraError: If JAX and its compiler for NVIDIA's GPUs are not installed.
        ModelError: If Keras or XLA cannot compile the step.
        ChildFailure: If the subprocess exceeded the time or the memory limit.
    """
    target = target_text(card)
    if missing_parts():
        raise MissingExtraError("compiling for a GPU that is not here", EXTRA)
    has_triton = card.compute_capability >= _TRITON_CAPABILITY
    with TemporaryDirectory(prefix="kerasmem-") as folder:
        compiled: CompiledStep = run_child(
            compile_request, request, target, has_triton, folder,
            limits=Limits(timeout, MEMORY_LIMIT), environ=child_environment(**ENVIRONMENT),
        )  # fmt: skip
    return compiled


def target_text(card: Card) -> str:
    """Return XLA's target configuration for a card.

    Numbers in `data/gpu_target.txtpb` are the same on every card from compute capability 7.0 on (docs/dev/cards.md).
    The versions of cuDNN and CUDA decide among kernels; no buffer is known to depend on them.

    Args:
        card: a card of the catalogue.

    Raises:
        UsageError: If the card's hardware figures are unknown.
    """
    hardware, (major, minor) = hardware_of(card), card.compute_capability
    if hardware is None:
        raise UsageError(
            f"gpu-target needs the hardware figures of {card.name} (compute capability {major}.{minor}), which "
            "kerasmem's catalogue has from compute capability 7.0 on; use method='xla' or 'graph'"
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
    """Replay XLA's plans for a card on the simulated allocator.

    The total is XLA's default plan. The interval spans all plans. Its lower end is without waste in chunks, which
    is small if the allocator takes the card's whole memory at once; its upper end has the workspaces of cuDNN and
    cuBLAS.

    Args:
        compiled: the step, compiled for the card.
        card: a card of the catalogue.
        rows: names of the report's rows; an inner layer counts as the row that contains it. Defaults to all layers.
        weights: bytes and row of each weight in the model's order, for "trainable" and "non_trainable". Defaults to
            none, and no layer then has weights.
    """
    plan, plans = compiled.likely, (*compiled.plans, *compiled.unlimited)
    allocator = compiled.allocate(plan)
    limit = max(smallest_limit(compiled.requests(variant)) for variant in plans)
    workspace, product = workspace_bytes(plan), product_bytes(plans, card.compute_capability)
    outcome = Outcome(
        method="gpu-target",
        execution="xla",
        total=allocator.in_use,
        low=min(variant.total for variant in plans),
        high=max(max(compiled.allocate(variant).in_use for variant in plans) + max(workspace, product), limit),
        pool=Pool(plan.total, allocator.in_use, allocator.reserved, limit),
        unmodelled=(CUDA_CONTEXT, XLA_AUTOTUNING, prefetched_batches(sum(compiled.arguments.get("inputs", ())))),
        notes=_notes(compiled, card, workspace, product),
    )
    names = JaxNames(compiled.layers, compiled.optimizer, rows)
    return plan.divide(outcome, compiled.argument_shares(weights or {}), names)


def workspace_bytes(plan: XlaPlan) -> int:
    """Return the bytes that cuDNN's convolutions may need in addition to the plan.

    Without the card XLA does not know cuDNN's algorithms and plans 0 bytes for each. Many need none. Algorithms in
    another layout need a copy of the convolution's input, filter and output, and convolutions run one after another, so
    the largest one is the bound. FFT and some Winograd algorithms may need more, up to `XLA_WORKSPACE_LIMIT`, which is
    not counted.
    """
    return min(max((size for size, _ in plan.convolutions), default=0), XLA_WORKSPACE_LIMIT)


def _notes(compiled: CompiledStep, card: Card, workspace: int, product: int) -> tuple[str, ...]:
    plan = compiled.likely
    notes = [f"XLA's plan for {card.key}, made without the card"]
    if plan.is_recomputed:
        note = f"XLA recomputes values to stay within {card.memory_bytes:,} B"
        if compiled.unlimited:
            note += f"; without that limit the step takes {compiled.unlimited[0].total:,} B"
        notes.append(note)
    notes += compiled.notes
    if plan.convolutions:
        notes.append(
            f"the upper end and the verdict have {workspace:,} B of workspace for cuDNN's {len(plan.convolutions)} "
            f"convolutions: a copy of the input, filter and output of the largest, {max(plan.convolutions)[1]}; XLA "
            "chooses the algorithm when it compiles on the card, and if it is a Fourier transform it may need up to "
            f"{format_size(XLA_WORKSPACE_LIMIT)}"
        )
    if product:
        notes.append(f"a matrix product may need {product:,} B more, if cuBLAS is the fastest on the card")
    return tuple(notes)


def compile_request(request: StepSpec, target: str, has_triton: bool, folder: str) -> CompiledStep:
    """Compile a step for a target and return XLA's plans.

    Args:
        request: the model and its training.
        target: the card's target configuration, from `target_text`.
        has_triton: whether XLA can use Triton for matrix products on the card.
        folder: an empty folder for XLA's dumps, which grow until this process ends.

    Raises:
        ModelError: If Keras or XLA cannot compile the step.
        UsageError: If the model has its own training step.
    """
    from jax.experimental import topologies

    # One thread suffices for machine code, as the plan is complete before it.
    options = {"xla_gpu_cuda_data_dir": cuda_folder(), "xla_gpu_force_compilation_parallelism": 1}
    device = topologies.get_topology_desc("target", "cuda", target_config=target, topology="1x1x1").devices[0]
    with request.open_model() as opened:
        model, mode = opened.model, request.mode
        if mode != "inference" and has_own_step(model):
            raise UsageError(
                f"model {model.name!r} has its own train_step, which does not run on JAX, and gpu-target compiles "
                "through JAX; use method='xla' or 'graph'"
            )
        structure, inputs = request.inputs(model)
        step = prepare_step(model, request.training(), structure, inputs, request.samples, mode, jit_compile=True)
        lowered, compiled = lower(step, device)
        notes = (*compiled.notes, *recurrent_notes(model))

    def plan(variant: dict[str, Any]) -> XlaPlan:
        return plan_early(lowered, {**options, **variant}, mkdtemp(dir=folder))

    variants = [{}, _NO_TRITON] if has_triton else [{}]
    with ThreadPoolExecutor(2) as pool:  # XLA's compiler spends most of its time in one thread
        plans = tuple(pool.map(plan, variants))
        is_recomputed = any(compilation.is_recomputed for compilation in plans)
        unlimited = pool.map(plan, [{**_NO_LIMIT, **variant} for variant in variants]) if is_recomputed else ()
        return replace(compiled, plans=plans, unlimited=tuple(unlimited), notes=notes)


def recurrent_notes(model: Any) -> list[str]:
    """Return a note on recurrent layers, which cuDNN runs on a card."""
    names = [layer.name for layer in flatten_layers(model) if type(layer).__name__ in ("LSTM", "GRU")]
    return [
        f"{name} is planned as a loop; Keras on JAX runs it by cuDNN on a card, and a step may need twice as much"
        for name in names[:1]
    ]


def plan_early(lowered: Any, options: dict[str, Any], folder: str) -> XlaPlan:
    """Compile a lowered step, and return XLA's plan of its memory.

    Machine code comes last, takes two thirds of the time and does not change the plan. XLA cannot be stopped before it,
    so a thread continues to compile, and the process must exit without joining it.

    Args:
        lowered: the lowered step.
        options: options of the compiler.
        folder: an empty folder for XLA's dumps. XLA continues to write to it.

    Raises:
        ModelError: If XLA cannot compile the step.
    """
    compiled = ThreadPoolExecutor(1).submit(compile_lowered, lowered, options, folder)
    while not compiled.done():
        if (plan := dumped_plan(folder)) is not None:
            return plan
        wait([compiled], POLL_SECONDS)
    return compiled.result()


def missing_parts() -> bool:
    """Return whether a package of the compiler is missing, without an import."""
    return not _folders("jax") or not any(map(_folders, PLUGINS))


def cuda_folder() -> str:
    """Return the folder with NVIDIA's assembler (ptxas) and its library of functions.

    The extra's package comes first, as CUDA 13's assembler does not support cards before Turing. The second is that of
    `jax[cuda13]`.

    Raises:
        MissingExtraError: If neither is installed.
    """
    for folder in (*_folders("nvidia.cuda_nvcc"), *_folders("nvidia.cu13")):
        if os.path.exists(os.path.join(folder, "bin", "ptxas")):
            return folder
    raise MissingExtraError("compiling for a GPU with NVIDIA's assembler ptxas (nvidia-cuda-nvcc-cu12)", EXTRA)


def _folders(package: str) -> list[str]:
    """Return the folders of a package, or none if it is not installed."""
    try:
        specification = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing
        return []
    return [] if specification is None else list(specification.submodule_search_locations or ())
