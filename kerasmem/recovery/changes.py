"""What can be changed about a training step, and what each change does to the result and to the time. Pure.

A change is a kind and a value that JSON has, so that it can be handed to another process and kept in a file. `harm`
orders changes from what leaves the training as it is to what trains another network; it is an order, not a measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasmem.errors import InputError

SAME = "same training trajectory"
ROUNDING = "same network, other rounding"
TRAINING = "same network, other training"
OPTIMIZER = "other optimizer"
NETWORK = "other network"
# From the least to the most that a change does to the result, and how far apart these lie in `Change.harm`.
RESULTS = {SAME: 1.0, ROUNDING: 10.0, TRAINING: 100.0, OPTIMIZER: 100.0, NETWORK: 1000.0}


@dataclass(frozen=True)
class LeanOptimizer:
    """An optimizer that keeps less than Adam.

    Attributes:
        title: in words.
        keeps: what it keeps beside the weights.
        class_name: Keras's.
        learning_rate: to begin with.
        config: other settings.
    """

    title: str
    keeps: str
    class_name: str
    learning_rate: float
    config: dict[str, Any] = field(default_factory=dict)


# From the nearest to Adam to the farthest.
OPTIMIZERS = {
    "adafactor": LeanOptimizer("Adafactor", "a row and a column of a matrix", "Adafactor", 0.001),
    "lion": LeanOptimizer("Lion", "one value a weight", "Lion", 0.0001),
    "sgd_momentum": LeanOptimizer("SGD with momentum", "one value a weight", "SGD", 0.01, {"momentum": 0.9}),
    "sgd": LeanOptimizer("plain SGD", "nothing", "SGD", 0.01),
}


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
    steps: float = 1.0

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

    def to_data(self) -> dict[str, Any]:
        """Return the kind and the value, from which `change_of` makes the change again."""
        return {"kind": self.kind, "value": self.value}


# Kinds of which the model is another object: Keras rebuilds it from its layers, or we do.
CLONED = {"float32", "separable", "input_size"}
NEW_MODEL = {*CLONED, "recompute"}
_GROUPS = {"micro_batches": "batch", "batch_size": "batch", "replicas": "batch", "freeze": "trained", "lora": "trained"}


def change(kind: str, value: Any, *, has_batch_norm: bool = False, batch_size: int | None = None) -> Change:
    """Return a change with its words.

    Args:
        kind: as in `Change`.
        value: what it is set to.
        has_batch_norm: the model normalises by the statistics of a batch, so that a smaller one gives others.
        batch_size: samples in a batch as they are now.

    Examples:
        >>> change("micro_batches", 4).result
        'same training trajectory'
    """
    name, result, cost, *more = _DESCRIPTIONS[kind](value, _Step(has_batch_norm, batch_size))
    return Change(kind, value, name, result, cost, **(more[0] if more else {}))


def change_of(data: Mapping[str, Any]) -> Change:
    """Return the change that `Change.to_data` described.

    Raises:
        InputError: it is no change.
    """
    kind = data.get("kind")
    if kind not in _DESCRIPTIONS:
        raise InputError(f"change: kind is {kind!r}; there are {', '.join(_DESCRIPTIONS)}")
    return change(str(kind), data.get("value"))


def ordered(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return changes in the order in which they are applied and told: the model first, then its step."""
    order = list(_DESCRIPTIONS)
    return tuple(sorted(changes, key=lambda each: order.index(each.kind)))


def worst_result(changes: Iterable[Change]) -> str:
    """Return what several changes together do to the result: the most that one of them does."""
    order = list(RESULTS)
    return max((each.result for each in changes), key=order.index, default=SAME)


class _Step(NamedTuple):
    """What words on a change depend on: BatchNorm in the model, and samples in a batch where known."""

    has_batch_norm: bool
    batch_size: int | None


# A name, what becomes of the result, the cost, and other fields of the `Change`.
_Description = tuple[Any, ...]


def _policy(value: str, step: _Step) -> _Description:
    scaled, least = (" with loss scaling", "7.0") if value == "mixed_float16" else ("", "8.0")
    cost = f"none or faster{scaled} from compute capability {least} on (NVIDIA's Tensor Cores)"
    return f"half precision ({value})", ROUNDING, cost


def _input_size(value: Any, step: _Step) -> _Description:
    sizes = ", ".join(" × ".join(map(str, shape)) for shape in value)
    cost = "less arithmetic; the network sees coarser or shorter samples"
    return f"smaller input ({sizes})", TRAINING, cost, {"steps": 3.0}


def _freeze(value: Any, step: _Step) -> _Description:
    cost = "less arithmetic: no gradients of frozen weights; needs a pretrained backbone"
    return "frozen backbone", TRAINING, cost, {"steps": 5.0}


def _lora(value: int, step: _Step) -> _Description:
    cost = f"two thin products more a layer (rank {value}); needs pretrained weights (Hu et al. 2021)"
    return f"LoRA of rank {value}", TRAINING, cost, {"steps": 4.0}


def _recompute(value: Any, step: _Step) -> _Description:
    # Of a step's arithmetic a third is the forward pass, and no more than that is done twice.
    cost = "at most a third more arithmetic: one more forward pass (Chen et al. 2016)"
    return "recomputation", SAME, cost, {"compute": 4 / 3}


def _optimizer(value: str, step: _Step) -> _Description:
    cost = f"its learning rate must be found again; keeps {OPTIMIZERS[value].keeps}"
    return OPTIMIZERS[value].title, OPTIMIZER, cost, {"steps": list(OPTIMIZERS).index(value)}


def _jit_compile(value: bool, step: _Step) -> _Description:
    cost = "compiles before the first step, then usually faster" if value else "a slower step on most networks"
    return "compiled by XLA" if value else "not compiled by XLA", ROUNDING, cost, {"steps": 0.0}


def _micro_batches(value: int, step: _Step) -> _Description:
    samples = "" if step.batch_size is None else f" of {-(-step.batch_size // int(value)):,}"
    statistics = "; BatchNorm sees micro-batches" if step.has_batch_norm else ""
    cost = f"same arithmetic in smaller pieces, which may use the card less{statistics}"
    result = TRAINING if step.has_batch_norm else SAME
    return f"{value} micro-batches{samples}", result, cost, {"steps": math.log2(value)}


def _batch_size(value: int, step: _Step) -> _Description:
    halvings = max(math.log2(step.batch_size / value), 0.0) if step.batch_size else 1.0
    cost = "more steps an epoch, of noisier gradients; the learning rate may have to change"
    return f"batches of {value:,}", TRAINING, cost, {"steps": halvings}


def _replicas(value: int, step: _Step) -> _Description:
    statistics = "; BatchNorm sees a card's part" if step.has_batch_norm else ""
    cost = f"{value} cards, and the exchange of gradients in each step{statistics}"
    result = TRAINING if step.has_batch_norm else SAME
    return f"{value} cards", result, cost, {"compute": float(value), "steps": value}


_DESCRIPTIONS: dict[str, Callable[[Any, _Step], _Description]] = {
    "float32": lambda *_: ("float32 in place of float64", ROUNDING, "none: float32 is faster on every card"),
    "dtype_policy": _policy,
    "separable": lambda *_: ("separable convolutions", NETWORK, "less arithmetic; train again, accuracy may fall"),
    "input_size": _input_size, "freeze": _freeze, "lora": _lora, "recompute": _recompute, "optimizer": _optimizer,
    "jit_compile": _jit_compile, "micro_batches": _micro_batches, "batch_size": _batch_size, "replicas": _replicas,
}  # fmt: skip
