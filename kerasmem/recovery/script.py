"""A complete script for some changes: opens the model, changes it, compiles it and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.recovery.changes import Change

_HEAD = "model.layers[:{}]"


@dataclass(frozen=True)
class ScriptParts:
    """What of a script does not depend on the changes but for the policy, as Python.

    Attributes:
        opening: for a dtype policy or None: the imports, and the lines that make `model`.
        optimizer: for an optimizer of `changes.OPTIMIZERS` or None: the optimizer.
        loss: the loss; "model.loss" where only the model knows it.
        metrics: a list of names, or None.
        inputs: for shapes or None, and whether float64 is made float32: the input arrays.
        targets: for shapes or None: the targets; None where the step takes none.
        input_layers: for shapes, or None for float32 in place of float64: `keras.Input`s in the model's structure.
        head_start: where the head begins in `model.layers`.
        batch_size: samples in a batch.
        jit_compile: as the user gave it, "auto" to leave it to Keras.
        mode: "train", "evaluate" or "inference".
    """

    opening: Any
    optimizer: Any
    loss: str
    metrics: str | None
    inputs: Any
    targets: Any
    input_layers: Any
    head_start: int
    batch_size: int
    jit_compile: bool | str
    mode: str = "train"


def script(parts: ScriptParts, changes: Sequence[Change], heading: str) -> str:
    """Return Python that trains with the changes.

    Args:
        parts: of the model.
        changes: in the order in which they are made.
        heading: what it is and what is predicted, one comment line a line.
    """
    by_kind = {each.kind: each.value for each in changes}
    imports, opening = parts.opening(by_kind.get("dtype_policy"))
    is_rebuilt = any(each.kind in _NEW_MODEL for each in changes)
    batch = int(by_kind.get("batch_size", parts.batch_size))
    rows = -(-batch // int(by_kind.get("micro_batches", 1)))
    body = [*opening]
    loss = parts.loss
    if loss == "model.loss" and is_rebuilt:
        body.append("loss = model.loss")
        loss = "loss"
    for each in changes:
        body += _lines(each, parts, rows)
    if any(each.kind in _CLONED for each in changes):
        body.append("gc.collect()   # the first model's weights")
    jit = by_kind.get("jit_compile", None if parts.jit_compile == "auto" else parts.jit_compile)
    words = [f"optimizer={parts.optimizer(by_kind.get('optimizer'))}", f"loss={loss}"]
    words += [f"metrics={parts.metrics}"] if parts.metrics else []
    words += [f"jit_compile={jit}"] if jit is not None else []
    body.append(f"model.compile({', '.join(words)})")
    if "replicas" in by_kind:
        cards = [f'"GPU:{number}"' for number in range(by_kind["replicas"])]
        body = [
            f"cards = [{', '.join(cards)}]   # in this machine",
            'strategy = tf.distribute.MirroredStrategy(cards if tf.config.list_physical_devices("GPU") else None)',
            "with strategy.scope():",
            *("    " + line for line in body),
        ]
    sizes = by_kind.get("input_size")
    targets = parts.targets(sizes)
    data = [
        "",
        "# Put your own data here; these are arrays of the right shapes.",
        f"x = {parts.inputs(sizes, 'float32' in by_kind)}",
    ]
    data += [f"y = {targets}"] if targets else []
    arrays = "x, y" if targets else "x"
    if "micro_batches" in by_kind:
        fit = f"kerasmem.fit(model, {arrays}, batch_size={batch}, micro_batches={by_kind['micro_batches']}, epochs=1)"
    elif parts.mode == "inference":
        fit = f"model.predict(x, batch_size={batch})"
    elif parts.mode == "evaluate":
        fit = f"model.evaluate({arrays}, batch_size={batch})"
    else:
        fit = f"model.fit({arrays}, batch_size={batch}, epochs=1)"
    imports += [line.strip() for line in body if line.strip().startswith("from ")]
    lines = [line for line in body if not line.strip().startswith("from ")]
    lines += [*data, "", fit]
    return "\n".join([*(f"# {line}" for line in heading.splitlines()), *_imports(lines, imports), "", *lines]) + "\n"


def _lines(change: Change, parts: ScriptParts, rows: int) -> list[str]:
    start = parts.head_start
    if change.kind == "float32":
        return [
            "def single(layer):",
            "    config = layer.get_config()",
            '    if layer.dtype_policy.name == "float64":',
            '        config["dtype"] = "float32"',
            "    return layer.__class__.from_config(config)",
            *_clone("clone_function=single, recursive=True, ", parts.input_layers(None)),
        ]
    if change.kind == "separable":
        return [
            "def separable(layer):",
            "    config = layer.get_config()",
            "    if type(layer) not in (keras.layers.Conv1D, keras.layers.Conv2D) or layer.groups > 1:",
            "        return layer.__class__.from_config(config)",
            '    if max(layer.kernel_size) == 1 or layer.padding == "causal":',
            "        return layer.__class__.from_config(config)",
            '    kept = ("name", "filters", "kernel_size", "strides", "padding", "data_format", "dilation_rate",',
            '            "activation", "use_bias", "dtype")',
            '    made = getattr(keras.layers, f"Separable{type(layer).__name__}")',
            "    return made.from_config({key: config[key] for key in kept})",
            "model = keras.models.clone_model(model, clone_function=separable, recursive=True)   # train it anew",
        ]
    if change.kind == "input_size":
        return _clone("", parts.input_layers(change.value))
    if change.kind == "freeze":
        return [f"for layer in {_HEAD.format(start)}:   # the backbone", "    layer.trainable = False"]
    if change.kind == "lora":
        return [
            "from kerasmem.recovery.transforms import takes_lora",
            f"for outer in {_HEAD.format(start)}:   # the backbone",
            "    for layer in outer._flatten_layers():   # also those inside layers",
            f"        if takes_lora(layer, {change.value}):   # a kernel that is larger than its factors",
            f"            layer.enable_lora({change.value})",
            "        elif not list(layer._flatten_layers(include_self=False)):",
            "            layer.trainable = False",
        ]
    if change.kind == "recompute":
        return [f"model = kerasmem.recompute(model, batch_size={rows})   # cuts chosen for so many samples"]
    return []


def _clone(words: str, inputs: str) -> list[str]:
    return [
        f"inputs = {inputs}",
        f"changed = keras.models.clone_model(model, {words}input_tensors=inputs)",
        "changed.set_weights(model.get_weights())",
        "model = changed",
        "del changed, inputs",
    ]


def _imports(lines: Sequence[str], own: Sequence[str]) -> list[str]:
    text = "\n".join(lines)
    standard = [name for name in ("gc",) if f"{name}." in text]
    others = [("keras", "import keras"), ("kerasmem", "import kerasmem"), ("np", "import numpy as np"),
              ("tf", "import tensorflow as tf")]  # fmt: skip
    used = [line for name, line in others if f"{name}." in text or name == "keras"]
    own_standard = [line for line in own if line == "import sys"]
    rest = [line for line in own if line not in own_standard]
    return [*(f"import {name}" for name in standard), *own_standard, *([""] if standard or own_standard else []),
            *used, *([""] if rest else []), *rest]  # fmt: skip


_CLONED = {"float32", "separable", "input_size"}
_NEW_MODEL = {*_CLONED, "recompute"}
