"""Run a segment of a model inside `jax.checkpoint`, so that its inside is computed again for the gradient.

What JAX runs again is what it traced, with the values that it traced with; so every variable that the segment reads is
handed in, and what it assigns (statistics, states of seed generators), the losses that it adds and Keras's masks are
handed out. Each is then assigned and added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, loss_owner, replace_losses
from kerasmem.compat.keras_state import in_symbolic_scope, mask_of, set_mask
from kerasmem.training.recompute.scope import SegmentFunction, SegmentScope, variables_now


def gradients_wanted() -> bool:
    """Return whether a gradient may follow. On JAX this is not known yet, and costs nothing without."""
    return not in_symbolic_scope()


def run_segment(run: SegmentFunction, inputs: Sequence[Any], layers: Sequence[Any], again: bool) -> list[Any]:
    """Return `run(inputs)`.

    Args:
        run: from the tensors that enter to the tensors that leave; it is called once.
        inputs: tensors (with Keras's masks on them), or None for an optional input that is not there.
        layers: the Keras layers that it calls; losses and variables are looked for in them.
        again: whether only the inputs are kept for the gradient, and the segment runs again then.

    Returns:
        The tensors that leave, with their masks.
    """
    import jax

    if not again:
        return run(list(inputs))
    variables, values = variables_now(layers)
    inner = [each for layer in layers for each in flatten_layers(layer)]
    assigned: list[Any] = []
    owners: list[Any] = []

    def pure(values: Any, inputs: Any, masks: Any) -> Any:
        for tensor, mask in zip(inputs, masks, strict=True):
            set_mask(tensor, mask)
        with SegmentScope(zip(variables, values, strict=True)) as scope:
            outputs = run(inputs)
        updates = scope.updates()
        assigned[:] = [variable for variable, _ in updates]
        owners[:] = [loss_owner(loss, inner) or layers[0] for loss in scope.losses]
        return outputs, [mask_of(each) for each in outputs], [value for _, value in updates], list(scope.losses)

    outputs, masks, updates, losses = jax.checkpoint(pure)(values, list(inputs), [mask_of(each) for each in inputs])
    for variable, value in zip(assigned, updates, strict=True):
        variable.assign(value)
    for owner, loss in zip(owners, losses, strict=True):
        replace_losses(owner, loss)
    for tensor, mask in zip(outputs, masks, strict=True):
        set_mask(tensor, mask)
    return list(outputs)
