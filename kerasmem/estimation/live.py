"""What a step of a model that lives here takes on a batch of another size: traced as it is, never run."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.devices.kernels import cpu_kernels
from kerasmem.errors import KerasmemError
from kerasmem.estimation.graph.build import build_program, variables_of
from kerasmem.estimation.graph.rules import rules_of
from kerasmem.estimation.graph.steps import graph_outcome
from kerasmem.estimation.outcome import Outcome
from kerasmem.estimation.xla import check_room, compile_plan
from kerasmem.estimation.xla import outcome as xla_outcome
from kerasmem.models.backend import import_keras
from kerasmem.models.op_names import Attribution
from kerasmem.models.optimizers import optimizer_variables
from kerasmem.models.sizes import spec_bytes, variable_bytes
from kerasmem.models.step import PreparedStep, trace_step


def live_outcome(model: Any, batch: Any, rows: int, *, mode: str = "train") -> Outcome:
    """Return the peak of the model's own step on so many rows: with its variables, in graph mode or under XLA.

    Unlike `kerasmem.estimate` this looks at the model itself, not at one made from its configuration, so that every
    step that Keras can trace has an answer: a `train_step` of the model's own, sample weights, several optimizers.

    Args:
        model: compiled and built; its weights stay as they are.
        batch: what its step takes: arrays, tensors or their specifications, the rows first.
        rows: of the batch that is asked about.
        mode: "train" or "evaluate".

    Raises:
        KerasmemError: the step cannot be traced, compiled or simulated.
    """
    import tensorflow as tf

    keras = import_keras()

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            raise KerasmemError("batches of sparse or ragged tensors cannot be estimated")
        return None if leaf is None else tf.TensorSpec((rows, *leaf.shape[1:]), leaf.dtype)

    x, y, weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(spec, batch))
    is_xla = bool(model.jit_compile)
    if is_xla:
        check_room(sum(variable_bytes(each) for each in [*model.variables, *optimizer_variables(model)]))
    keep_alive: list[Any] | None = [] if is_xla else None
    traced = trace_step(PreparedStep(model, x, y, mode, is_xla, sample_weight=weight), keep_alive)
    names = [layer.name for layer in flatten_layers(model, include_self=False)]
    attribution = Attribution(traced.scopes, names, traced.optimizers)
    if is_xla:
        sizes = tuple(spec_bytes(each) for each in traced.flat)
        return xla_outcome(compile_plan(traced), variables_of(traced), sizes, {}, attribution)
    rules = rules_of(cpu_kernels())
    program, _ = build_program(traced, rules)
    return graph_outcome(program, {}, attribution, rules)
