"""Changes to a training step, with their effect on the result and the time, and their code. Pure.

A change is a kind and a JSON value, so that another process or a file can hold it. `harm` orders changes from the same
training to another network; it is an order, not a measure.

`data/changes.json` has the words of each kind, in the order in which changes are made to a model. A row has a name, the
effect on the result (one of `RESULTS`), the cost in words, and `compute` and `steps` if they are not 1. "values" has
the differences for single values, "without_training" those for evaluation and inference. "with_batch_norm" is the end
of the cost for a model that normalizes by the statistics of a batch, for which the result is another training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kerasmem.files import package_data

SAME, TRAINING = "same training trajectory", "same network, other training"
# Effects on the result, from the least to the largest, with their weight in `Change.harm`.
RESULTS = {
    "same outputs": 1.0, SAME: 1.0, "same network, other rounding": 10.0, TRAINING: 100.0,
    "other optimizer": 100.0, "other network": 1000.0,
}  # fmt: skip


@dataclass(frozen=True)
class LeanOptimizer:
    """An optimizer with fewer variables than Adam.

    Attributes:
        title: name in words.
        keeps: its variables in words.
        class_name: name of Keras's class.
        learning_rate: initial learning rate.
        config: other settings.
    """

    title: str
    keeps: str
    class_name: str
    learning_rate: float
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The call that creates it, after "keras.optimizers."."""
        options = "".join(f", {name}={value!r}" for name, value in self.config.items())
        return f"{self.class_name}({self.learning_rate}{options})"


_DATA = package_data(__package__, "changes")
# From the most to the least similar to Adam.
OPTIMIZERS = {name: LeanOptimizer(**row) for name, row in _DATA["optimizers"].items()}


@dataclass(frozen=True)
class Change:
    """One change to the model or its training step.

    Attributes:
        kind: "batch_size", "micro_batches", "recompute", "jit_compile", "dtype_policy", "optimizer", "freeze",
            "lora" or "replicas".
        value: value of the setting.
        name: the change in a few words.
        result: effect on the result, one of `RESULTS`.
        cost: cost in time, hardware or quality, in words.
        compute: arithmetic of a step relative to now, at least 1.0; for several cards their number.
        steps: degree of the change, such as halvings of a batch; a higher degree is more harm.
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
        """Group of changes that exclude one another."""
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
        value: value of the setting.
        has_batch_norm: whether the model normalizes by the statistics of a batch.
        batch_size: samples per batch now.
        trains: whether the step is a training step.

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
    """Return the values of the placeholders in the texts of a change."""
    if kind == "optimizer":
        return {"title": OPTIMIZERS[value].title, "keeps": OPTIMIZERS[value].keeps}
    if kind == "micro_batches" and batch_size is not None:
        return {"value": value, "samples": f" of {-(-batch_size // int(value)):,}"}
    return {"value": value, "samples": ""}


def _steps(kind: str, value: Any, batch_size: int | None) -> float | None:
    """Return the degree of a change, if it depends on the value."""
    if kind == "micro_batches":
        return math.log2(value)
    if kind == "batch_size":
        return max(math.log2(batch_size / value), 0.0) if batch_size else 1.0
    if kind == "optimizer":
        return list(OPTIMIZERS).index(value)
    return value if kind == "replicas" else None


def order_changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Sort changes into the order of their application: the model first, then its step."""
    order = list(_DATA["changes"])
    return tuple(sorted(changes, key=lambda change: order.index(change.kind)))


def worst_result(changes: Iterable[Change]) -> str:
    """Return the largest effect on the result among several changes."""
    order = list(RESULTS)
    return max((change.result for change in changes), key=order.index, default=SAME)


@dataclass(frozen=True)
class Traits:
    """Properties of a model and its step.

    Attributes:
        batch_size: samples per batch.
        has_own_step: whether the model's class has a custom training step.
        has_batch_norm: whether the model normalizes by the statistics of a batch.
        head_start: index in `model.layers` of the head's first layer; 0 if there is no backbone.
        can_lora: whether a layer of the backbone can train low-rank factors instead of its kernel.
        trains: whether the step is a training step.
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
# A loaded model keeps the policies of its layers.
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
    """Return lines of Python that make changes in the user's script.

    They refer to `model`, the arrays `x` and `y`, and the `optimizer`, `loss` and `metrics` of the script.

    Args:
        changes: changes in the order of application.
        traits: properties of the model.
        mode: "train", "evaluate" or "inference".
        is_loaded: whether the script loads the model from a file instead of building it.
    """
    values = {change.kind: change.value for change in changes}
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
