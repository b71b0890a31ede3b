"""The process that compiles: Keras on JAX on the CPU, XLA's compiler for the card that is described to it.

It allocates no weight, no batch and nothing on a GPU, and does not run what it compiled.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import MissingExtraError, UsageError, first_line
from kerasmem.estimation.compiled.on_jax import compile_lowered, dumped_plan, lower
from kerasmem.estimation.compiled.plan import XlaPlan
from kerasmem.models.inputs import model_inputs
from kerasmem.models.opening import OpenedModel
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import PreparedStep, prepare_step
from kerasmem.models.training import with_replaced
from kerasmem.processes.children import ChildFailure

EXTRA = "gpu-targets"
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

# XLA begins to recompute where more than this per cent of the memory would be needed. So many are never needed.
_NO_LIMIT = {"xla_gpu_memory_limit_slop_factor": 100_000}
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
_POLL_SECONDS = 0.05
_ONE_THREAD = {"xla_gpu_force_compilation_parallelism": 1}  # for machine code, which nobody waits for


def compile_request(data: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of a model for a target and return XLA's plan.

    Args:
        data: "model" (a `StepSpec`), "target" (the card, as text), "has_triton" (whether XLA has the choice of
            Triton for matrix products on it), "folder" (an empty one for XLA's dumps, which grow until
            this process ends).

    Returns:
        The fields of a `CompiledStep`.
    """
    request = StepSpec.from_dict(data["model"])
    options = {"xla_gpu_cuda_data_dir": cuda_folder(), **_ONE_THREAD}
    with request.opened() as opened:
        lowered, compiled = lower(_requested_step(opened, request), _device(data["target"]))
        notes = (*compiled.notes, *recurrent_notes(opened.model))

    def plan(more: dict[str, Any]) -> XlaPlan:
        return plan_early(lowered, {**options, **more}, tempfile.mkdtemp(dir=data["folder"]))

    variants = [{}, _NO_TRITON] if data["has_triton"] else [{}]
    with ThreadPoolExecutor(2) as pool:  # XLA's compiler spends most of its time in one thread
        plans = tuple(pool.map(plan, variants))
        is_recomputed = any(each.is_recomputed for each in plans)
        unlimited = pool.map(plan, [{**_NO_LIMIT, **more} for more in variants]) if is_recomputed else ()
        return replace(compiled, plans=plans, unlimited=tuple(unlimited), notes=notes).to_dict()


def recurrent_notes(model: Any) -> Iterator[str]:
    """Say so if the model has a layer that is planned otherwise than Keras on JAX runs it."""
    names = [each.name for each in flatten_layers(model) if type(each).__name__ in ("LSTM", "GRU")]
    if names:
        yield (
            f"{names[0]} is planned as a loop; Keras on JAX has cuDNN run it on a card, which no plan without the card "
            "knows: a step may take twice as much"
        )


def plan_early(lowered: Any, options: dict[str, Any], folder: str) -> XlaPlan:
    """Compile a lowered step until XLA has planned its memory, and return the plan.

    Machine code comes last, takes two thirds of the time and changes nothing of the plan. No call stops XLA before it,
    so compiling goes on in a thread, and the process must end by `os._exit`.

    Args:
        lowered: the step.
        options: of the compiler.
        folder: an empty one for XLA's dumps; XLA goes on writing to it.

    Raises:
        ChildFailure: If XLA refuses.
    """
    compiled = ThreadPoolExecutor(1).submit(compile_lowered, lowered, options, "this target", folder)
    while not compiled.done():
        if (plan := dumped_plan(folder)) is not None:
            return plan
        wait([compiled], _POLL_SECONDS)
    return compiled.result()


def _requested_step(opened: OpenedModel, request: StepSpec) -> PreparedStep:
    """Return the step of a model that runs on TensorFlow in the process that asks.

    Raises:
        ModelError: If Keras refuses.
        UsageError: If the model has a training step of its own.
    """
    model = opened.model
    if request.mode != "inference" and has_own_step(model):
        raise UsageError(
            f"model {model.name!r} has a train_step of its own, written for TensorFlow: gpu-target compiles through "
            "JAX, on which it does not run; use method='xla' or 'graph'"
        )
    structure, inputs = model_inputs(model, request.input_shapes())
    training = with_replaced(opened.training, request.optimizer, request.loss, request.targets())
    return prepare_step(model, training, structure, inputs, request.batch_size, request.mode, jit_compile=True)


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


def _device(target: str) -> Any:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc("target", "cuda", target_config=target, topology="1x1x1").devices[0]
    except NotImplementedError as error:
        raise ChildFailure(f"this version of JAX does not compile without a device ({first_line(error)})") from error
