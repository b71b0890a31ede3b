"""The names a configuration may use: Keras's own building blocks and the user's objects, nothing else.

Keras has a safe mode of its own, which stays on as a second line. It has been passed by before (legacy HDF5 files,
functions of Keras named as layers, vocabularies read from a path), so nothing here depends on it: a configuration is
opened only if it holds no code, reaches for no other file, and every name in it is a building block of Keras or was
named by the user.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any

from kerasmem.compat.keras_layers import LEGACY_LAYERS, flatten_layers, functional_class
from kerasmem.errors import ModelFileError, UnknownLayerError, UntrustedModelError, UsageError
from kerasmem.models.backend import import_keras

# Where Keras keeps the classes that a configuration is made of.
_CLASS_MODULES = (
    "layers", "models", "initializers", "regularizers", "constraints", "dtype_policies", "quantizers",
    "losses", "metrics", "optimizers", "optimizers.schedules",
)  # fmt: skip
_FUNCTION_MODULES = ("activations", "initializers", "regularizers", "constraints", "losses", "metrics")
_LIBRARIES = ("keras", "builtins", "tensorflow", "numpy")  # what they have is found without being named
_OWN_MODULE, _OWN_CLASS = "kerasmem.training.recompute.model", "RecomputedFunctional"
OWN_NAME = f"kerasmem>{_OWN_CLASS}"
# Whether a recomputed model's configuration tells its cuts. In a file it is the plain model's.
CUTS_TOLD: ContextVar[bool] = ContextVar("cuts_told", default=False)

# Data, not classes: Keras's own marks for tensors, tuples, slices and the like.
_DATA = frozenset({"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__"})
# Layers of Keras that load a program of another kind.
_FOREIGN_PROGRAMS = frozenset({"TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"})
# Settings that name a file to read.
_FILE_SETTINGS = ("vocabulary", "filepath")

_NAME_THEM = (
    "name the module that defines them: --custom-objects package.module (custom_objects={…} in Python), "
    "or the code that builds the model: --factory package.module:function"
)


@functools.cache
def _class_modules(operations_first: bool) -> dict[str, str]:
    """Return the modules of Keras's classes that make part of a model, by their bare names: "keras.layers" of "Dense".

    Files have some classes that are not exported by that name: those of `keras.ops`, for functions called between
    layers, and a few layers of `keras.applications`.
    """
    exported = [f"keras.{each}" for each in _CLASS_MODULES]
    operations = _modules_behind("ops", "ops.image")
    order = (*operations, *exported) if operations_first else (*exported, *operations)
    modules: dict[str, str] = {}
    for module in (*order, *_modules_behind("applications"), LEGACY_LAYERS.module):
        for name, value in vars(importlib.import_module(module)).items():
            if _is_building_block(value):
                modules.setdefault(name, module)
    for value in (functional_class(), *vars(import_keras().layers).values()):  # exported by another name
        if _is_building_block(value):
            modules.setdefault(value.__name__, value.__module__)
    return modules


def _modules_behind(*namespaces: str) -> list[str]:
    """Return the modules that define the functions and classes of public modules of Keras."""
    public = [vars(importlib.import_module(f"keras.{each}")).values() for each in namespaces]
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
    """Return the custom objects and those that are registered with Keras."""
    return {**import_keras().saving.get_custom_objects(), **(custom_objects or {})}


def is_custom(custom_objects: Mapping[str, Any], *names: object) -> bool:
    """Return whether one of the names is a custom object's."""
    return any(isinstance(name, str) and name in custom_objects for name in names)


def module_of(class_name: str, is_operation: bool = False) -> str | None:
    """Return the module of a Keras class that makes part of a model, or None if Keras has none.

    Layers, metrics and operations share names (Add, Mean, …): `is_operation` puts the operations first.
    """
    return _class_modules(is_operation).get(class_name)


