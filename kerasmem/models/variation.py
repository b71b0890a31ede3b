"""The same model with one number of one layer changed: "dense_1.units" = 4096."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kerasmem.errors import KerasmemError, ModelError, ModelFileError, UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.document import read_document
from kerasmem.models.names import is_factory_name
from kerasmem.models.opening import open_model
from kerasmem.models.vocabulary import configuration, dictionaries, own_objects

Reshaped = Callable[[int], "contextlib.AbstractContextManager[Any]"]


def reshaping(model: Any, vary: str, **options: Any) -> Reshaped:
    """Return what gives the model with another number: a context manager around a source for `open_model`.

    Args:
        model: what `open_model` takes.
        vary: "layer.field", the layer by its name (or by its path through nested models, "tower/conv"), the field a
            whole number of its configuration.
        **options: `factory`, `factory_args`, `custom_objects`, `trust` of `open_model`.

    Raises:
        UsageError: there is no such layer or field.
        ModelFileError: the file cannot be read.
        ModelError: the model does not say how to build it again.
    """
    if (
        isinstance(model, (str, os.PathLike))
        and options.get("factory") is None
        and not is_factory_name(os.fspath(model))
    ):
        document = read_document(model)
        with_number(document.config, vary, 1)  # refuse at once
        described = {**document.config, "keras_version": document.keras_version}
        if document.training is not None:
            described["compile_config"] = document.training
        return lambda number: _as_file(os.fspath(model), described, vary, number)
    config, classes = _configuration(model, options)
    with_number(config, vary, 1)

    @contextlib.contextmanager
    def as_function(number: int) -> Iterator[Any]:
        yield _builder(config, classes, vary, number)

    return as_function


def with_number(config: Mapping[str, Any], vary: str, number: int) -> dict[str, Any]:
    """Return a model's configuration with one number of one layer changed.

    What Keras stored about built shapes is left out, since the layers behind get other ones.

    Raises:
        UsageError: there is no such layer, several have the name, or the field is no whole number of it.
    """
    name, _, wanted = vary.rpartition(".")
    changed = copy.deepcopy(dict(config))
    found = list(_layers(changed, ""))
    matching = [layer for path, layer in found if name in (path, path.rpartition("/")[2])]
    if len(matching) > 1:
        matching = [layer for path, layer in found if path == name]
    if len(matching) != 1:
        names = [path for path, _ in found]
        near = difflib.get_close_matches(name, names, n=3) or names[:8]
        is_there = name in {path.rpartition("/")[2] for path in names}
        what = "is the name of several layers; write its path" if is_there else "is no layer of the model"
        raise UsageError(f"{vary}: {name!r} {what} (there are: {', '.join(near) or 'none by name'})")
    fields = {key for key, value in matching[0].items() if isinstance(value, int) and not isinstance(value, bool)}
    if wanted not in fields:
        known = ", ".join(sorted(fields)) or "none"
        raise UsageError(f"{vary}: layer {name!r} has no whole number {wanted!r}; it has: {known}")
    matching[0][wanted] = number
    for node in dictionaries(changed):
        node.pop("build_config", None)
        node.pop("build_input_shape", None)
    return changed


def _layers(node: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the layers of a model's configuration with their paths, those of nested models after them."""
    inner = node.get("config") if isinstance(node, dict) else None
    listed = inner.get("layers") if isinstance(inner, dict) else inner if isinstance(inner, list) else None
    for each in listed if isinstance(listed, list) else ():
        config = each.get("config") if isinstance(each, dict) else None
        if not isinstance(config, dict):
            continue
        path = prefix + str(config.get("name", each.get("name")))
        yield path, config
        yield from _layers(each, f"{path}/")


@contextlib.contextmanager
def _as_file(source: str, described: dict[str, Any], vary: str, number: int) -> Iterator[str]:
    """Write the changed architecture to a file of its own, which is opened with all the care that a file gets."""
    with tempfile.TemporaryDirectory(prefix="kerasmem-vary-") as folder:
        path = Path(folder) / "model.json"
        path.write_text(json.dumps(with_number(described, vary, number)))
        try:
            yield os.fspath(path)
        except KerasmemError as error:
            shown = str(error).replace(os.fspath(path), f"{source} with {vary} = {number}")
            raise type(error)(shown) from error


def _configuration(model: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a model in Python, and its classes."""
    with open_model(model, **options, shapes_only=False) as opened:
        classes = own_objects(opened.model)
        try:
            return configuration(opened.model), classes
        except Exception as error:
            raise ModelError(
                f"model {opened.name!r} does not say how to build it again ({keras_reason(error)}); give a function "
                "with an argument to vary in its place"
            ) from error


def _builder(config: dict[str, Any], classes: dict[str, Any], vary: str, number: int) -> Callable[[], Any]:
    def build() -> Any:
        keras = import_keras()
        try:
            with keras.saving.custom_object_scope(classes):  # the user's own live object
                return keras.saving.deserialize_keras_object(with_number(config, vary, number), safe_mode=False)
        except Exception as error:
            raise ModelFileError(f"the model with {vary} = {number} cannot be built: {keras_reason(error)}") from error

    build.__qualname__ = f"{config.get('config', {}).get('name', 'model')} with {vary} = {number}"
    return build
