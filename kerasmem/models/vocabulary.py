"""The names a configuration may use: Keras's own building blocks and the user's objects, nothing else."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from kerasmem.compat.keras_functional import LEGACY_LAYERS, functional_class
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras

# Where Keras keeps the classes that a configuration is made of.
_CLASS_MODULES = (
    "layers", "models", "initializers", "regularizers", "constraints", "dtype_policies", "quantizers",
    "losses", "metrics", "optimizers", "optimizers.schedules",
)  # fmt: skip
_FUNCTION_MODULES = ("activations", "initializers", "regularizers", "constraints", "losses", "metrics")
LIBRARIES = ("keras", "builtins", "tensorflow", "numpy")  # what they have is found without being named
_OWN_MODULE, _OWN_CLASS = "kerasmem.training.recompute.model", "RecomputedFunctional"
OWN_NAME = f"kerasmem>{_OWN_CLASS}"
# Whether a recomputed model's configuration tells its cuts. In a file it is the plain model's.
CUTS_TOLD: ContextVar[bool] = ContextVar("cuts_told", default=False)


@functools.cache
def _modules_behind(*namespaces: str) -> tuple[str, ...]:
    """Return the modules that define the functions and classes of public modules of Keras.

    They have the classes that Keras puts into files without exporting them by that name: those of `keras.ops`, which
    a graph has where a function was called between layers, and a few layers of `keras.applications`.
    """
    modules = [importlib.import_module(f"keras.{each}") for each in namespaces]
    public = [value for module in modules for value in vars(module).values()]
    found = (getattr(each, "__module__", None) for each in public if callable(each))
    return tuple(dict.fromkeys(module for module in found if module and module.startswith("keras.")))


class Vocabulary:
    """Looks up the names of a configuration among Keras's own and the custom objects given."""

    def __init__(self, custom_objects: Mapping[str, Any] | None = None) -> None:
        self._keras = import_keras()
        self.custom_objects: dict[str, Any] = {**self._keras.saving.get_custom_objects(), **(custom_objects or {})}

    def is_custom(self, *names: object) -> bool:
        """Return whether one of the names was given or registered by the user."""
        return any(isinstance(name, str) and name in self.custom_objects for name in names)

    def module_of(self, class_name: str, is_operation: bool = False) -> str | None:
        """Return the module of a Keras class known by its bare name, such as "keras.layers" for "Dense".

        Layers, metrics and operations share names (Add, Mean, …): `is_operation` puts the operations first.
        """
        layers_and_more = [f"keras.{module}" for module in _CLASS_MODULES]
        operations = _modules_behind("ops", "ops.image")
        order = (*operations, *layers_and_more) if is_operation else (*layers_and_more, *operations)
        for module in (*order, *_modules_behind("applications"), LEGACY_LAYERS.module):
            if self._is_building_block(self._attribute(module, class_name)):
                return module
        own_names = [functional_class(), *vars(self._keras.layers).values()]  # not all are exported by their own name
        found = (each for each in own_names if getattr(each, "__name__", None) == class_name)
        return next((each.__module__ for each in found if self._is_building_block(each)), None)

    def keras_class(self, class_name: str, module: str | None = None) -> type | None:
        """Return the Keras class of that name, or None if Keras has none that makes part of a model."""
        module = module if module is not None else self.module_of(class_name)
        if module is None or (module != "keras" and not module.startswith("keras.")):
            return None
        found = self._attribute(module, class_name)
        return found if self._is_building_block(found) else None

    def keras_function(self, name: str) -> bool:
        """Return whether Keras has an activation, loss, metric, … function of that name."""
        return any(callable(self._attribute(f"keras.{module}", name)) for module in _FUNCTION_MODULES)

    def _attribute(self, module: str, name: str) -> Any:
        try:
            return vars(importlib.import_module(module)).get(name)
        except ImportError:
            return None

    def _is_building_block(self, found: Any) -> bool:
        keras = self._keras
        blocks = (
            keras.Operation, keras.Initializer, keras.Regularizer, keras.constraints.Constraint, keras.Loss,
            keras.Metric, keras.Optimizer, keras.optimizers.schedules.LearningRateSchedule, keras.DTypePolicy,
            keras.dtype_policies.DTypePolicyMap, keras.Quantizer,
            getattr(keras.quantizers, "QuantizationConfig", keras.Quantizer),  # Keras 3.13 and later
        )  # fmt: skip
        return isinstance(found, type) and issubclass(found, blocks)


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
    own = {each.__name__: each for each in things if _root_module(each) not in LIBRARIES}
    own.pop("<lambda>", None)  # Keras writes a lambda down itself
    registered = {name: each for name, each in keras.saving.get_custom_objects().items() if name != OWN_NAME}
    return {**own, **registered}  # our own class is there where a configuration has it, see `register_own_classes`


def _root_module(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def load_custom_objects(names: Iterable[str]) -> dict[str, Any]:
    """Import modules named by the user and collect the classes and functions that models may use.

    Args:
        names: dotted module names ("package.module") or paths of Python files.

    Returns:
        Name to object: what the module registers with Keras, and its public classes and functions.

    Raises:
        UsageError: If a module cannot be imported.
    """
    keras = import_keras()
    objects: dict[str, Any] = {}
    for name in names:
        module = import_user_module(name, "--custom-objects")
        objects.update(
            (key, value)
            for key, value in vars(module).items()
            if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        )
    objects.update(keras.saving.get_custom_objects())
    return objects


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
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def import_user_module(name: str, option: str) -> ModuleType:
    """Import a module by dotted name (the current folder included) or by the path of a `.py` file.

    A file's module is registered by its whole path, so that a user's `random.py` does not replace Python's.

    Raises:
        UsageError: If there is no such module, or importing it failed.
    """
    if Path.cwd().as_posix() not in sys.path:
        sys.path.insert(0, Path.cwd().as_posix())
    try:
        return _import_file(name) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"{option} {name}: cannot be imported ({type(error).__name__}: {error})") from error


def _import_file(path: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(re.sub(r"\W", "_", os.path.abspath(path)), path)
    assert specification is not None and specification.loader is not None  # it ends with .py
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module