def keras_class(class_name: str, module: str | None = None) -> type | None:
    """Return the Keras class of that name, or None if Keras has none that makes part of a model."""
    module = module_of(class_name) if module is None else module
    if module is None or (module != "keras" and not module.startswith("keras.")):
        return None
    try:
        value = vars(importlib.import_module(module)).get(class_name)
    except ImportError:
        return None
    return value if _is_building_block(value) else None


def is_keras_function(name: str) -> bool:
    """Return whether Keras has an activation, loss, metric, … function of that name."""
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
    """Refuse a configuration that holds serialised Python, or that would load other files.

    Args:
        config: a model's configuration.

    Raises:
        UntrustedModelError: with the layer's name and the way to allow it.
    """
    for node in dictionaries(config):
        if danger := _danger(node.get("class_name"), node.get("config")):
            raise UntrustedModelError(
                f"{danger}; if you trust where the file comes from, allow it: --trust (trust=True in Python)"
            )


def _danger(class_name: Any, config: Any) -> str | None:
    """Return the reason why building an object would run code or read a file, or None."""
    settings = config if isinstance(config, dict) else {}
    name = settings.get("name")
    function = settings.get("function")
    is_name = isinstance(function, str) or (isinstance(function, dict) and function.get("class_name") == "function")
    if class_name == "__lambda__" or (class_name == "Lambda" and not is_name):
        layer = f"layer {name!r} is a Lambda with" if name else "it holds a lambda with"
        return f"{layer} serialised Python code, which opening would run"
    if class_name in _FOREIGN_PROGRAMS:
        return f"layer {name!r} ({class_name}) loads a program from outside the configuration"
    for setting in _FILE_SETTINGS:
        if isinstance(settings.get(setting), str):
            return f"layer {name!r} ({class_name}) reads the file {settings[setting]!r} ({setting})"
    return None


