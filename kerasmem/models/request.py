"""A request to open the same model and prepare the same training step in a subprocess."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.freezing import Trained, freeze_as, trained_parts
from kerasmem.models.inputs import NO_TARGETS, GivenShape, GivenTargets, given_targets, normalise_input_shapes
from kerasmem.models.names import is_factory_name
from kerasmem.models.opening import OpenedModel, check_built, no_model, open_model
from kerasmem.models.vocabulary import configuration, dictionaries, import_user_module, own_objects
from kerasmem.records import Record

_WAY_OUT = "put the code that builds the model into a function of a module and give 'module:function'"


@dataclass(frozen=True)
class ModelRequest(Record, what="model request"):
    """A model and its training step, in words that another process understands.

    Attributes:
        source: a path or "module:function"; None if `factory` alone builds the model.
        factory: "module:function" that builds the model a weights-only file belongs to.
        factory_args: keyword arguments for the function that builds the model, as JSON has them.
        custom_objects: name to "module:qualified name" of a class or function.
        trust: allow serialised Python in the file to run.
        dtype_policy: a Keras dtype policy in place of the model's own.
        input_shape: "name=224,224,3:float32", one text an input.
        target_shape: likewise of the targets; "none" alone where the step takes none.
        target_dtype: of targets that do not say it themselves.
        optimizer: a Keras optimizer's name in place of the model's own.
        loss: a loss's name in place of the model's own.
        batch_size: samples in a batch.
        mode: "train", "evaluate" or "inference".
        jit_compile: True, False or "auto".
        paths: folders that Python must look for modules in, beside those it knows.
        trained: layers and weights that are trained, of a Keras model.
    """

    source: str | None
    factory: str | None = None
    factory_args: dict[str, Any] = field(default_factory=dict)
    custom_objects: dict[str, str] = field(default_factory=dict)
    trust: bool = False
    dtype_policy: str | None = None
    input_shape: tuple[str, ...] = ()
    target_shape: tuple[str, ...] = ()
    target_dtype: str | None = None
    optimizer: str | None = None
    loss: str | None = None
    batch_size: int = 32
    mode: str = "train"
    jit_compile: bool | str = "auto"
    paths: tuple[str, ...] = ()
    trained: Trained = field(default_factory=Trained)

    @property
    def names_code(self) -> bool:
        """Whether functions or classes of the user's are named."""
        return bool(self.factory or self.custom_objects or (self.source and is_factory_name(self.source)))

    def input_shapes(self) -> dict[str, GivenShape]:
        """Return the shapes given, by the name of the input ("" for the only one)."""
        return normalise_input_shapes(list(self.input_shape) or None)

    def targets(self) -> GivenTargets:
        """Return the settings of the targets."""
        return given_targets(list(self.target_shape) or None, self.target_dtype)


@contextlib.contextmanager
def request_for(
    source: Any,
    *,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
    input_shape: Any = None,
    target_shape: Any = None,
    target_dtype: str | None = None,
    **settings: Any,
) -> Iterator[ModelRequest]:
    """Put a model into a `ModelRequest`, valid for as long as the context lasts.

    Paths and names of functions are passed on; of a Keras model the architecture and the settings of `compile`
    are written to a temporary folder, without its weights.

    Args:
        source: as for `open_model`: a path, "module:function", a function, a Keras model.
        factory_args: as for `open_model`; values that JSON has.
        custom_objects: as for `open_model`; classes and functions of importable modules.
        trust: as for `open_model`.
        input_shape: open dimensions of the inputs, as `normalise_input_shapes` takes them.
        target_shape: of the targets, as `given_targets` takes it.
        target_dtype: likewise.
        **settings: other attributes of `ModelRequest`, as they are.

    Raises:
        UsageError: If the model, or something that it is made of, exists in this process only.
    """
    targets = given_targets(target_shape, target_dtype)
    common: dict[str, Any] = {
        **settings,
        "input_shape": _shape_texts(normalise_input_shapes(input_shape)),
        "target_shape": (NO_TARGETS,) if targets.are_none else _shape_texts(targets.shapes),
        "target_dtype": targets.dtype,
        "paths": (os.getcwd(),),
    }
    given = {name: reference(value, f"custom object {name!r}") for name, value in (custom_objects or {}).items()}
    if isinstance(source, import_keras().Model):
        with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
            path, own = _write_architecture(source, Path(folder))
            objects = {**own, **given}
            yield ModelRequest(source=path, custom_objects=objects, trust=True, trained=trained_parts(source), **common)
        return
    arguments = dict(factory_args or {})
    if isinstance(source, functools.partial):
        if source.args:
            raise UsageError(f"{source!r} binds arguments by position; bind them by keyword, or {_WAY_OUT}")
        source, arguments = source.func, {**source.keywords, **arguments}
    if inspect.isroutine(source) or isinstance(source, type):
        source = _factory_reference(source)
    elif source is not None and not isinstance(source, (str, os.PathLike)):
        raise no_model(source)
    yield ModelRequest(
        source=None if source is None else os.fspath(source),
        factory_args=_as_json(arguments),
        custom_objects=given,
        trust=trust,
        **common,
    )


