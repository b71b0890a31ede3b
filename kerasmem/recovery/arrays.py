"""Memory of arrays that Keras is given whole, which it copies to the device."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kerasmem.errors import ModelError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.inputs import model_inputs
from kerasmem.models.sizes import element_bytes
from kerasmem.models.spec import StepSpec
from kerasmem.models.step import output_spec, step_targets
from kerasmem.models.weightless import random_state_kept, weightless
from kerasmem.recovery.changed_model import build


def array_bytes(spec: StepSpec, samples: int) -> tuple[int, int]:
    """Return the bytes of arrays on the device during each step, and at the end of the method.

    `fit` and `evaluate` keep a copy of inputs and targets. `predict` keeps a copy of the inputs and the outputs of all
    batches, and joins the outputs at the end into one more copy.

    Args:
        spec: the step.
        samples: length of the arrays.

    Raises:
        KerasmemError: If the model cannot be opened, or does not tell its shapes.
    """
    keras = import_keras()
    with random_state_kept(), weightless():
        model = build(spec, [])
        structure, inputs = model_inputs(model, spec.input_shapes())
        batch = next((each.shape[0] for each in inputs if each.shape[0] is not None), 1)
        flat = [keras.KerasTensor((batch, *each.shape[1:]), each.dtype) for each in inputs]
        outputs = partial(output_spec, model, structure, flat)
        copied = samples * _tensor_bytes(flat) // batch
        if spec.mode == "inference":
            try:
                returned = samples * _tensor_bytes(outputs()) // batch
            except Exception as error:  # Keras raises whatever a model's own call does
                raise ModelError(
                    f"samples: the outputs of {model.name!r} are unknown: {keras_reason(error)}"
                ) from error
            return copied + returned, copied + 2 * returned
        copied += samples * _tensor_bytes(step_targets(model, spec.targets(), outputs, batch)) // batch
    return copied, copied


def _tensor_bytes(tensors: Any) -> int:
    flat = import_keras().tree.flatten(tensors)
    return sum(math.prod(each.shape) * element_bytes(each.dtype) for each in flat if each is not None)
