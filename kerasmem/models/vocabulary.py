"""Checks of a model's configuration before Keras builds it: only Keras's building blocks and the user's objects.

Keras's safe mode stays on, but it has been bypassed before: by legacy HDF5 files, by functions of Keras instead of
layers, and by vocabularies in other files. So a configuration is opened only if it contains no code and refers to no
other file, and if each name in it is a building block of Keras or defined by the user.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from kerasmem.compat.keras_layers import LEGACY_LAYERS, flatten_layers, functional_class
from kerasmem.errors import ModelFileError, UnknownLayerError, UntrustedModelError, UsageError
from kerasmem.models.backend import import_keras

# Modules of the classes in a configuration.
_CLASS_MODULES = (
    "layers", "models", "initializers", "regularizers", "constraints", "dtype_policies", "quantizers",
    "losses", "metrics", "optimizers", "optimizers.schedules",
)  # fmt: skip
_FUNCTION_MODULES = ("activations", "initializers", "regularizers", "constraints", "losses", "metrics")
_OWN_MODULE, _OWN_CLASS = "kerasmem.training.recompute.model", "RecomputedFunctional"
OWN_NAME = f"kerasmem>{_OWN_CLASS}"

# Keras's markers for tensors, slices and other data.
_DATA = frozenset({"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__"})
# Keras's layers that load programs of other frameworks.
_FOREIGN_PROGRAMS = frozenset({"TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"})
# Settings that name a file to read.
_FILE_SETTINGS = ("vocabulary", "filepath")

_NAME_THEM = (
    "name the module that defines them: --custom-objects package.module (custom_objects={…} in Python), "
    "or the code that builds the model: --factory package.module:function"
)


@functools.cache
def _class_modules(operations_first: bool) -> dict[str, str]:
    """Map the names of Keras's building blocks to their modules, such as "Dense" to "keras.layers".

    Some classes in files are not exported: those of `keras.ops`, for functions between layers, and a few layers of
    `keras.applications`.
    """
    exported = [f"keras.{module}" for module in _CLASS_MODULES]
    operations = _modules_behind("ops", "ops.image")
    order = (*operations, *exported) if operations_first else (*exported, *operations)
    modules: dict[str, str] = {}
    for module in (*order, *_modules_behind("applications"), LEGACY_LAYERS.module):
        for name, value in vars(importlib.import_module(module)).items():
            if _is_building_block(value):
                modules.setdefault(name, module)
    for value in (functional_class(), *vars(import_keras().layers).values()):  # exported under other names
        if _is_building_block(value):
            modules.setdefault(value.__name__, value.__module__)
    return modules


def _modules_behind(*namespaces: str) -> list[str]:
    """Return the modules that define the contents of Keras's public modules."""
    public = [vars(importlib.import_module(f"keras.{namespace}")).values() for namespace in namespaces]
    modules = (str(getattr(value, "__module__", "")) for values in public for value in values if callable(value))
    return list(dict.fromkeys(module for module in modules if module.startswith("keras.")))


def _is_building_block(value: Any) -> bool:
    keras = import_keras()
    blocks = (
        keras.Operation, keras.Initializer, keras.Regularizer, keras.constraints.Constraint, keras.Loss,
        keras.Metric, keras.Optimizer, keras.optimizers.schedules.LearningRateSchedule, keras.DTypePolicy,
        keras.dtype_policies.DTypePolicyMap, keras.Quantizer,
        getattr(keras.quantizers, "QuantizationConfig", keras.Quantizer),  # Keras 3.13 and later
    )  # fmt: skip
    return isinstance(value, type) and issubclass(value, blocks)


