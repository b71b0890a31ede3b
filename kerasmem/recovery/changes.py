"""Changes to a training step, with their effect on the result and the time. Pure.

A change is a kind and a value that JSON has, so that it can be handed to another process and kept in a file. `harm`
orders changes from what leaves the training as it is to what trains another network; it is an order, not a measure.

The words of each kind stand in `data/changes.json`, in the order in which changes are made to a model. A row has a
name, what becomes of the result (one of `RESULTS`), the cost in words, and `compute` and `steps` where they are not 1;
under "values" what is other for a value; under "without_training" what is other for evaluation and inference; under
"with_batch_norm" what the cost ends with for a model that normalises by the statistics of a batch: the result is
another training then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.files import package_data

SAME, TRAINING = "same training trajectory", "same network, other training"
# From the least to the most that a change does to the result, and how far apart these lie in `Change.harm`.
RESULTS = {
    "same outputs": 1.0, SAME: 1.0, "same network, other rounding": 10.0, TRAINING: 100.0,
    "other optimizer": 100.0, "other network": 1000.0,
}  # fmt: skip


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

    @property
    def code(self) -> str:
        """The call that makes it, after "keras.optimizers."."""
        options = "".join(f", {name}={value!r}" for name, value in self.config.items())
        return f"{self.class_name}({self.learning_rate}{options})"


_DATA = package_data(__package__, "changes")
# From the nearest to Adam to the farthest.
OPTIMIZERS = {name: LeanOptimizer(**row) for name, row in _DATA["optimizers"].items()}


@dataclass(frozen=True)
class Change:
    """One change to the model or its training step.

    Attributes:
        kind: "batch_size", "micro_batches", "recompute", "jit_compile", "dtype_policy", "optimizer", "freeze",
            "lora" or "replicas".
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
        """Rank in the order of harm. The harm of several changes is their sum."""
        return RESULTS[self.result] * (1 + 0.1 * self.steps) + (self.compute - 1)

    @property
    def key(self) -> tuple[str, str]:
        """Identity: kind and value."""
        return self.kind, repr(self.value)

    def to_data(self) -> dict[str, Any]:
        """Return the kind and the value."""
        return {"kind": self.kind, "value": self.value}


_GROUPS = {"micro_batches": "batch", "batch_size": "batch", "replicas": "batch", "freeze": "trained", "lora": "trained"}


def make_change(
    kind: str, value: Any, *, has_batch_norm: bool = False, batch_size: int | None = None, trains: bool = True
) -> Change:
    """Return a change with its words.

    Args:
        kind: as in `Change`.
        value: what it is set to.
        has_batch_norm: the model normalises by the statistics of a batch, so that a smaller one gives others.
        batch_size: samples in a batch as they are now.
        trains: the step is a training step.

    Examples:
        >>> make_change("micro_batches", 4).result
        'same training trajectory'
    """
    row = _DATA["changes"][kind]
    row = row if trains else {**row, **row.get("without_training", {})}
    row = {**row, **row.get("values", {}).get(str(value), {})}
    words = _words(kind, value, batch_size)
    result, cost = row["result"], row["cost"].format(**words)
    if has_batch_norm and "with_batch_norm" in row:
        result, cost = TRAINING, cost + row["with_batch_norm"]
    compute = float(value) if kind == "replicas" else row.get("compute", 1.0)
    steps = _steps(kind, value, batch_size)
    steps = row.get("steps", 1.0) if steps is None else steps
    return Change(kind, value, row["name"].format(**words), result, cost, compute, steps)


def _words(kind: str, value: Any, batch_size: int | None) -> dict[str, Any]:
    """Return the values of the braces in the texts of a change."""
    if kind == "optimizer":
        return {"title": OPTIMIZERS[value].title, "keeps": OPTIMIZERS[value].keeps}
    if kind == "micro_batches" and batch_size is not None:
        return {"value": value, "samples": f" of {-(-batch_size // int(value)):,}"}
    return {"value": value, "samples": ""}


def _steps(kind: str, value: Any, batch_size: int | None) -> float | None:
    """Return how far a change goes along its own line, if that depends on its value."""
    if kind == "micro_batches":
        return math.log2(value)
    if kind == "batch_size":
        return max(math.log2(batch_size / value), 0.0) if batch_size else 1.0
    if kind == "optimizer":
        return list(OPTIMIZERS).index(value)
    return value if kind == "replicas" else None


