"""Frozen layers and single frozen weights of a live model, which its configuration has in part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers, weights_added_to_train
from kerasmem.errors import UsageError


class NotRebuiltError(UsageError):
    """A live model cannot be built again from its configuration."""


@dataclass(frozen=True)
class Trained:
    """Whether a model's layers and weights are trained, in Keras's order.

    Attributes:
        layers: for each layer at any depth; empty if all are.
        weights: for each weight; empty if it follows from the layers.
    """

    layers: tuple[bool, ...] = ()
    weights: tuple[bool, ...] = ()


def trained_parts(model: Any) -> Trained:
    """Return which layers and weights of a model are trained."""
    layers = flatten_layers(model)
    flags = tuple(bool(layer.trainable) for layer in layers)
    follow = all(weight.trainable == layer.trainable for layer in layers for weight in weights_added_to_train(layer))
    return Trained(
        () if all(flags) else flags,
        () if follow else tuple(bool(weight.trainable) for weight in model.weights),
    )


def freeze_as(copy: Any, trained: Trained) -> None:
    """Freeze in a copy of a model what is frozen in the model.

    Raises:
        NotRebuiltError: If the copy has other layers or weights.
    """
    if trained.layers:
        _set_trainable(copy, flatten_layers(copy), trained.layers)
    if trained.weights:
        _set_trainable(copy, copy.weights, trained.weights)


def _set_trainable(copy: Any, parts: list[Any], flags: tuple[bool, ...]) -> None:
    if len(parts) != len(flags):
        raise NotRebuiltError(
            f"model {copy.name!r} has frozen parts that its configuration does not have; "
            "give a function that builds it in place of the model"
        )
    for part, flag in zip(parts, flags, strict=True):  # outer layers first: a layer sets those inside it
        if part.trainable != flag:
            part.trainable = flag
