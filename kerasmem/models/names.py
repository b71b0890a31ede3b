"""Checks of the names of models and optimizers before the slow import of Keras."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from pathlib import Path

from kerasmem.checks import nearest
from kerasmem.errors import ModelFileError, UsageError


@functools.cache
def public_names(module: str) -> frozenset[str]:
    """Return the names that a public module of Keras offers, read from its text and not imported.

    Args:
        module: such as "keras.applications".

    Returns:
        The names; none if Keras is not installed, or is built otherwise.
    """
    package, _, inner = module.partition(".")
    try:
        specification = importlib.util.find_spec(package)
        folder = Path((specification.submodule_search_locations or [])[0]) if specification else None
        text = folder and folder.joinpath(*inner.split("."), "__init__.py").read_text(encoding="utf-8")
        tree = ast.parse(text or "")
    except (OSError, ValueError, IndexError, SyntaxError, ImportError):
        return frozenset()
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for node in imports for alias in node.names)


def check_model_name(text: str) -> None:
    """Refuse a name that cannot be a model: an absent file, or a function that Keras does not have.

    Raises:
        ModelFileError: If there is no such file; the message offers a model of Keras's that is named alike.
        UsageError: If Keras has no such function, or there is no such Python file.
    """
    if is_factory_name(text):
        check_factory_name(text, "model")
    elif "://" in text:
        raise ModelFileError(f"{text}: addresses are not opened; download the file and give its path")
    elif not text:
        raise ModelFileError("the path of the model file is empty")
    elif "\0" not in text and not os.path.lexists(text):
        applications = {name for name in public_names("keras.applications") if name[:1].isupper()}
        hint = nearest(text, applications).replace("'", "'keras.applications:", 1) if text.isidentifier() else ""
        raise ModelFileError(f"{text}: no such file{hint}")


def check_factory_name(text: str, option: str) -> None:
    """Refuse a name that cannot be a function, without running code.

    Raises:
        UsageError: If it does not read as one, Keras has no such function, or there is no such Python file.
    """
    module, _, function = text.rpartition(":")
    if not module or not function.isidentifier():
        raise UsageError(f"{option} {text!r}: write package.module:function or file.py:function")
    known = public_names(module) if module.startswith("keras.") else frozenset()
    if known and function not in known:
        hint = nearest(function, sorted(known, reverse=True))  # ResNet50 rather than the module resnet50
        raise UsageError(f"{option} {text!r}: {module} has no function {function!r}{hint}")
    if module.endswith(".py") and not Path(module).exists():
        raise UsageError(f"{option} {module}: no such file")


def is_factory_name(text: str) -> bool:
    """Return whether `text` reads as "package.module:function" or "file.py:function" and is no existing file."""
    module, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier() or Path(text).exists():
        return False
    return module.endswith(".py") or all(part.isidentifier() for part in module.split("."))


def check_optimizer_name(name: str) -> None:
    """Refuse the name of an optimizer that Keras does not have, as far as its public module tells.

    Raises:
        UsageError: If Keras has no such optimizer.
    """
    classes = {each.lower() for each in public_names("keras.optimizers") if each[:1].isupper()} - {"optimizer"}
    if classes and name.lower() not in classes:
        known = ", ".join(sorted(classes))
        raise UsageError(f"optimizer {name!r} is not one of Keras's: {known}{nearest(name, classes)}")
