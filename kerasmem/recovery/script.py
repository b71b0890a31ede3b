"""A complete script for some changes: opens the model, changes it, compiles it and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.models.backend import import_keras
from kerasmem.models.inputs import input_name
from kerasmem.recovery.building import Origin
from kerasmem.recovery.changes import Change
from kerasmem.recovery.source_text import (
    arrays_text,
    loss_text,
    metrics_text,
    nested_text,
    opening_lines,
    optimizer_text,
)
from kerasmem.recovery.transforms import packed_inputs

_HEAD = "model.layers[:{}]"
Sizes = list[list[int]]  # a shape for each input, without the batch


@dataclass(frozen=True)
class ScriptParts:
    """What a script is made of, read from the model.

    Attributes:
        origin: how the user gave the model.
        model: without weights.
        training: the settings of its `compile`.
        structure: of its inputs.
        inputs: flat.
        targets: as Python, for the model as it is and for smaller inputs; None where the step takes none.
        head_start: where the head begins in `model.layers`.
        batch_size: samples in a batch.
        jit_compile: as the user gave it, "auto" to leave it to Keras.
        mode: "train", "evaluate" or "inference".
    """

    origin: Origin
    model: Any
    training: Any
    structure: Any
    inputs: tuple[Any, ...]
    targets: tuple[str | None, str | None]
    head_start: int
    batch_size: int
    jit_compile: bool | str
    mode: str = "train"

    def opening(self, policy: str | None) -> tuple[list[str], list[str]]:
        """Return the imports, and the lines that make `model` with a dtype policy."""
        return opening_lines(self.origin.source, self.origin.options, policy)

    def input_arrays(self, sizes: Sizes | None, is_single: bool) -> str:
        """Return the input arrays; `is_single` makes float64 float32."""
        tensors = batch_tensors(self.inputs, self.batch_size, sizes)
        if is_single:
            singles = {"float64": "float32"}
            tensors = [import_keras().KerasTensor(each.shape, singles.get(each.dtype, each.dtype)) for each in tensors]
        return arrays_text(self.structure, tensors, str(2 * self.batch_size))

    def input_layers(self, sizes: Sizes | None) -> str:
        """Return `keras.Input`s in the model's structure: of other sizes, or float32 in place of float64."""
        texts = []
        shapes = sizes or [each.shape[1:] for each in self.inputs]
        for tensor, each, shape in zip(self.model.inputs, self.inputs, shapes, strict=True):
            dtype = "float32" if sizes is None and each.dtype == "float64" else each.dtype
            name = input_name(tensor)  # one that Keras gave it says nothing
            named = "" if name.startswith("input_layer") else f", name={name!r}"
            texts.append(f"keras.Input({tuple(shape)!r}, dtype={str(dtype)!r}{named})")
        return nested_text(packed_inputs(self.model, texts))


def batch_tensors(inputs: Sequence[Any], batch_size: int, sizes: Sizes | None = None) -> list[Any]:
    """Return a batch of the inputs, or of inputs of other sizes, as Keras's symbolic tensors."""
    shapes = sizes or [each.shape[1:] for each in inputs]
    make = import_keras().KerasTensor
    return [make((batch_size, *shape), str(each.dtype)) for each, shape in zip(inputs, shapes, strict=True)]


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
    loss, metrics = loss_text(parts.model.loss), metrics_text(parts.model)
    if loss == "model.loss" and is_rebuilt:
        body.append("loss = model.loss")
        loss = "loss"
    for each in changes:
        body += _lines(each, parts, rows)
    if any(each.kind in _CLONED for each in changes):
        body.append("gc.collect()   # the first model's weights")
    jit = by_kind.get("jit_compile", None if parts.jit_compile == "auto" else parts.jit_compile)
    words = [f"optimizer={optimizer_text(parts.training, by_kind.get('optimizer'))}", f"loss={loss}"]
    words += [f"metrics={metrics}"] if metrics else []
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
    targets = parts.targets[0 if sizes is None else 1]
    data = [
        "",
        "# Put your own data here; these are arrays of the right shapes.",
        f"x = {parts.input_arrays(sizes, 'float32' in by_kind)}",
    ]
    data += [f"y = {targets}"] if targets else []
    arrays = "x, y" if targets else "x"
    train = f"model.fit({arrays}, batch_size={batch}, epochs=1)"
    if "micro_batches" in by_kind:
        pieces = by_kind["micro_batches"]
        train = f"kerasmem.fit(model, {arrays}, batch_size={batch}, micro_batches={pieces}, epochs=1)"
    others = {
        "inference": f"model.predict(x, batch_size={batch})",
        "evaluate": f"model.evaluate({arrays}, batch_size={batch})",
    }
    run = train if "micro_batches" in by_kind else others.get(parts.mode, train)
    imports += [line.strip() for line in body if line.strip().startswith("from ")]
    lines = [line for line in body if not line.strip().startswith("from ")]
    lines += [*data, "", run]
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
            "model = keras.models.clone_model(model, clone_function=separable, recursive=True)   # train it again",
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
