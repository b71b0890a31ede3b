"""The settings of an estimated training step: one object for Python, the command line, grids and child processes."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args

from kerasmem import checks
from kerasmem.checks import MethodName, Mode
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.inputs import NO_TARGETS, GivenShape, GivenTargets, given_targets, normalise_input_shapes
from kerasmem.models.names import is_factory_name
from kerasmem.models.opening import OpenedModel, Trained, check_built, freeze_as, no_model, open_model, trained_parts
from kerasmem.models.vocabulary import configuration, import_user_module, load_custom_objects, own_objects
from kerasmem.records import Record

DEFAULT_BATCH_SIZE = 32
_REMEDY = "put the code that builds the model into a function of a module and give 'module:function'"
F = TypeVar("F", bound=Callable[..., Any])


class StepSettings(TypedDict, total=False):
    """Types of settings, for functions that take them as `**settings: Unpack[StepSettings]`."""

    batch_size: int
    method: MethodName
    optimizer: str | None
    loss: str | None
    dtype_policy: str | None
    jit_compile: bool | Literal["auto"]
    mode: Mode
    replicas: int
    input_shape: Any
    target_shape: Any
    target_dtype: str | None
    factory: str | None
    factory_args: Mapping[str, Any] | None
    custom_objects: Any
    trust: bool


class EstimateSettings(StepSettings, total=False):
    """All settings of `StepSpec`, for functions that do not have `device` as a parameter of their own."""

    device: str | int | None


@dataclass(frozen=True)
class StepSpec(Record, what="step"):
    """A model, its training step and how to estimate it: every setting, validated.

    Attributes:
        model: a path, "module:function", a function, a Keras model; None if `factory` alone builds it.
        paths: folders to search for modules, beside Python's own. Of a spec in another process.
        trained: layers and weights that are trained, of a Keras model. Of a spec in another process.
        others: as for `kerasmem.estimate`.

    Raises:
        UsageError: If a setting is wrong.
    """

    model: Any
    batch_size: int = DEFAULT_BATCH_SIZE
    method: str = "auto"
    optimizer: str | None = None
    loss: str | None = None
    dtype_policy: str | None = None
    device: str | int | None = None
    jit_compile: bool | str = "auto"
    mode: str = "train"
    replicas: int = 1
    input_shape: Any = None
    target_shape: Any = None
    target_dtype: str | None = None
    factory: str | None = None
    factory_args: Mapping[str, Any] | None = None
    custom_objects: Any = None
    trust: bool = False
    paths: tuple[str, ...] = ()
    trained: Trained = field(default_factory=Trained)

    def __post_init__(self) -> None:
        checks.choice("method", self.method, get_args(MethodName))
        checks.choice("mode", self.mode, get_args(Mode))
        checks.choice("jit_compile", self.jit_compile, (True, False, "auto"))
        checks.whole("replicas", self.replicas)
        checks.batch_size("batch_size", self.batch_size, self.method)

    @property
    def label(self) -> str:
        """The model's path or the name of the function that builds it, for messages."""
        if self.model is None:
            return str(self.factory)
        is_named = isinstance(self.model, (str, os.PathLike))
        return os.fspath(self.model) if is_named else getattr(self.model, "__qualname__", type(self.model).__name__)

    def settings(self) -> dict[str, Any]:
        """Return all settings but the model, as functions take them that estimate."""
        return {name: getattr(self, name) for name in EstimateSettings.__annotations__}

    def input_shapes(self) -> dict[str, GivenShape]:
        """Return the shapes of the inputs by name ("" for the only one)."""
        return normalise_input_shapes(self.input_shape)

    def targets(self) -> GivenTargets:
        """Return the settings of the targets."""
        return given_targets(self.target_shape, self.target_dtype)

    @contextlib.contextmanager
    def opened(self, *, shapes_only: bool = False) -> Iterator[OpenedModel]:
        """Open the model as `open_model` does, for as long as the context lasts."""
        if self.custom_objects or self.factory or is_factory_name(str(self.model)):
            # Without code of the user's no module of the working folder is imported by accident.
            sys.path.extend(path for path in self.paths if path not in sys.path)
        with open_model(
            self.model,
            factory=self.factory,
            factory_args=self.factory_args,
            custom_objects=load_references(self.custom_objects or {}),
            trust=self.trust,
            dtype_policy=self.dtype_policy,
            shapes_only=shapes_only,
        ) as opened:
            freeze_as(opened.model, self.trained)
            yield opened

    @contextlib.contextmanager
    def portable(self, **changes: Any) -> Iterator[StepSpec]:
        """Describe the step to another process: a spec that JSON can hold, valid for as long as the context lasts.

        Paths and names of functions are passed on. Of a Keras model the architecture and the settings of `compile` are
        written to a temporary folder, without its weights.

        Args:
            **changes: settings that differ.

        Raises:
            UsageError: If the model, or a part of it, exists in this process only.
        """
        spec = replace(self, **changes)
        targets, model = spec.targets(), spec.model
        spec = replace(
            spec,
            input_shape=_shape_texts(spec.input_shapes()),
            target_shape=NO_TARGETS if targets.are_none else _shape_texts(targets.shapes),
            custom_objects=_references(spec.custom_objects),
            paths=(os.getcwd(),),
        )
        if isinstance(model, import_keras().Model):
            with tempfile.TemporaryDirectory(prefix="kerasmem-") as folder:
                path, own = _write_architecture(model, Path(folder))
                objects = {**own, **(spec.custom_objects or {})}
                trained = trained_parts(model)
                yield replace(spec, model=path, custom_objects=objects, factory_args=None, trust=True, trained=trained)
            return
        arguments = dict(spec.factory_args or {})
        if isinstance(model, functools.partial):
            if model.args:
                raise UsageError(f"{model!r} binds arguments by position; bind them by keyword, or {_REMEDY}")
            arguments = {**model.keywords, **arguments}
            model = model.func
        if inspect.isroutine(model) or isinstance(model, type):
            model = reference(model, "the function that builds the model")
            if not model.rpartition(":")[2].isidentifier():
                raise UsageError(f"{model} is inside a class; {_REMEDY}")
        elif model is not None and not isinstance(model, (str, os.PathLike)):
            raise no_model(model)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the arguments {', '.join(arguments)} of the function that builds the model cannot be given to "
                f"another process ({error}); bind numbers, texts and lists only, or put it into a function of a module"
            ) from None
        yield replace(spec, model=None if model is None else os.fspath(model), factory_args=arguments)


