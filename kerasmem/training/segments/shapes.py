"""The chain of a model on Keras's JAX backend, from shapes: each call keeps its outputs.

What XLA really keeps of a layer's inside is not known before it has compiled the step. So the cuts are balanced by the
layers' outputs, and if a memory is given, the compiled step decides whether they are good enough.
"""

from __future__ import annotations

import math
from typing import Any

from kerasmem.errors import KerasmemError, ModelError
from kerasmem.models.backend import import_keras, keras_reason, symbolic_outputs
from kerasmem.models.sizes import element_bytes
from kerasmem.training.segments.planning import Kept, Step
from kerasmem.training.segments.tracing import inputs_and_calls, last_calls, update_bytes

_BYTES_A_SECOND = 1e10  # only ratios count


def shaped_chain(model: Any, batch_size: int, input_shape: Any = None) -> tuple[Step, ...]:
    """Return the chain of a Functional model's calls.

    Args:
        model: a Functional model, built; its weights are not read.
        batch_size: samples in a batch.
        input_shape: open dimensions of the inputs, as for `kerasmem.estimate`.

    Raises:
        UsageError: an input has open dimensions that `input_shape` does not give.
        ModelError: the model cannot be called.
    """
    from kerasmem.models.recomputed import walked
    from kerasmem.models.segment_scope import call_at_once

    keras = import_keras()
    inputs, calls = inputs_and_calls(model, batch_size, input_shape)
    tensors: dict[int, Any] = {}

    def call(*batch: Any) -> Any:
        run = walked(model, call_at_once, tensors)
        return run(keras.tree.pack_sequence_as(model.input, list(batch)), training=True)

    try:
        symbolic_outputs(call, *(keras.KerasTensor(*each) for each in inputs))
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be called on a batch: {keras_reason(error)}") from error
    sizes = {key: math.prod(each.shape) * element_bytes(str(each.dtype)) for key, each in tensors.items()}
    uses: dict[int, list[int]] = {}
    for number, (_, made) in enumerate(calls):
        for each in made.input_tensors:
            uses.setdefault(id(each), []).append(number)
    for each in model.outputs:
        uses.setdefault(id(each), []).append(len(calls))
    last_call = last_calls(made for _, made in calls)
    made_by = [
        (number, id(each)) for number, (_, made) in enumerate(calls) for each in made.outputs if id(each) in uses
    ]

    def waiting(number: int) -> int:
        """Return the bytes of gradients that later calls have made for earlier ones."""
        return sum(sizes.get(key, 0) for maker, key in made_by if maker < number < max(uses[key]))

    return tuple(
        _step(name, made, sizes, uses, last_call[id(made.operation)] == number, waiting(number))
        for number, (name, made) in enumerate(calls)
    )


def _step(name: str, call: Any, sizes: dict[int, int], uses: dict[int, list[int]], may_end: bool, waiting: int) -> Step:
    taken = sum(sizes.get(id(each), 0) for each in call.input_tensors)
    made = {id(each): sizes.get(id(each), 0) for each in call.outputs}
    kept = tuple(
        Kept(size, min(uses[key], default=None), max(uses[key], default=None), for_gradient=True)
        for key, size in made.items()
        if key in uses
    )
    working = taken + sum(made.values()) + 2 * update_bytes(call.operation)
    return Step(name, working / _BYTES_A_SECOND, working + waiting, kept, may_end)