def ordered(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Sort changes into the order of their application: the model first, then its step."""
    order = list(_DATA["changes"])
    return tuple(sorted(changes, key=lambda each: order.index(each.kind)))


def worst_result(changes: Iterable[Change]) -> str:
    """Return the largest effect on the result among several changes."""
    order = list(RESULTS)
    return max((each.result for each in changes), key=order.index, default=SAME)


@dataclass(frozen=True)
class Traits:
    """Properties of a model and its step.

    Attributes:
        batch_size: samples in a batch.
        has_own_step: the class of the model brings a training step.
        has_batch_norm: the model normalizes by the statistics of a batch.
        head_start: index in `model.layers` at which the head begins; 0 if there is no backbone.
        can_lora: a layer of the backbone can train thin factors in place of its kernel.
        trains: the step is a training step.
    """

    batch_size: int
    has_own_step: bool
    has_batch_norm: bool
    head_start: int
    can_lora: bool
    trains: bool = True

    def change(self, kind: str, value: Any) -> Change:
        """Describe a change to this model."""
        has_batch_norm, batch_size = self.has_batch_norm, self.batch_size
        return make_change(kind, value, has_batch_norm=has_batch_norm, batch_size=batch_size, trains=self.trains)


_BUILT_POLICY = 'keras.config.set_dtype_policy("{value}")   # before the model is built'
# A model that is loaded keeps the policies of its layers.
_LOADED_POLICY = (
    "from kerasmem.recovery.transforms import with_policy\n"
    'model = with_policy(model, "{value}")   # weights stay float32'
)
_MODEL_LINES = {
    "freeze": "for layer in model.layers[:{head_start}]:   # the backbone\n    layer.trainable = False",
    "lora": "from kerasmem.recovery.transforms import with_lora\nmodel = with_lora(model, {value})",
    "recompute": "model = kerasmem.recompute(model, batch_size={rows})",
    "optimizer": "optimizer = keras.optimizers.{optimizer}",
    "replicas": (
        "strategy = tf.distribute.MirroredStrategy([{cards}])\n"
        "with strategy.scope():\n"
        "    ...   # build and compile the model here"
    ),
}
_COMPILED = {"freeze", "lora", "optimizer", "jit_compile"}  # take effect when the model is compiled
_RUN_LINES = {
    "train": "model.fit(x, y, batch_size={batch})",
    "evaluate": "model.evaluate(x, y, batch_size={batch})",
    "inference": "model.predict(x, batch_size={batch})",
}
_MICRO_BATCHES = "kerasmem.fit(model, x, y, batch_size={batch}, micro_batches={value})"


def code_of(changes: Iterable[Change], traits: Traits, mode: str, *, is_loaded: bool) -> str:
    """Write the lines that make some changes.

    They name `model`, the arrays `x` and `y`, and the `optimizer`, `loss` and `metrics` of the script they go into.

    Args:
        changes: in the order in which they are made.
        traits: of the model.
        mode: "train", "evaluate" or "inference".
        is_loaded: whether the script loads the model from a file, and does not build it.
    """
    values = {each.kind: each.value for each in changes}
    batch = int(values.get("batch_size", traits.batch_size))
    words = {"head_start": traits.head_start, "batch": batch, "rows": -(-batch // values.get("micro_batches", 1))}
    if "optimizer" in values:
        words["optimizer"] = OPTIMIZERS[values["optimizer"]].code
    if "replicas" in values:
        words["cards"] = ", ".join(f'"GPU:{number}"' for number in range(values["replicas"]))
    templates = {**_MODEL_LINES, "dtype_policy": _LOADED_POLICY if is_loaded else _BUILT_POLICY}
    lines = [templates[kind].format(value=value, **words) for kind, value in values.items() if kind in templates]
    if _COMPILED & set(values) or (is_loaded and "dtype_policy" in values):
        jit = f", jit_compile={values['jit_compile']}" if "jit_compile" in values else ""
        lines.append(f"model.compile(optimizer, loss=loss, metrics=metrics{jit})   # the rest as before")
    if "micro_batches" in values:
        lines.append(_MICRO_BATCHES.format(value=values["micro_batches"], **words))
    elif "batch_size" in values:
        lines.append(_RUN_LINES[mode].format(**words))
    return "\n".join(lines) + "\n"
