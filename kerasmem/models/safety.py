"""Before anything is built from a file: does it hold code, reach for other files, or use unknown names?

Keras has a safe mode of its own, which stays on as a second line. It has been passed by before (legacy
HDF5 files, functions of Keras named as layers, vocabularies read from a path), so nothing here depends on it:
a configuration is opened only if every name in it is a building block of Keras or was named by the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kerasmem.errors import ModelFileError, UnknownLayerError, UntrustedModelError
from kerasmem.models.keras2 import TENSORFLOW_CALLS, check_function
from kerasmem.models.vocabulary import Vocabulary, dictionaries

# Data, not classes: Keras's own marks for tensors, tuples, slices and the like.
_DATA = frozenset({"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__"})
# Layers of Keras that load a program of another kind.
_FOREIGN_PROGRAMS = frozenset({"TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"})
# Settings that name a file to read.
_FILE_SETTINGS = ("vocabulary", "filepath")

_TRUST = "if you trust where the file comes from, allow it: --trust (trust=True in Python)"
_NAME_THEM = (
    "name the module that defines them: --custom-objects package.module (custom_objects={…} in Python), "
    "or the code that builds the model: --factory package.module:function"
)


def check_trust(config: dict[str, Any], where: str) -> None:
    """Refuse a configuration that holds serialised Python, or that would load other files.

    Args:
        config: a model's configuration.
        where: the file, for the message.

    Raises:
        UntrustedModelError: with the layer's name and the way to allow it.
    """
    for node in dictionaries(config):
        class_name, inner = node.get("class_name"), node.get("config")
        name = inner.get("name") if isinstance(inner, dict) else None
        if class_name == "__lambda__" or (class_name == "Lambda" and _holds_code(inner)):
            layer = f"layer {name!r} is a Lambda with" if name else "it holds a lambda with"
            raise UntrustedModelError(f"{where}: {layer} serialised Python code, which opening would run; {_TRUST}")
        if class_name in _FOREIGN_PROGRAMS:
            raise UntrustedModelError(
                f"{where}: layer {name!r} ({class_name}) loads a program from outside the configuration; {_TRUST}"
            )
        if isinstance(inner, dict):
            for setting in _FILE_SETTINGS:
                if isinstance(inner.get(setting), str):
                    raise UntrustedModelError(
                        f"{where}: layer {name!r} ({class_name}) reads the file {inner[setting]!r} ({setting}); "
                        f"{_TRUST}"
                    )


def _holds_code(config: Any) -> bool:
    function = config.get("function") if isinstance(config, dict) else None
    return not isinstance(function, str) and not (
        isinstance(function, dict) and function.get("class_name") == "function"
    )


def check_names(config: dict[str, Any], vocabulary: Vocabulary, where: str) -> None:
    """Refuse a configuration with names that are neither Keras's nor the user's.

    Raises:
        UnknownLayerError: with all such names and the ways to give them.
    """
    unknown: dict[str, None] = {}  # a set that keeps the order
    for node in dictionaries(config):
        class_name = node.get("class_name")
        if "class_name" in node and not isinstance(class_name, str):
            raise ModelFileError(f"{where}: class_name is {class_name!r}, not the name of a class")
        if class_name is not None and "config" in node and class_name not in _DATA:
            unknown.update(dict.fromkeys(_unknown_names(node, vocabulary)))
    if unknown:
        shown = ", ".join(list(unknown)[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise UnknownLayerError(f"{where}: uses classes or functions that Keras does not have: {shown}; {_NAME_THEM}")


def _unknown_names(node: dict[str, Any], vocabulary: Vocabulary) -> Iterator[str]:
    """Yield the unknown names of an object in a configuration."""
    class_name, config, registered = node["class_name"], node["config"], node.get("registered_name")
    if class_name == "function":
        if not vocabulary.is_custom(config, registered) and not vocabulary.keras_function(str(config)):
            yield f"function {config}"
    elif class_name in TENSORFLOW_CALLS:
        check_function(config.get("function"))
    elif class_name != "__lambda__":
        given = config.get("function") if class_name == "Lambda" else None
        if isinstance(given, str) and not vocabulary.is_custom(given):
            yield f"function {config['function']}"
        if not vocabulary.is_custom(class_name, registered) and (
            vocabulary.keras_class(class_name, node.get("module")) is None
        ):
            yield class_name


def check_graph(config: dict[str, Any], where: str) -> None:
    """Refuse calls in a graph that take no tensor: Keras would compute them at once, at any size.

    Raises:
        ModelFileError: with the name of the layer.
    """
    for node in dictionaries(config):
        calls = node.get("inbound_nodes")
        for call in calls if isinstance(calls, list) else ():
            if call and not any(each.get("class_name") == "__keras_tensor__" for each in dictionaries(call)):
                raise ModelFileError(f"{where}: layer {node.get('name')!r} is called on no tensor of the model")