def with_registered(custom_objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the custom objects and the objects registered with Keras."""
    return {**import_keras().saving.get_custom_objects(), **(custom_objects or {})}


def is_custom(custom_objects: Mapping[str, Any], *names: object) -> bool:
    """Return whether one of the names belongs to a custom object."""
    return any(isinstance(name, str) and name in custom_objects for name in names)


def module_of(class_name: str, is_operation: bool = False) -> str | None:
    """Return the module of a Keras building block, or None if unknown.

    Layers, metrics and operations share names (Add, Mean, …). If `is_operation` is true, operations take precedence.
    """
    return _class_modules(is_operation).get(class_name)


def keras_class(class_name: str, module: str | None = None) -> type | None:
    """Return the Keras building block with this name, or None."""
    module = module_of(class_name) if module is None else module
    if module is None or (module != "keras" and not module.startswith("keras.")):
        return None
    try:
        value = vars(importlib.import_module(module)).get(class_name)
    except ImportError:
        return None
    return value if _is_building_block(value) else None


def is_keras_function(name: str) -> bool:
    """Return whether Keras has an activation, loss, metric, … function with this name."""
    return any(callable(vars(importlib.import_module(f"keras.{module}")).get(name)) for module in _FUNCTION_MODULES)


def dictionaries(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries in a configuration, at any depth, in its order."""
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(reversed(value.values()))
        elif isinstance(value, (list, tuple)):
            pending.extend(reversed(value))


def check_trust(config: dict[str, Any]) -> None:
    """Refuse a configuration that contains serialised Python code or loads other files.

    Raises:
        UntrustedModelError: If it does; the message has the layer's name and the option that allows it.
    """
    for node in dictionaries(config):
        if danger := _danger(node.get("class_name"), node.get("config")):
            raise UntrustedModelError(
                f"{danger}; if you trust the origin of the file, allow it: --trust (trust=True in Python)"
            )


def _danger(class_name: Any, config: Any) -> str | None:
    """Describe the code or the file that building an object would run or read, or return None."""
    settings = config if isinstance(config, dict) else {}
    name = settings.get("name")
    function = settings.get("function")
    is_name = isinstance(function, str) or (isinstance(function, dict) and function.get("class_name") == "function")
    if class_name == "__lambda__" or (class_name == "Lambda" and not is_name):
        layer = f"layer {name!r} is a Lambda with" if name else "it contains a lambda with"
        return f"{layer} serialised Python code, which would run"
    if class_name in _FOREIGN_PROGRAMS:
        return f"layer {name!r} ({class_name}) loads a program from outside the configuration"
    for setting in _FILE_SETTINGS:
        if isinstance(settings.get(setting), str):
            return f"layer {name!r} ({class_name}) reads the file {settings[setting]!r} ({setting})"
    return None


def check_names(config: dict[str, Any], custom_objects: Mapping[str, Any]) -> None:
    """Refuse a configuration with names unknown to Keras and the user.

    Raises:
        UnknownLayerError: If there are any; the message lists them and the options to pass them.
    """
    unknown: dict[str, None] = {}  # a set that keeps the order
    for node in dictionaries(config):
        class_name = node.get("class_name")
        if "class_name" in node and not isinstance(class_name, str):
            raise ModelFileError(f"class_name must be the name of a class; got {class_name!r}")
        if class_name is not None and "config" in node and class_name not in _DATA:
            unknown.update(dict.fromkeys(_unknown_names(node, custom_objects)))
    if unknown:
        names = ", ".join(list(unknown)[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise UnknownLayerError(f"uses classes or functions that Keras does not have: {names}; {_NAME_THEM}")


def _unknown_names(node: dict[str, Any], custom_objects: Mapping[str, Any]) -> Iterator[str]:
    class_name, config, registered = node["class_name"], node["config"], node.get("registered_name")
    if class_name == "function":
        if not is_custom(custom_objects, config, registered) and not is_keras_function(str(config)):
            yield f"function {config}"
    elif class_name != "__lambda__":
        function = config.get("function") if class_name == "Lambda" else None
        if isinstance(function, str) and not is_custom(custom_objects, function):
            yield f"function {function}"
        if not is_custom(custom_objects, class_name, registered) and not keras_class(class_name, node.get("module")):
            yield class_name


def check_graph(config: dict[str, Any]) -> None:
    """Refuse calls in a graph without a tensor argument, which Keras would compute immediately, at any size.

    Raises:
        ModelFileError: If there is such a call; the message has the layer's name.
    """
    for node in dictionaries(config):
        calls = node.get("inbound_nodes")
        for call in filter(None, calls if isinstance(calls, list) else ()):
            if "__keras_tensor__" not in [part.get("class_name") for part in dictionaries(call)]:
                raise ModelFileError(f"layer {node.get('name')!r} is called without a tensor of the model")


def with_dtype_policy(config: dict[str, Any], name: str) -> Any:
    """Replace the dtype policy float32 in a configuration of Keras 3. Inputs keep their dtype.

    Raises:
        UsageError: If the policy is unknown to Keras, or quantizes.
    """
    checked_policy(name)
    return _replace_policy(config, name)


def checked_policy(name: str) -> Any:
    """Return a dtype policy of Keras.

    Raises:
        UsageError: If the policy is unknown to Keras, or quantizes.
    """
    try:
        policy = import_keras().dtype_policies.get(name)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"dtype_policy must be one of Keras's: float32, mixed_float16, mixed_bfloat16, …; got {name!r}"
        ) from error
    if getattr(policy, "quantization_mode", None) is not None:
        raise UsageError(f"dtype_policy must not quantize; got {name!r}. Call model.quantize(…) and pass the model")
    return policy


def _replace_policy(value: Any, policy: str) -> Any:
    if isinstance(value, list):
        return [_replace_policy(item, policy) for item in value]
    if not isinstance(value, dict) or value.get("class_name") in ("InputLayer", "__keras_tensor__"):
        return value
    replaced = {key: _replace_policy(item, policy) for key, item in value.items()}
    dtype = replaced.get("dtype")
    if isinstance(dtype, dict) and isinstance(dtype.get("config"), dict):
        dtype = dtype["config"].get("name")
    if dtype == "float32" and "name" in replaced:
        replaced["dtype"] = policy
    return replaced


def register_own_classes(config: Any) -> None:
    """Register kerasmem's own class with Keras if a configuration uses it.

    Raises:
        NotAvailableError: If the class does not work with the installed Keras.
    """
    if any(str(node.get("class_name")).endswith(_OWN_CLASS) for node in dictionaries(config)):
        importlib.import_module(_OWN_MODULE)


def configuration(model: Any) -> dict[str, Any]:
    """Return a model's configuration for `keras.saving.deserialize_keras_object`, with its cuts.

    Use it in this process and its children only: the files of Keras have no cuts.
    """
    keras = import_keras()
    config: dict[str, Any] = keras.saving.serialize_keras_object(model)
    recomputed = keras.saving.get_custom_objects().get(OWN_NAME, ())  # registered when the class is imported
    cut_models = {  # by the names of the model and its layers
        (layer.name, *(operation.name for operation in layer.operations)): layer
        for layer in flatten_layers(model)
        if isinstance(layer, recomputed)
    }
    for node in dictionaries(config) if cut_models else ():
        inner = node.get("config")
        if node.get("class_name") != "Functional" or not isinstance(inner, dict):
            continue
        names = inner.get("name"), *(layer["name"] for layer in inner.get("layers", ()))
        if cut_model := cut_models.get(names):
            inner.update(cuts=list(cut_model.cuts), recomputed=list(cut_model.recomputed))
            node.update(class_name=_OWN_CLASS, module=_OWN_MODULE, registered_name=OWN_NAME)
    return config
