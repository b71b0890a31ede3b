"""The process that compiles: Keras on JAX on the CPU, XLA's compiler for the card that is described to it.

`python -m kerasmem.estimation.gpu_target.worker` takes a request in JSON (see `compile_request`) and answers in JSON.
It allocates no weight, no batch and nothing on a GPU, and does not run what it compiled.
"""

from __future__ import annotations

import importlib.util
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kerasmem.errors import KerasmemError, MissingExtraError
from kerasmem.estimation.gpu_target.hlo import (
    convolution_bytes,
    is_recomputed,
    live_buffers,
    operation_names,
    origin,
    peak_of,
)
from kerasmem.estimation.gpu_target.step import JaxStep, jax_step
from kerasmem.models.backend import allow_jax, import_keras
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.processes.task import ChildFailure, serve

FEATURE, EXTRA = "compiling for a GPU that is not there", "gpu-targets"
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

# XLA begins to recompute where more than this per cent of the memory would be needed. So many are never needed.
_NO_LIMIT = {"xla_gpu_memory_limit_slop_factor": 100_000}
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compile_request(data: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of a model for a target and return what XLA plans.

    Args:
        data: "model" (a `ModelRequest`), "target" (the card, as text), "has_triton" (whether XLA has the choice of
            Triton for matrix products on it).

    Returns:
        "variants" (one dict each), "live" (what lives at the peak), "instant", "convolutions", "arguments" (sizes in
        bytes, by group), "notes", "seconds", "host_bytes".
    """
    begin = time.monotonic()
    request = ModelRequest.from_dict(data["model"])
    options = {"xla_gpu_cuda_data_dir": cuda_folder()}
    with allow_jax(), open_request(request) as opened:
        step = jax_step(opened, request)
        lowered, arguments = _lower(step, _device(data["target"]))
    found = _compile_all(lowered, options, data["has_triton"], step)
    return {
        **found,
        "arguments": arguments,
        "notes": list(step.notes),
        "seconds": time.monotonic() - begin,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def missing_parts() -> bool:
    """Return whether a package that the compiler needs is not installed; nothing is imported."""
    try:
        return importlib.util.find_spec("jax") is None or not any(map(importlib.util.find_spec, PLUGINS))
    except ModuleNotFoundError:  # no jax_plugins at all
        return True


def cuda_folder() -> str:
    """Return the folder with NVIDIA's assembler (ptxas) and its library of functions, from their Python package.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        specification = importlib.util.find_spec("nvidia.cuda_nvcc")
    except ModuleNotFoundError:
        specification = None
    for folder in (specification.submodule_search_locations or ()) if specification is not None else ():
        if (Path(folder) / "bin" / "ptxas").exists() and (Path(folder) / "nvvm" / "libdevice").is_dir():
            return folder
    raise MissingExtraError(
        "NVIDIA's assembler ptxas (nvidia-cuda-nvcc-cu12), with which XLA compiles for a GPU,", EXTRA
    )


def _device(target: str) -> Any:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc("target", "cuda", target_config=target, topology="1x1x1").devices[0]
    except NotImplementedError as error:
        raise ChildFailure(f"this version of JAX does not compile without a device ({_first_line(error)})") from error


def _lower(step: JaxStep, device: Any) -> tuple[Any, dict[str, list[int]]]:
    """Return the step in the compiler's language, and the sizes of its arguments in bytes, by group."""
    import jax

    place = jax.sharding.SingleDeviceSharding(device)

    def shaped(tensor: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=place)

    state, data = import_keras().tree.map_structure(shaped, (step.state, step.data))
    sizes = {
        name: [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(group)]
        for name, group in zip((*step.groups, "inputs"), (*state, data), strict=True)
    }
    try:
        lowered = jax.jit(step.function, donate_argnums=() if step.keeps_state else 0).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:
        raise ChildFailure(f"the step cannot be traced on JAX: {type(error).__name__}: {_first_line(error)}") from error
    return lowered, sizes


def _compile_all(lowered: Any, options: dict[str, Any], has_triton: bool, step: JaxStep) -> dict[str, Any]:
    """Compile the variants that differ: two at a time, as XLA's compiler spends most of its time in one thread."""
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder, ThreadPoolExecutor(2) as pool:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        first = pool.submit(_compile, lowered, {**options, **dump})
        second = pool.submit(_compile, lowered, {**options, **_NO_TRITON}) if has_triton else None
        compiled, seconds = first.result()
        module = compiled.as_text()
        details = _details(module, Path(folder), step)
        variants = [_variant(compiled, seconds, module, limited=True, triton=has_triton)]
        del compiled
        if second is not None:
            other, seconds = second.result()
            variants.append(_variant(other, seconds, other.as_text(), limited=True, triton=False))
            del other, second
        if any(each["recomputed"] for each in variants):
            for each, (free, seconds) in zip(
                list(variants),
                pool.map(
                    lambda triton: _compile(lowered, {**options, **_NO_LIMIT, **({} if triton else _NO_TRITON)}),
                    [each["triton"] or not has_triton for each in variants],
                ),
                strict=True,
            ):
                variants.append(_variant(free, seconds, free.as_text(), limited=False, triton=each["triton"]))
    return {"variants": variants, **details}


def _compile(lowered: Any, options: dict[str, Any]) -> tuple[Any, float]:
    begin = time.monotonic()
    try:
        return lowered.compile(compiler_options=options), time.monotonic() - begin
    except Exception as error:
        raise ChildFailure(f"XLA does not compile the step for this target: {_first_line(error)}") from error


def _variant(compiled: Any, seconds: float, module: str, limited: bool, triton: bool) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    return {
        "limited": limited,
        "triton": triton,
        "argument": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "recomputed": is_recomputed(module),
        "seconds": seconds,
    }


def _details(module: str, folder: Path, step: JaxStep) -> dict[str, Any]:
    """Return what lives at the peak; nothing where XLA's dumps do not read as expected."""
    dumps = sorted(folder.glob("*live-range.txt"), key=lambda path: path.stat().st_size)
    instruction, live = peak_of(dumps[-1].read_text()) if dumps else (None, ())
    names = operation_names(module)
    operation = names.get(instruction or "")
    layer, phase = (None, None) if operation is None else origin(operation, step.layers, step.optimizer)
    return {
        "live": [asdict(each) for each in live_buffers(live, names, step.layers, step.optimizer)],
        "instant": None if operation is None else {"operation": operation, "layer": layer, "phase": phase},
        "convolutions": [list(each) for each in convolution_bytes(module)],
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


if __name__ == "__main__":
    serve(compile_request)
