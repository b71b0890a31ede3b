"""The process that compiles for several devices: Keras on JAX, variables and the batch laid out over a mesh of them.

`python -m kerasmem.estimation.parallel.worker` takes a request in JSON (see `plan_request`) and answers in JSON. The
devices are this machine's CPU under several names; no weight is allocated and nothing that was compiled runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.estimation.compiled import on_jax
from kerasmem.estimation.compiled.hlo import collectives
from kerasmem.estimation.parallel.parallelism import (
    BATCH_AXIS,
    DATA,
    MODEL_AXIS,
    Axes,
    Parallelism,
    Placed,
    place,
    unused_layout,
)
from kerasmem.models.backend import import_keras
from kerasmem.models.request import ModelRequest, open_request
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.symbolic_step import SymbolicStep
from kerasmem.processes.task import ChildFailure, serve

WAY_OUT = "Keras shards on JAX alone; --parallel data without --shard-optimizer is answered for TensorFlow (graph)"


def plan_request(data: dict[str, Any]) -> dict[str, Any]:
    """Compile the step of a model for several devices and return what XLA plans for one of them.

    Args:
        data: "model" (a `ModelRequest` with the whole batch), "parallelism" (a `Parallelism`).

    Returns:
        "argument", "output", "alias", "temp" (bytes on a device), "arguments" (sizes on a device, by group), "placed"
        (the variables), "live" and "instant" (what lives at the peak), "collectives", "notes".
    """
    request, asked = ModelRequest.from_dict(data["model"]), Parallelism.from_dict(data["parallelism"])
    with open_request(request) as opened:
        step = on_jax.requested_step(opened, request, WAY_OUT)
        layout = _layout_map(asked)
        whole = [
            Placed(str(each.path), tuple(each.shape), (None,) * len(each.shape), variable_bytes(each), name)
            for name, group in step.variables.items()
            for each in group
        ]
        placed = place(whole, asked, layout.axes_of)
        found = _compiled(step, placed, asked, layout)
        if unused := layout.unused():
            raise unused_layout(unused, [each.path for each in placed if each.group == "trainable"])
    return found


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


def _compiled(step: SymbolicStep, placed: tuple[Placed, ...], asked: Parallelism, layout: Any) -> dict[str, Any]:
    """Compile the step with its variables laid out, and return the plan for one device."""
    import jax

    mesh = layout.device_mesh.backend_mesh

    def on(tensor: Any, axes: Axes) -> Any:
        return on_jax.shaped(tensor, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))

    def of_batch(tensor: Any) -> Any:
        rows = BATCH_AXIS if asked.kind == DATA else None
        return on(tensor, (rows, *[None] * (len(tensor.shape) - 1)))

    by_group = ([each for each in placed if each.group == name] for name in step.variables)
    state = tuple(
        [on(tensor, each.axes) for tensor, each in zip(tensors, group, strict=True)]
        for tensors, group in zip(step.state(), by_group, strict=True)
    )
    data = import_keras().tree.map_structure(of_batch, step.data)
    kept = jax.tree.map(lambda each: each.sharding, state)
    scope: Any = contextlib.nullcontext()
    if asked.layout:  # Keras lays out the outputs of layers that it names, as it does in `fit`
        scope = import_keras().distribution.ModelParallel(layout_map=layout, batch_dim_name=BATCH_AXIS).scope()
    with scope:
        lowered, described = on_jax.lower(step, state, data, f"; {WAY_OUT}", out_shardings=(None, kept))
    compiled, found = on_jax.compile_once(lowered, {}, "several devices", step)
    return {
        **described,
        **found,
        "placed": [each.to_dict() for each in placed],
        "collectives": [vars(each) for each in collectives(compiled.as_text())],
    }


if __name__ == "__main__":
    serve(plan_request)
