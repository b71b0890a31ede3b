"""Lines of Python that make a remedy's changes in the user's own script."""

from __future__ import annotations

from collections.abc import Iterable

from kerasmem.recovery.changes import OPTIMIZERS, Change
from kerasmem.recovery.traits import Traits

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
