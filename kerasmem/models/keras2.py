"""Translation of configurations of Keras 1 and 2 (`tf.keras`, `tf_keras`) to Keras 3.

Keras 3 reads some such files. For the others, this module

- drops arguments that constructors lost (`groups` of a DepthwiseConv2D, `time_major`, …), and refuses those that would
  change the model;
- sets `reset_after=False` for a GRU from before Keras 2.2, which had one bias;
- replaces slashes in layer names by underscores;
- converts calls `[layer, node, tensor, kwargs]` to `{"args": …, "kwargs": …}`, including tensors in keyword arguments
  and the node numbers of nested models.

Layers that Keras 3 lacks, such as TFOpLambda for a `tf.*` function between layers, keep their names and are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kerasmem.compat.keras_layers import functional_class
from kerasmem.errors import ModelFileError
from kerasmem.models.vocabulary import dictionaries, is_custom, keras_class

_MODELS = ("Functional", "Model", "Sequential")

# Arguments without a counterpart in Keras 3 that change shapes, weights or results.
_MEANINGFUL = ("time_major", "ragged", "renorm", "virtual_batch_size", "adjustment", "num_constants")
# Keras up to 2.1 had one bias, without a setting in the file. Keras 3 has two by default.
_RESET_BEFORE = ("GRU", "GRUCell")
_KERAS2_MODULES = ("keras.", "tf_keras.", "tensorflow.")
# Layers with initial states as further inputs in Keras 2.
RECURRENT = ("RNN", "SimpleRNN", "LSTM", "GRU", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "Bidirectional")


def is_keras2(version: str | None, config: dict[str, Any]) -> bool:
    """Return whether Keras 1 or 2 wrote a configuration, by its version or else by a setting that only they have."""
    if version:
        return version.split(".")[0] in ("0", "1", "2")
    return any("batch_input_shape" in node for node in dictionaries(config))


class Keras2Translator:
    """Translates configurations of Keras 2 to Keras 3.

    Raises:
        ModelFileError: If a model uses a setting without a counterpart in Keras 3.
    """

    def __init__(self, custom_objects: Mapping[str, Any]) -> None:
        self._custom_objects = custom_objects

    def value(self, value: Any) -> Any:
        """Translate a part of a configuration, inner parts first."""
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if not isinstance(value, dict):
            return value
        class_name = value.get("class_name")
        if class_name in ("__tuple__", "TensorShape"):
            return [self.value(item) for item in value.get("items", [])]
        if not isinstance(class_name, str) or "config" not in value:
            return {key: self.value(item) for key, item in value.items()}
        if class_name in ("Policy", "PolicyV1") and isinstance(value["config"].get("name"), str):
            return value["config"]["name"]
        if class_name in _MODELS:
            return self._model(value)
        if isinstance(value["config"], dict):
            return self._object(value)
        return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        class_name = value["class_name"]
        config = {key: self.value(item) for key, item in value["config"].items()}
        if class_name == "Lambda" and isinstance(config.get("function"), list):
            captured = dict(zip(("code", "defaults", "closure"), config["function"], strict=False))
            config["function"] = {"class_name": "__lambda__", "config": captured}
        shape = config.pop("batch_input_shape", None)
        if class_name == "InputLayer" and shape is not None:
            config["batch_shape"] = shape
        self._settle_arguments(class_name, config)
        if isinstance(config.get("axis"), list) and len(config["axis"]) == 1:
            config["axis"] = config["axis"][0]
        if isinstance(config.get("name"), str):
            config["name"] = _slashless(config["name"])
        rest = {key: item for key, item in value.items() if key in ("module", "registered_name")}
        # If the class has another module in Keras 3, it is looked up by name.
        if str(rest.get("module")).startswith(_KERAS2_MODULES) and keras_class(class_name, rest["module"]) is None:
            del rest["module"]
        return {**rest, "class_name": class_name, "config": config}

    def _settle_arguments(self, class_name: str, config: dict[str, Any]) -> None:
        """Drop arguments that Keras 3 lacks, and add implicit ones."""
        layer_class = keras_class(class_name)
        if layer_class is None or is_custom(self._custom_objects, class_name):
            return
        if class_name in _RESET_BEFORE:
            config.setdefault("reset_after", False)
        accepted = {
            name
            for cls in layer_class.__mro__[:-1]
            for name in inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        }
        for name in [name for name in config if name not in accepted]:
            if name in _MEANINGFUL and config[name]:
                raise ModelFileError(
                    f"layer {config.get('name')!r} ({class_name}) uses {name}={config[name]!r}, which Keras 3 lacks; "
                    f"pass the code that builds the model: --factory package.module:function"
                )
            del config[name]

    def _model(self, value: dict[str, Any]) -> dict[str, Any]:
        config = value["config"]
        if isinstance(config, list):  # a Sequential of Keras 1 or early 2
            config = {"layers": config}
        if not isinstance(config, dict) or not isinstance(config.get("layers"), list):
            return value  # a subclassed model has its own from_config
        if value["class_name"] == "Sequential":
            translated = {key: self.value(config.get(key)) for key in ("name", "build_input_shape")}
            translated["layers"] = self._sequential_layers(config["layers"])
            return {"module": "keras", "class_name": "Sequential", "config": translated}
        return _Graph(self, config).translate()

    def _sequential_layers(self, layers: list[Any]) -> list[Any]:
        shape = (layers[0].get("config") or {}).get("batch_input_shape") if layers else None
        translated = [self.value(layer) for layer in layers]
        if shape is not None and layers[0].get("class_name") != "InputLayer":
            dtype = "int32" if layers[0].get("class_name") == "Embedding" else None
            config = {"batch_shape": self.value(shape), "dtype": dtype}
            translated.insert(0, {"module": "keras.layers", "class_name": "InputLayer", "config": config})
        return translated


class _Graph:
    """The layers of a functional model and their calls."""

    def __init__(self, translator: Keras2Translator, config: dict[str, Any]) -> None:
        self._translator, self._config = translator, config
        self._classes = {layer["name"]: layer["class_name"] for layer in config["layers"]}

    def translate(self) -> dict[str, Any]:
        config: dict[str, Any] = {key: self._config[key] for key in ("name", "trainable") if key in self._config}
        config["layers"] = [self._layer(layer) for layer in self._config["layers"]]
        for ends in ("input_layers", "output_layers"):
            config[ends] = _unwrap_single(self._ends(self._translator.value(self._config[ends])))
        return {"module": functional_class().__module__, "class_name": "Functional", "config": config}

    def _layer(self, layer: dict[str, Any]) -> dict[str, Any]:
        rest = {key: layer[key] for key in layer if key != "inbound_nodes"}
        translated: dict[str, Any] = self._translator.value(rest)
        translated["name"] = translated["config"]["name"] = _slashless(layer["name"])
        translated["inbound_nodes"] = [
            node if isinstance(node, dict) else self._call(node, layer["class_name"] in RECURRENT)
            for node in layer.get("inbound_nodes") or []
        ]
        return translated

    def _ends(self, value: Any) -> Any:
        """Rename the targets of input_layers and output_layers."""
        if self._is_tensor(value):
            index = value[1] - (1 if self._classes[value[0]] == "Sequential" else 0)
            return [_slashless(value[0]), index, value[2]]
        if isinstance(value, dict):
            return {key: self._ends(item) for key, item in value.items() if key != "class_name"}
        return [self._ends(item) for item in value] if isinstance(value, list) else value

    def _call(self, node: Any, takes_states: bool) -> dict[str, Any]:
        """Translate a call of a layer: `[[layer, node, tensor, kwargs], …]`, possibly nested or a single one."""
        if not node:
            return {"args": [], "kwargs": {}}
        stored: dict[str, Any] = {}
        inputs = self._argument(node, stored)
        if isinstance(inputs, list) and len(inputs) == 1:
            inputs = inputs[0]
        kwargs = {key: self._argument(value, {}) for key, value in stored.items()}
        if takes_states and isinstance(inputs, list):
            inputs, *kwargs["initial_state"] = inputs
        return {"args": [inputs], "kwargs": kwargs}

    def _argument(self, value: Any, stored: dict[str, Any]) -> Any:
        """Translate an argument of a call, and add the keyword arguments stored with it to `stored`."""
        if self._is_tensor(value):
            stored.update((value[3] if len(value) == 4 else None) or {})
            # In Keras 2, the creation of a nested model counts as its first call.
            index = value[1] - (1 if self._classes[value[0]] in _MODELS else 0)
            # The shape and dtype are placeholders: Keras looks the tensor up by its history.
            tensor = {"shape": [], "dtype": "float32", "keras_history": [_slashless(value[0]), index, value[2]]}
            return {"class_name": "__keras_tensor__", "config": tensor}
        if isinstance(value, list):
            return [self._argument(item, stored) for item in value]
        if isinstance(value, dict) and "class_name" not in value:
            return {key: self._argument(item, stored) for key, item in value.items()}
        return self._translator.value(value)

    def _is_tensor(self, value: Any) -> bool:
        if not isinstance(value, list) or len(value) not in (3, 4) or not isinstance(value[0], str):
            return False
        return value[0] in self._classes and all(isinstance(index, int) for index in value[1:3])


def _unwrap_single(tensors: Any) -> Any:
    """Unwrap a list of one tensor, because such a model returns a single tensor in Keras 2."""
    return tensors[0] if isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], list) else tensors


def _slashless(name: str) -> str:
    return name.replace("/", "_")