def shows_settings(*without: str) -> Callable[[F], F]:
    """Let `help` and `inspect.signature` list the settings of a function that takes `**settings`.

    Args:
        *without: settings that the function does not take.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = {name: each for name, each in signature.parameters.items() if name != "settings"}
        settings = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(StepSpec)
            if each.name in EstimateSettings.__annotations__ and each.name not in (*own, *without)
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own.values(), *settings]
        )
        return function

    return decorate


def reference(value: Any, what: str) -> str:
    """Return "module:qualified name" of a class or function, or "file.py:name".

    Args:
        value: the class or function.
        what: its description, for the message.

    Raises:
        UsageError: If another process cannot import it.
    """
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    known = None if module == "__main__" else sys.modules.get(module)
    for part in name.split("."):
        known = getattr(known, part, None)
    if known is None or known is not value:
        raise UsageError(
            f"{what} ({module}.{name}) cannot be imported by another process: it is defined in the script or notebook "
            f"itself, is local to a function, or stands under another name; {_REMEDY}"
        )
    return f"{_module_text(module)}:{name}"


def load_references(references: Any) -> dict[str, Any]:
    """Import custom objects.

    Args:
        references: name to object or "module:name" text, or a list of modules that have them.

    Raises:
        UsageError: If a module or a name in it is not there.
    """
    if not isinstance(references, Mapping):
        return load_custom_objects(references)
    modules: dict[str, Any] = {}  # each is imported once: a class is another one in a second import of a file
    objects: dict[str, Any] = {}
    for key, value in references.items():
        objects[key] = value
        if isinstance(value, str):
            module, _, name = value.rpartition(":")
            if module not in modules:
                modules[module] = sys.modules.get(module) or import_user_module(module, f"custom object {key!r}:")
            try:
                objects[key] = functools.reduce(getattr, name.split("."), modules[module])
            except AttributeError:
                raise UsageError(f"custom object {key!r}: {module} has no {name!r}") from None
    return objects


def _references(objects: Any) -> Any:
    if not isinstance(objects, Mapping):
        return objects
    return {
        name: value if isinstance(value, str) else reference(value, f"custom object {name!r}")
        for name, value in objects.items()
    }


def _module_text(module: str) -> str:
    """Return the importable name of a module, or its file."""
    file = getattr(sys.modules[module], "__file__", None)
    if "." in module or not file or not file.endswith(".py"):
        return module
    specification = importlib.machinery.PathFinder.find_spec(module)
    return module if specification is not None and specification.origin == file else os.path.abspath(file)


def _shape_texts(shapes: Mapping[str, GivenShape]) -> list[str] | None:
    return [f"{name}={shape}" if name else str(shape) for name, shape in shapes.items()] or None


def _write_architecture(model: Any, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the model's configuration, and return the file and the custom classes in it."""
    check_built(model)
    known = own_objects(model)
    try:
        config = {**configuration(model), "keras_version": import_keras().__version__}
        compiled = config.pop("compile_config", None)
        text = json.dumps(config)
    except Exception as error:
        raise UsageError(
            f"model {model.name!r} cannot be described to another process ({keras_reason(error)}); {_REMEDY}"
        ) from error
    own = {name: reference(known[name], f"{name!r} of the model") for name in _names_in(text, known)}
    with contextlib.suppress(TypeError, ValueError):  # settings of `compile` that JSON does not have are left out
        text = json.dumps({**config, "compile_config": compiled})
        for name in _names_in(json.dumps(compiled), known):
            with contextlib.suppress(UsageError):  # a loss or metric: the child says that it does not know it
                own.setdefault(name, reference(known[name], name))
    path = folder / "model.json"
    path.write_text(text)
    return os.fspath(path), own


def _names_in(text: str, known: Mapping[str, Any]) -> list[str]:
    """Return the names of custom objects that stand in a configuration written as JSON."""
    return [name for name in known if json.dumps(name) in text]
