"""Properties of a model that decide its remedies."""

from __future__ import annotations

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.models.backend import import_keras
from kerasmem.models.own_step import has_own_step
from kerasmem.models.spec import StepSpec
from kerasmem.models.weightless import random_state_kept, weightless
from kerasmem.recovery.changed_model import build
from kerasmem.recovery.changes import Traits
from kerasmem.recovery.transforms import head_start, takes_lora

LORA_RANK = 8


def traits_of(origin: StepSpec, batch_size: int) -> Traits:
    """Open a model without weights and read its traits.

    Raises:
        KerasmemError: If the model cannot be opened or compiled.
    """
    keras = import_keras()
    with random_state_kept(), weightless():
        model = build(origin, [])
        layers = flatten_layers(model)
        start = head_start(model) if list(getattr(model, "layers", ())) else 0
        backbone = [inner for layer in list(model.layers)[:start] for inner in flatten_layers(layer)]
        return Traits(
            batch_size,
            has_own_step=has_own_step(model),
            has_batch_norm=any(isinstance(each, keras.layers.BatchNormalization) for each in layers),
            head_start=start if any(layer.weights for layer in backbone) else 0,
            can_lora=any(takes_lora(each, LORA_RANK) for each in backbone),
            trains=origin.mode == "train",
        )
