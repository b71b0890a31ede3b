"""A complete script for some changes: opens the model, changes it, compiles it and trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasmem.models.backend import import_keras
from kerasmem.models.own_step import takes_settings
from kerasmem.recovery.changes import CLONED, NEW_MODEL, Change
from kerasmem.recovery.source_text import (
    arrays_text,
    loss_text,
    metrics_text,
    nested_text,
    opening_lines,
    optimizer_text,
)
from kerasmem.recovery.traits import Sizes, Traits, batch_tensors
from kerasmem.recovery.transforms import is_mixing, new_inputs, separable, single, source_lines


def script(traits: Traits, changes: Sequence[Change], heading: str) -> str:
    """Return Python that trains with the changes.

    Args:
        traits: of the model: what it is, and how the user gave it.
        changes: in the order in which they are made.
        heading: what it is and what is predicted, one comment line a line.
    """
    by_kind = {each.kind: each.value for each in changes}
    imports, body = opening_lines(traits.origin.source, traits.origin.options, by_kind.get("dtype_policy"))
    batch = int(by_kind.get("batch_size", traits.batch_size))
    rows = -(-batch // int(by_kind.get("micro_batches", 1)))
    loss, metrics = loss_text(traits.model.loss), metrics_text(traits.model)
    if loss == "model.loss" and NEW_MODEL & set(by_kind):
        body.append("loss = model.loss")
        loss = "loss"
    for each in changes:
        body += _lines(each, traits, rows)
    if CLONED & set(by_kind):
        body.append("kerasmem.clear_session()   # the first model's weights, also where it was trained")
    jit = by_kind.get("jit_compile", None if traits.jit_compile == "auto" else traits.jit_compile)
    words = [f"optimizer={optimizer_text(traits.training, by_kind.get('optimizer'))}", f"loss={loss}"]
    weights = traits.training.loss_weights
    words += [f"loss_weights={weights!r}"] if weights else []
    words += [f"metrics={metrics}"] if metrics else []
    words += [f"jit_compile={jit}"] if jit is not None else []
    if takes_settings(traits.model):
        body.append(f"model.compile({', '.join(words)})")
    elif jit is not None:  # the code that builds it has compiled it, with arguments of its own
        body.append(f"model.jit_compile = {jit}")
    if "replicas" in by_kind:
        cards = [f'"GPU:{number}"' for number in range(by_kind["replicas"])]
        body = [
            f"cards = [{', '.join(cards)}]   # in this machine",
            'strategy = tf.distribute.MirroredStrategy(cards if tf.config.list_physical_devices("GPU") else None)',
            "with strategy.scope():",
            *("    " + line for line in body),
        ]
    imports += [line.strip() for line in body if line.strip().startswith("from ")]
    lines = [line for line in body if not line.strip().startswith("from ")]
    lines += _training(traits, by_kind, batch)
    return "\n".join([*(f"# {line}" for line in heading.splitlines()), *_imports(lines, imports), "", *lines]) + "\n"


def _training(traits: Traits, by_kind: dict[str, Any], batch: int) -> list[str]:
    """Return the lines that make the data and run the step on it."""
    sizes = by_kind.get("input_size")
    targets = traits.targets[0 if sizes is None else 1]
    arrays = "x, y" if targets else "x"
    run = {
        "train": f"model.fit({arrays}, batch_size={batch}, epochs=1)",
        "inference": f"model.predict(x, batch_size={batch})",
        "evaluate": f"model.evaluate({arrays}, batch_size={batch})",
    }[traits.mode]
    if "micro_batches" in by_kind:
        pieces = by_kind["micro_batches"]
        run = f"kerasmem.fit(model, {arrays}, batch_size={batch}, micro_batches={pieces}, epochs=1)"
    return [
        "",
        "# Put your own data here; these are arrays of the right shapes.",
        f"x = {_input_arrays(traits, sizes, 'float32' in by_kind)}",
        *([f"y = {targets}"] if targets else []),
        "",
        run,
    ]


def _input_arrays(traits: Traits, sizes: Sizes | None, is_single: bool) -> str:
    """Return the input arrays; `is_single` makes float64 float32."""
    tensors = batch_tensors(traits.inputs, traits.batch_size, sizes)
    if is_single:
        singles = {"float64": "float32"}
        tensors = [import_keras().KerasTensor(each.shape, singles.get(each.dtype, each.dtype)) for each in tensors]
    return arrays_text(traits.structure, tensors, str(2 * traits.batch_size))


def _lines(change: Change, traits: Traits, rows: int) -> list[str]:
    if change.kind == "float32":
        own_sizes = [each.shape[1:] for each in traits.inputs]
        inputs = nested_text(new_inputs(traits.model, _input_text, own_sizes, is_single=True))
        return [*source_lines(single), *_clone("clone_function=single, recursive=True, ", inputs)]
    if change.kind == "separable":
        return [
            *source_lines(is_mixing),
            *source_lines(separable),
            "model = keras.models.clone_model(model, clone_function=separable, recursive=True)   # train it again",
        ]
    if change.kind == "input_size":
        return _clone("", nested_text(new_inputs(traits.model, _input_text, change.value)))
    if change.kind == "freeze":
        return [f"for layer in model.layers[:{traits.head_start}]:   # the backbone", "    layer.trainable = False"]
    if change.kind == "lora":
        return [
            "from kerasmem.recovery.transforms import with_lora",
            f"model = with_lora(model, {change.value})   # beside kernels of the backbone larger than their factors",
        ]
    if change.kind == "recompute":
        levels = "" if change.value == "auto" else f", levels={change.value}"
        return [f"model = kerasmem.recompute(model, batch_size={rows}{levels})   # cuts chosen for so many samples"]
    return []


def _input_text(shape: tuple[int, ...], dtype: str, name: str) -> str:
    named = "" if name.startswith("input_layer") else f", name={name!r}"  # one that Keras gave it says nothing
    return f"keras.Input({shape!r}, dtype={dtype!r}{named})"


def _clone(words: str, inputs: str) -> list[str]:
    return [
        f"inputs = {inputs}",
        f"changed = keras.models.clone_model(model, {words}input_tensors=inputs)",
        "changed.set_weights(model.get_weights())",
        "model = changed",
        "del changed, inputs",
    ]


def _imports(lines: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the imports of what the lines use: the standard library's, then the others and our own."""
    text = "\n".join(lines)
    standard = [line for line in own if line == "import sys"]
    others = {"kerasmem": "import kerasmem", "np": "import numpy as np", "tf": "import tensorflow as tf"}
    used = ["import keras", *(line for name, line in others.items() if f"{name}." in text)]
    rest = [line for line in own if line not in standard]
    return [*standard, *([""] if standard else []), *used, *([""] if rest else []), *rest]
