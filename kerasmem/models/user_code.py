"""The user's code behind a model: its classes and functions, and modules to import."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_training import compile_arguments
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.vocabulary import OWN_NAME, with_registered

_LIBRARIES = ("keras", "builtins", "tensorflow", "numpy")  # their objects need not be passed by the user


def own_objects(model: Any) -> dict[str, Any]:
    """Return the user's classes and functions in a model, by the names that Keras uses for them.

    They come from its layers, optimizer, losses and metrics, and from their attributes.
    """
    keras = import_keras()
    parts = [*flatten_layers(model), *compiled_parts(model)]
    attributes = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    parts += [value for value in attributes if isinstance(value, FunctionType) or hasattr(value, "get_config")]
    definitions = [part if isinstance(part, (FunctionType, type)) else type(part) for part in parts]
    own = {definition.__name__: definition for definition in definitions if not is_of_a_library(definition)}
    own.pop("<lambda>", None)  # Keras serializes lambdas itself
    objects = {**own, **keras.saving.get_custom_objects()}
    objects.pop(OWN_NAME, None)  # `register_own_classes` adds it if it is used
    return objects


def compiled_parts(model: Any) -> list[Any]:
    """Return the optimizer, losses and metrics in the arguments of a model's `compile`."""
    if not getattr(model, "compiled", False):
        return []
    arguments = compile_arguments(model)
    structures = [arguments[name] for name in ("optimizer", "loss", "metrics", "weighted_metrics")]
    return [part for part in import_keras().tree.flatten(structures) if part is not None]


def is_of_a_library(value: Any) -> bool:
    """Return whether a function, a class or an object's class is defined in a library, not by the user."""
    definition = value if isinstance(value, (FunctionType, type)) else type(value)
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _LIBRARIES


def load_custom_objects(names: Iterable[str]) -> dict[str, Any]:
    """Import modules of the user and collect the classes and functions for models.

    Args:
        names: dotted module names ("package.module") or paths of Python files.

    Returns:
        Objects by name: the public classes and functions of the modules, and the objects registered with Keras.

    Raises:
        UsageError: If a module cannot be imported.
    """
    objects: dict[str, Any] = {}
    for name in names:
        for key, value in import_user_module(name, "--custom-objects").items():
            if not key.startswith("_") and isinstance(value, (FunctionType, type)):
                objects[key] = value
    return with_registered(objects)


@contextlib.contextmanager
def module_path_kept() -> Iterator[None]:
    """Restore `sys.path` when the context ends, if the current folder was added to it."""
    folder, before = Path.cwd().as_posix(), list(sys.path)
    try:
        yield
    finally:
        if folder not in before and folder in sys.path:
            sys.path.remove(folder)


def import_user_module(name: str, option: str) -> dict[str, Any]:
    """Import a module by dotted name, also from the current folder, or run a `.py` file, and return its names.

    A file is not registered as a module, so a user's `random.py` does not replace Python's.

    Raises:
        UsageError: If the module does not exist, or importing it fails.
    """
    if Path.cwd().as_posix() not in sys.path:
        sys.path.insert(0, Path.cwd().as_posix())
    try:
        return runpy.run_path(name) if name.endswith(".py") else vars(importlib.import_module(name))
    except (Exception, SystemExit) as error:  # a script may end with sys.exit or parse the command line
        raise UsageError(f"{option} {name}: cannot be imported ({type(error).__name__}: {error})") from error
