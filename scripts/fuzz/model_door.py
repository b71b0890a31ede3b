"""Model files: .keras archives, HDF5 of Keras 2 and 3, architectures as JSON, weights."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import marshal
import random
import tempfile
from pathlib import Path
from typing import Any

import h5py
from cases import Case, Door, Told, Verdict, judge_commands
from mutation import mutate
from source_doors import made_elsewhere, rezipped
from text_doors import changed_json

_CODE = base64.b64encode(marshal.dumps(compile("open('OWNED', 'w').close()", "x", "exec"))).decode()
_PRIVATE = "../private/secret.txt"


def _object(place: str | None, kind: str, **config: Any) -> dict[str, Any]:
    return {"module": place, "class_name": kind, "config": config, "registered_name": None}


_LAMBDA = {"class_name": "__lambda__", "config": {"value": _CODE, "defaults": None, "closure": None}}
ODD: tuple[Any, ...] = (
    _LAMBDA, _object("keras.layers", "Lambda", name="l", function=_LAMBDA), _object("os", "system",
    command="touch OWNED"),
    {"class_name": "Lambda", "config": {"name": "l", "function": [_CODE, None, None], "function_type": "lambda"}},
    {"module": "os", "class_name": "function", "config": "system", "registered_name": "system"},
    {"module": "builtins", "class_name": "function", "config": "exec", "registered_name": "function"},
    _object("subprocess", "Popen", args=["touch", "OWNED"]), _object("keras.layers", "TFSMLayer",
    filepath="../private"),
    _object("keras.layers", "StringLookup", name="s", vocabulary=_PRIVATE),
    _object("keras.layers", "IntegerLookup", name="i", vocabulary="../private/pipe"),
    _object("keras.layers", "TextVectorization", name="t", vocabulary=_PRIVATE),
    {"class_name": "StringLookup", "config": {"name": "s", "vocabulary": "../private/pipe"}},
    _object("keras.layers", "TorchModuleWrapper", module=_CODE), _object("keras.utils", "get_file", origin="file:///"),
    _object("keras.saving", "load_model", filepath=_PRIVATE), _object("kerasmem.cli", "main"),
    _object("keras.src.utils.python_utils", "func_load", code=_CODE), "float1024", "mixed_float16", "../../x", "relu6",
    {"class_name": "__numpy__", "config": {"value": [1, 2], "dtype": "O"}}, {"class_name": "__tensor__", "config": {}},
    {"class_name": "__bytes__", "config": {"value": "x"}}, {"class_name": "__slice__", "config": {}},
    {"class_name": "__typespec__"},
    {"class_name": "__tuple__", "items": [1, 2]}, {"class_name": "__keras_tensor__",
    "config": {"keras_history": ["x", 0, 0]}},
    "Dense", "LSTM", "Conv2D", "Bidirectional", "Sequential", "Functional", "Model", "InputLayer", "MultiHeadAttention",
    "TimeDistributed", "RNN", "Embedding", "Normalization", "function", "keras.layers", "keras.src.models", "os",
)  # fmt: skip
"""What stands where something else should: code, other files, objects of other kinds."""


class ModelsDoor(Door):
    """Model files in `kerasmem estimate`."""

    name = "models"
    packages = ("keras", "tensorflow", "h5py")
    seconds, waiting, memory, batch = 25.0, 60.0, 3 << 30, 10
    endings: tuple[tuple[str, ...], ...] = (
        ("--json",), (), ("--batch-size", "7"), ("--optimizer", "adam"), ("--mode", "inference"), ("--device", "t4"),
        ("--csv",),
    )  # fmt: skip

    def prepare(self, folder: Path) -> None:
        """Make models of Keras 3, and of Keras 2 where tf_keras is there, in processes of their own."""
        self.seeds = made_elsewhere(_models)
        if importlib.util.find_spec("tf_keras") is not None:
            self.seeds |= made_elsewhere(_old_models)
        import keras
        import tensorflow as tf

        import kerasmem.cli.estimate_command
        import kerasmem.estimation.facade
        import kerasmem.rendering.estimate_table  # noqa: F401

        tf.raw_ops, tf.config, tf.nn, keras.layers  # noqa: B018  (parts that are loaded when they are first named)

    def make(self, draw: random.Random) -> Case:
        """Return a changed model, its configuration changed more often than its bytes."""
        seed = draw.choice(list(self.seeds))
        data, suffix = self.seeds[seed], seed[seed.index(".") :]
        if suffix == ".json":
            changed = changed_json(data, draw, ODD) if draw.random() < 0.85 else mutate(data, draw)
        elif suffix == ".keras":
            changed = (
                mutate(data, draw)
                if draw.random() < 0.15
                else rezipped(data, draw, lambda inner: _changed(inner, draw))
            )
        else:
            changed = mutate(data, draw, [(0, 2048)]) if draw.random() < 0.2 else _with_attributes(data, draw)
        name = f"model{suffix}"
        graph = ("--method", "graph") if draw.random() < 0.04 else ("--method", "formula")
        command = ("estimate", name, *graph, *draw.choice(self.endings))
        return Case({name: changed}, (command,), {name: data}, seed)

    def attempt(self, case: Case, told: Told) -> Verdict:
        """Estimate it, in this process, which forgets Keras's names before."""
        import keras

        keras.backend.clear_session()
        return judge_commands(case, told)