@contextlib.contextmanager
def open_request(request: ModelRequest) -> Iterator[OpenedModel]:
    """Open the model of a request in this process, without weights, as `open_model` does."""
    if request.names_code:  # and else no module of the folder that somebody works in is imported by accident
        sys.path.extend(path for path in request.paths if path not in sys.path)
    with open_model(
        request.source,
        factory=request.factory,
        factory_args=request.factory_args,
        custom_objects=load_references(request.custom_objects),
        trust=request.trust,
        dtype_policy=request.dtype_policy,
    ) as opened:
        freeze_as(opened.model, request.trained)
        yield opened


def reference(value: Any, what: str) -> str:
    """Return "module:qualified name" of a class or function, or "file.py:name".

    Args:
        value: the class or function.
        what: its description, for the message.

    Raises:
        UsageError: If another process cannot import it.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise UsageError(f"{what} is a {type(value).__name__}, which another process cannot import; {_WAY_OUT}")
    if module == "__main__":
        raise UsageError(
            f"{what} is defined in the script or notebook itself (__main__), which another process cannot import; "
            f"{_WAY_OUT}"
        )
    if "<" in name:
        raise UsageError(f"{what} ({module}.{name}) is local to a function; {_WAY_OUT}")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise UsageError(f"{what}: {module}.{name} is another object than the one given; {_WAY_OUT}")
    return f"{_module_text(module)}:{name}"


def load_references(references: Mapping[str, str]) -> dict[str, Any]:
    """Import the objects of `reference` texts, each module once.

    Raises:
        UsageError: If a module or a name in it is not there.
    """
    modules: dict[str, Any] = {}
    objects = {}
    for key, text in references.items():
        module, _, name = text.rpartition(":")
        if module not in modules:
            modules[module] = sys.modules.get(module) or import_user_module(module, f"custom object {key!r}:")
        try:
            objects[key] = functools.reduce(getattr, name.split("."), modules[module])
        except AttributeError:
            raise UsageError(f"custom object {key!r}: {module} has no {name!r}") from None
    return objects


def _module_text(module: str) -> str:
    """Return the importable name of a module, or its file."""
    file = getattr(sys.modules[module], "__file__", None)
    if "." in module or not file or not file.endswith(".py"):
        return module
    specification = importlib.machinery.PathFinder.find_spec(module)
    return module if specification is not None and specification.origin == file else os.path.abspath(file)


def _factory_reference(build: Any) -> str:
    text = reference(build, "the function that builds the model")
    if not text.rpartition(":")[2].isidentifier():
        raise UsageError(f"{text} is inside a class; {_WAY_OUT}")
    return text


def _as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"argument {name!r} of the function that builds the model is a {type(value).__name__}, which another "
                "process cannot be given; bind numbers, texts and lists only, or put it into a function of a module"
            ) from None
    return arguments


def _shape_texts(shapes: Mapping[str, GivenShape]) -> tuple[str, ...]:
    return tuple(f"{name}={shape}" if name else str(shape) for name, shape in shapes.items())


def _write_architecture(model: Any, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the model's configuration, and return the file and the custom classes in it."""
    keras = import_keras()
    check_built(model)
    try:
        config = configuration(model)
        compiled = config.pop("compile_config", None)
        text = json.dumps({**config, "keras_version": keras.__version__})
    except Exception as error:
        raise UsageError(
            f"model {model.name!r} cannot be described to another process ({keras_reason(error)}); {_WAY_OUT}"
        ) from error
    known = own_objects(model)
    own = {name: reference(value, f"{name!r} of the model") for name, value in _found_objects(config, known)}
    with contextlib.suppress(TypeError, ValueError):  # settings of `compile` that JSON does not have are left out
        text = json.dumps({**config, "keras_version": keras.__version__, "compile_config": compiled})
        for name, value in _found_objects(compiled, known):
            with contextlib.suppress(UsageError):  # a loss or metric: the child says that it does not know it
                own.setdefault(name, reference(value, name))
    path = folder / "model.json"
    path.write_text(text)
    return os.fspath(path), own


def _found_objects(config: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the custom names in a configuration with their objects."""
    for node in dictionaries(config):
        name, registered = node.get("class_name"), node.get("registered_name")
        name = node.get("config") if name == "function" else name
        if not isinstance(name, str) or str(node.get("module")).split(".")[0] == "keras":
            continue
        found = known.get(registered, known.get(name)) if isinstance(registered, str) else known.get(name)
        if found is not None:
            yield name, found
            if isinstance(registered, str) and registered not in (name, "function"):
                yield registered, found
