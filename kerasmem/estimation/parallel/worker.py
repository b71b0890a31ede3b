"""The process that compiles for several devices: Keras on JAX, variables and the batch laid out over a mesh of them.

`python -m kerasmem.estimation.parallel.worker` takes a request in JSON (see `plan_request`) and answers in JSON. The
devices are this machine's CPU under several names; no weight is allocated and nothing that was compiled runs.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kerasmem.errors import KerasmemError, UsageError
from kerasmem.estimation.gpu_target.hlo import live_buffers, operation_names, origin, peak_of
from kerasmem.estimation.gpu_target.step import JaxStep, jax_step
from kerasmem.estimation.parallel.collectives import collectives
from kerasmem.estimation.parallel.parallelism import BATCH_AXIS, DATA, MODEL_AXIS, Axes, Parallelism
from kerasmem.estimation.parallel.placement import Placed, place, unused_layout
from kerasmem.models.backend import allow_jax, import_keras
from kerasmem.models.compiling import has_own_step
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.sizes import variable_bytes
from kerasmem.processes.task import ChildFailure, serve

WAY_OUT = "Keras shards on JAX alone; --parallel data without --shard-optimizer is answered for TensorFlow (graph)"


def plan_request(data: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of a model for several devices and return what XLA plans for one of them.

    Args:
        data: "model" (a `ModelRequest` with the whole batch), "parallelism" (a `Parallelism`).

    Returns:
        "argument", "output", "alias", "temp" (bytes on a device), "arguments" (sizes on a device, by group), "placed"
        (the variables), "live" and "instant" (what lives at the peak), "collectives", "notes", "seconds".
    """
    begin = time.monotonic()
    request, asked = ModelRequest.from_dict(data["model"]), Parallelism.from_dict(data["parallelism"])
    with allow_jax(), open_request(request) as opened:
        if request.mode != "inference" and has_own_step(opened.model):
            raise UsageError(
                f"model {opened.model.name!r} has a train_step of its own, written for TensorFlow: {WAY_OUT}"
            )
        step = jax_step(opened, request)
        layout = _layout_map(asked)
        placed = place(_variables(opened.model, step), asked, layout.axes_of)
        compiled, module, live_ranges, sizes = _compile(step, placed, asked, layout)
        if unused := layout.unused():
            raise unused_layout(unused, [each.path for each in placed if each.group == "trainable"])
    memory = compiled.memory_analysis()
    return {
        "argument": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "arguments": sizes,
        "placed": [asdict(each) for each in placed],
        "collectives": [asdict(each) for each in collectives(module)],
        **_details(module, live_ranges, step),
        "notes": list(step.notes),
        "seconds": time.monotonic() - begin,
    }


def _layout_map(asked: Parallelism) -> Any:
    """Return the user's layout as Keras's own `LayoutMap`, which also notes what of it was used."""
    keras = import_keras()

    class NotedLayoutMap(keras.distribution.LayoutMap):  # type: ignore[name-defined]
        def __init__(self, mesh: Any) -> None:
            super().__init__(mesh)
            self._used: set[int] = set()
            self._given = {pattern: keras.distribution.TensorLayout(axes, mesh) for pattern, axes in asked.layout}
            self.update(self._given)

        def __getitem__(self, path: str) -> Any:
            try:
                found = super().__getitem__(path)
            except ValueError as error:
                raise UsageError(f"layout of {path}: {' '.join(str(error).split())}") from error
            if found is not None:
                self._used.add(id(found))
            return found

        def axes_of(self, path: str) -> Axes | None:
            found = self[path]
            return None if found is None else tuple(found.axes)

        def unused(self) -> list[str]:
            return [pattern for pattern, each in self._given.items() if id(each) not in self._used]

    shape = (asked.replicas, 1) if asked.kind == DATA else (1, asked.replicas)
    return NotedLayoutMap(keras.distribution.DeviceMesh(shape, (BATCH_AXIS, MODEL_AXIS), _devices(asked.replicas)))