def _changed(inner: bytes, draw: random.Random) -> bytes:
    return changed_json(inner, draw, ODD) if inner[:1] == b"{" else mutate(inner, draw)


def _with_attributes(data: bytes, draw: random.Random) -> bytes:
    """Return an HDF5 model with another configuration, or with attributes of other kinds."""
    memory = io.BytesIO(data)
    with h5py.File(memory, "r+") as file:
        names = [name for name in ("model_config", "training_config", "keras_version") if name in file.attrs]
        name = draw.choice(names) if names else ""
        if name == "keras_version" or not names:
            value: Any = draw.choice(
                ("1.0", "99", "2.15.0", b"\xff\xfe", 3, [1.5] * 9, ["3.0"] * 50, h5py.Empty("f4"), "")
            )
            file.attrs[name or "model_config"] = value
        else:
            text = file.attrs[name]
            text = text.encode() if isinstance(text, str) else bytes(text)
            file.attrs[name] = changed_json(text, draw, ODD)[:64000]
        if draw.random() < 0.1 and "model_weights" in file:
            del file["model_weights"]
            where = draw.choice(("../private/secret.txt", "../private/pipe", "model.h5"))
            file["model_weights"] = draw.choice((h5py.ExternalLink(where, "/"), h5py.SoftLink("/model_weights")))
    return memory.getvalue()


def _models() -> dict[str, bytes]:
    import keras

    layers = keras.layers
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Concatenate()([layers.BatchNormalization()(x), layers.Conv2D(4, 1)(x)])
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x)))
    branched = keras.Model(inputs, [layers.Dense(3, activation="softmax", name="a")(x), layers.Dense(1, name="b")(x)])
    branched.compile("adam", {"a": "sparse_categorical_crossentropy", "b": "mse"}, metrics={"b": ["mae"]})
    text = keras.Sequential([keras.Input((12,), dtype="int32"), layers.Embedding(50, 4),
               layers.Bidirectional(layers.LSTM(3)),
                             layers.Dense(1)])  # fmt: skip
    text.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), "mse")
    tokens = keras.Input((6, 8))
    attended = layers.MultiHeadAttention(2, 4)(tokens, tokens)
    attention = keras.Model(
        tokens, layers.TimeDistributed(layers.Dense(2))(layers.LayerNormalization()(attended + tokens))
    )
    nested = keras.Sequential([keras.Input((8,)), keras.Sequential([layers.Dense(4), layers.ReLU()]), layers.Dense(1)])
    nested.compile("rmsprop", "mse")
    scaled = keras.Sequential(
        [keras.Input((8,)), layers.Normalization(), layers.Rescaling(0.5), layers.Lambda(lambda x: x + 1)]
    )
    made = {"branched": branched, "text": text, "attention": attention, "nested": nested, "scaled": scaled}
    return _saved(made, (".keras", ".h5", ".json", ".weights.h5"))


def _old_models() -> dict[str, bytes]:
    import tf_keras

    layers = tf_keras.layers
    inputs = tf_keras.Input((8, 8, 3))
    x = layers.Flatten()(layers.AveragePooling2D()(layers.Conv2D(4, 3, activation="relu")(inputs)))
    branched = tf_keras.Model(inputs, layers.add([layers.Dense(3)(x), layers.Dense(3)(x)]))
    branched.compile("adam", "mse")
    text = tf_keras.Sequential([layers.Embedding(50, 4, input_length=12), layers.GRU(3), layers.Dense(1)])
    text.build((None, 12))
    text.compile("rmsprop", "binary_crossentropy", metrics=["accuracy"])
    operators = tf_keras.Model(inputs, inputs * 2.0 + 1.0)
    return _saved({"old branched": branched, "old text": text, "old operators": operators}, (".h5", ".json"))


def _saved(made: dict[str, Any], suffixes: tuple[str, ...]) -> dict[str, bytes]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in made.items():
            for suffix in suffixes:
                path = Path(folder) / f"model{suffix}"
                if suffix == ".json":
                    path.write_text(json.dumps(json.loads(model.to_json())))
                elif suffix == ".weights.h5":
                    model.save_weights(path)
                else:
                    model.save(path)
                found[f"{name}{suffix}"] = path.read_bytes()
    return found
