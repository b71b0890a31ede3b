"""What can be changed about a training step, and what each change does to the result and to the time. Pure.

A change is a kind and a value that JSON has, so that it can be handed to another process and kept in a file. `harm`
orders changes from what leaves the training as it is to what trains another network; it is an order, not a measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kerasmem.errors import InputError

SAME = "same training trajectory"
ROUNDING = "same network, other rounding"
TRAINING = "same network, other training"
OPTIMIZER = "other optimizer"
NETWORK = "other network"
# From the least to the most that a change does to the result, and how far apart these lie in `Change.harm`.
RESULTS = {SAME: 1.0, ROUNDING: 10.0, TRAINING: 100.0, OPTIMIZER: 100.0, NETWORK: 1000.0}


@dataclass(frozen=True)
class Change:
    """One change to the model or its training step.

    Attributes:
        kind: "batch_size", "micro_batches", "recompute", "jit_compile", "dtype_policy", "optimizer", "freeze", "lora",
            "input_size", "separable", "float32" or "replicas".
        value: what it is set to.
        name: in a few words.
        result: what becomes of the result, one of `RESULTS`.
        cost: what it costs in time, hardware or quality, in words.
        compute: the arithmetic of a step against now, 1.0 where it does not grow; for several cards their number.
        steps: how far it goes along its own line (halvings of a batch): more of the same is more harm.
    """

    kind: str
    value: Any
    name: str
    result: str
    cost: str
    compute: float = 1.0
    steps: float = field(default=1.0)

    @property
    def group(self) -> str:
        """Changes of one group exclude one another."""
        return _GROUPS.get(self.kind, self.kind)

    @property
    def harm(self) -> float:
        """Where it stands in the order of harm; the harm of several adds up."""
        return RESULTS[self.result] * (1 + 0.1 * self.steps) + (self.compute - 1)

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others."""
        return self.kind, repr(self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as JSON-ready data."""
        return {"kind": self.kind, "value": self.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **known: Any) -> Change:
        """Read what `to_dict` gave.

        Args:
            data: of one change.
            **known: what `change` takes beside, for words that depend on the model.

        Raises:
            InputError: it is no change.
        """
        kind = data.get("kind")
        if kind not in _MAKERS:
            raise InputError(f"change: kind is {kind!r}; there are {', '.join(_MAKERS)}")
        return change(str(kind), data.get("value"), **known)


_GROUPS = {"micro_batches": "batch", "batch_size": "batch", "replicas": "batch", "freeze": "trained", "lora": "trained"}


def change(kind: str, value: Any, *, has_batch_norm: bool = False, batch_size: int | None = None) -> Change:
    """Return a change with its words.

    Args:
        kind: as in `Change`.
        value: what it is set to.
        has_batch_norm: the model normalises by the statistics of a batch, so that a smaller one gives others.
        batch_size: samples in a batch as they are now.

    Example:
        >>> change("micro_batches", 4).result
        'same training trajectory'
    """
    return _MAKERS[kind](kind, value, has_batch_norm, batch_size)


def ordered(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return changes in the order in which they are applied and told: the model first, then its step."""
    order = list(_MAKERS)
    return tuple(sorted(changes, key=lambda each: order.index(each.kind)))


def worst_result(changes: Iterable[Change]) -> str:
    """Return what several changes together do to the result: the most that one of them does."""
    order = list(RESULTS)
    return max((each.result for each in changes), key=order.index, default=SAME)


def _float32(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    return Change(kind, value, "float32 in place of float64", ROUNDING, "none: float32 is faster on every card")


def _policy(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    scaled = " with loss scaling" if value == "mixed_float16" else ""
    cost = f"none or faster{scaled} from compute capability {'7.0' if value == 'mixed_float16' else '8.0'} on"
    return Change(kind, value, f"half precision ({value})", ROUNDING, f"{cost} (NVIDIA's Tensor Cores)")


def _separable(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    return Change(kind, value, "separable convolutions", NETWORK, "less arithmetic; train anew, accuracy may fall")


def _input_size(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    sizes = ", ".join(" × ".join(map(str, shape)) for shape in value)
    cost = "less arithmetic; the network sees coarser or shorter samples"
    return Change(kind, value, f"smaller input ({sizes})", TRAINING, cost, steps=3.0)


def _freeze(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    cost = "less arithmetic: no gradients of frozen weights; needs a pretrained backbone"
    return Change(kind, value, "frozen backbone", TRAINING, cost, steps=5.0)


def _lora(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    cost = f"two thin products more a layer (rank {value}); needs pretrained weights (Hu et al. 2021)"
    return Change(kind, value, f"LoRA of rank {value}", TRAINING, cost, steps=4.0)


def _recompute(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    # Of a step's arithmetic a third is the forward pass, and no more than that is done twice.
    cost = "at most a third more arithmetic: one more forward pass (Chen et al. 2016)"
    return Change(kind, value, "recomputation", SAME, cost, compute=4 / 3)


def _optimizer(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    words, keeps = OPTIMIZERS[value]
    return Change(kind, value, words, OPTIMIZER, f"its learning rate must be found anew; keeps {keeps}",
                  steps=list(OPTIMIZERS).index(value))  # fmt: skip


def _jit(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    name = "compiled by XLA" if value else "not compiled by XLA"
    cost = "compiles before the first step, then usually faster" if value else "a slower step on most networks"
    return Change(kind, value, name, ROUNDING, cost, steps=0.0)


def _micro(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    samples = "" if batch_size is None else f" of {-(-batch_size // int(value)):,}"
    statistics = "; BatchNorm sees micro-batches" if has_batch_norm else ""
    return Change(
        kind, value, f"{value} micro-batches{samples}", TRAINING if has_batch_norm else SAME,
        f"same arithmetic in smaller pieces, which may use the card less{statistics}", steps=math.log2(value),
    )  # fmt: skip


def _batch(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    halvings = 1.0 if not batch_size else max(math.log2(batch_size / value), 0.0)
    cost = "more steps an epoch, of noisier gradients; the learning rate may have to change"
    return Change(kind, value, f"batches of {value:,}", TRAINING, cost, steps=halvings)


def _replicas(kind: str, value: Any, has_batch_norm: bool, batch_size: int | None) -> Change:
    statistics = "; BatchNorm sees a card's part" if has_batch_norm else ""
    return Change(
        kind, value, f"{value} cards", TRAINING if has_batch_norm else SAME,
        f"{value} cards, and the exchange of gradients in each step{statistics}", compute=float(value), steps=value,
    )  # fmt: skip


# value -> (words, what it keeps beside the weights); from the nearest to Adam to the farthest
OPTIMIZERS = {
    "adafactor": ("Adafactor", "a row and a column of a matrix"),
    "lion": ("Lion", "one value a weight"),
    "sgd_momentum": ("SGD with momentum", "one value a weight"),
    "sgd": ("plain SGD", "nothing"),
}
_MAKERS = {
    "float32": _float32, "dtype_policy": _policy, "separable": _separable, "input_size": _input_size,
    "freeze": _freeze, "lora": _lora, "recompute": _recompute, "optimizer": _optimizer, "jit_compile": _jit,
    "micro_batches": _micro, "batch_size": _batch, "replicas": _replicas,
}  # fmt: skip