def _devices(count: int) -> list[str]:
    import jax

    if len(jax.devices()) < count:
        raise ChildFailure(f"JAX made {len(jax.devices())} devices of this machine's CPU, not the {count} asked for")
    return [f"cpu:{device.id}" for device in jax.devices()[:count]]


def _variables(model: Any, step: JaxStep) -> list[Placed]:
    groups = {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": model.optimizer.variables if "optimizer" in step.groups else [],
        "metrics": model.metrics_variables if "metrics" in step.groups else [],
    }
    return [
        Placed(str(each.path), tuple(each.shape), (None,) * len(each.shape), variable_bytes(each), name)
        for name in step.groups
        for each in groups[name]
    ]


def _compile(
    step: JaxStep, placed: tuple[Placed, ...], asked: Parallelism, layout: Any
) -> tuple[Any, str, str, dict[str, list[int]]]:
    """Return the compiled step, its text, XLA's dump of live ranges and the arguments' sizes on a device."""
    import jax

    mesh = layout.device_mesh.backend_mesh

    def on(axes: Axes) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def shaped(tensor: Any, axes: Axes) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=on(axes))

    def of_batch(tensor: Any) -> Any:
        rows = BATCH_AXIS if asked.kind == DATA else None
        return shaped(tensor, (rows, *[None] * (len(tensor.shape) - 1)))

    by_group = {name: [each for each in placed if each.group == name] for name in step.groups}
    state = tuple(
        [shaped(tensor, each.axes) for tensor, each in zip(group, by_group[name], strict=True)]
        for name, group in zip(step.groups, step.state, strict=True)
    )
    data = import_keras().tree.map_structure(of_batch, step.data)
    kept = jax.tree.map(lambda each: each.sharding, state)
    options = {} if step.keeps_state else {"donate_argnums": 0, "out_shardings": (None, kept)}
    try:
        with _distribution(asked, layout):
            lowered = jax.jit(step.function, **options).lower(state, data)
    except KerasmemError:
        raise
    except Exception as error:
        raise ChildFailure(
            f"the step cannot be traced on JAX: {type(error).__name__}: {_first_line(error)}; {WAY_OUT}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=dump)
        except Exception as error:
            raise ChildFailure(f"XLA does not compile the step for several devices: {_first_line(error)}") from error
        ranges = sorted(Path(folder).glob("*live-range.txt"), key=lambda path: path.stat().st_size)
        live_ranges = ranges[-1].read_text() if ranges else ""
    sizes = {
        name: [_shard_bytes(leaf) for leaf in jax.tree.leaves(group)]
        for name, group in zip((*step.groups, "inputs"), (*state, data), strict=True)
    }
    return compiled, compiled.as_text(), live_ranges, sizes


@contextlib.contextmanager
def _distribution(asked: Parallelism, layout: Any) -> Iterator[None]:
    """Let Keras lay out the outputs of layers that the user's layout names, as it does in `fit`."""
    if not asked.layout:
        yield
        return
    with import_keras().distribution.ModelParallel(layout_map=layout, batch_dim_name=BATCH_AXIS).scope():
        yield


def _shard_bytes(spec: Any) -> int:
    size = spec.dtype.itemsize
    for each in spec.sharding.shard_shape(spec.shape):
        size *= each
    return int(size)


def _details(module: str, live_ranges: str, step: JaxStep) -> dict[str, Any]:
    """Return what lives at the peak; nothing where XLA's dump does not read as expected."""
    instruction, live = peak_of(live_ranges)
    names = operation_names(module)
    operation = names.get(instruction or "")
    layer, phase = (None, None) if operation is None else origin(operation, step.layers, step.optimizer)
    return {
        "live": [asdict(each) for each in live_buffers(live, names, step.layers, step.optimizer)],
        "instant": None if operation is None else {"operation": operation, "layer": layer, "phase": phase},
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


if __name__ == "__main__":
    serve(plan_request)