def check_names(config: dict[str, Any], custom_objects: Mapping[str, Any]) -> None:
    """Refuse a configuration with names that are neither Keras's nor the user's.

    Raises:
        UnknownLayerError: with all such names and the ways to give them.
    """
    unknown: dict[str, None] = {}  # a set that keeps the order
    for node in dictionaries(config):
        class_name = node.get("class_name")
        if "class_name" in node and not isinstance(class_name, str):
            raise ModelFileError(f"class_name is {class_name!r}, not the name of a class")
        if class_name is not None and "config" in node and class_name not in _DATA:
            unknown.update(dict.fromkeys(_unknown_names(node, custom_objects)))
    if unknown:
        shown = ", ".join(list(unknown)[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise UnknownLayerError(f"uses classes or functions that Keras does not have: {shown}; {_NAME_THEM}")


def _unknown_names(node: dict[str, Any], custom_objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unknown names of an object in a configuration."""
    class_name, config, registered = node["class_name"], node["config"], node.get("registered_name")
    if class_name == "function":
        if not is_custom(custom_objects, config, registered) and not is_keras_function(str(config)):
            yield f"function {config}"
    elif class_name != "__lambda__":
        given = config.get("function") if class_name == "Lambda" else None
        if isinstance(given, str) and not is_custom(custom_objects, given):
            yield f"function {config['function']}"
        if not is_custom(custom_objects, class_name, registered) and not keras_class(class_name, node.get("module")):
            yield class_name


def check_graph(config: dict[str, Any]) -> None:
    """Refuse calls in a graph that take no tensor: Keras would compute them at once, at any size.

    Raises:
        ModelFileError: with the name of the layer.
    """
    for node in dictionaries(config):
        calls = node.get("inbound_nodes")
        for call in filter(None, calls if isinstance(calls, list) else ()):
            if "__keras_tensor__" not in [each.get("class_name") for each in dictionaries(call)]:
                raise ModelFileError(f"layer {node.get('name')!r} is called on no tensor of the model")


def register_own_classes(config: Any) -> None:
    """Register kerasmem's own class with Keras if a configuration has it.

    Raises:
        NotAvailableError: If the class does not work with the Keras installed.
    """
    if any(str(node.get("class_name")).endswith(_OWN_CLASS) for node in dictionaries(config)):
        importlib.import_module(_OWN_MODULE)


def configuration(model: Any) -> dict[str, Any]:
    """Return a model's configuration for `keras.saving.deserialize_keras_object`, with its cuts.

    It is for this process and its children; what Keras writes to a file has no cuts.
    """
    token = CUTS_TOLD.set(True)
    try:
        config: dict[str, Any] = import_keras().saving.serialize_keras_object(model)
    finally:
        CUTS_TOLD.reset(token)
    for node in dictionaries(config):
        inner = node.get("config")
        if node.get("class_name") == "Functional" and isinstance(inner, dict) and "cuts" in inner:
            node.update(class_name=_OWN_CLASS, module=_OWN_MODULE, registered_name=OWN_NAME)
    return config


def own_objects(model: Any) -> dict[str, Any]:
    """Return the classes and functions of a live model that are not Keras's, by the names Keras looks for them under.

    They are those of its layers, optimizer, losses and metrics, and of what these hold.
    """
    keras = import_keras()
    metrics = [inner for each in model.metrics for inner in (each, *getattr(each, "metrics", ()))]
    losses = keras.tree.flatten(getattr(model, "loss", None))
    parts = [getattr(model, "optimizer", None), *flatten_layers(model), *metrics, *losses]
    held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    parts += [each for each in held if isinstance(each, FunctionType) or hasattr(each, "get_config")]
    things = [each if isinstance(each, (FunctionType, type)) else type(each) for each in parts]
    own = {each.__name__: each for each in things if not is_of_a_library(each)}
    own.pop("<lambda>", None)  # Keras writes a lambda down itself
    registered = {name: each for name, each in keras.saving.get_custom_objects().items() if name != OWN_NAME}
    return {**own, **registered}  # our own class is there where a configuration has it, see `register_own_classes`


def is_of_a_library(value: Any) -> bool:
    """Return whether a function or class, or any other object's class, comes from a library and not from the user."""
    definition = value if isinstance(value, (FunctionType, type)) else type(value)
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _LIBRARIES


def load_custom_objects(names: Iterable[str]) -> dict[str, Any]:
    """Import modules named by the user and collect the classes and functions that models may use.

    Args:
        names: dotted module names ("package.module") or paths of Python files.

    Returns:
        Name to object: what the module registers with Keras, and its public classes and functions.

    Raises:
        UsageError: If a module cannot be imported.
    """
    objects: dict[str, Any] = {}
    for name in names:
        for key, value in import_user_module(name, "--custom-objects").items():
            if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                objects[key] = value
    return with_registered(objects)


def parse_factory_args(texts: Iterable[str]) -> dict[str, Any]:
    """Read "depth=5" and the like: a value is JSON if possible (5, 0.1, true, [1, 2]), else text.

    Raises:
        UsageError: If a text has no name.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--factory-arg {text!r}: write name=value, for example depth=5")
        arguments[name] = value
        with contextlib.suppress(ValueError):
            arguments[name] = json.loads(value)
    return arguments


def import_user_module(name: str, option: str) -> dict[str, Any]:
    """Return the names in a module, by its dotted name (the current folder included) or the path of a `.py` file.

    A file becomes no module, so that a user's `random.py` does not replace Python's.

    Raises:
        UsageError: If there is no such module, or importing it failed.
    """
    if Path.cwd().as_posix() not in sys.path:
        sys.path.insert(0, Path.cwd().as_posix())
    try:
        return runpy.run_path(name) if name.endswith(".py") else vars(importlib.import_module(name))
    except Exception as error:
        raise UsageError(f"{option} {name}: cannot be imported ({type(error).__name__}: {error})") from error
