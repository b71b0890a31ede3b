"""Open models from files, functions and Keras objects, without allocating their weights.

A Keras model is traced as it is, and left as it was. Other processes get its description (`PackedModel`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from kerasmem.checks import nearest
from kerasmem.compat.keras_layers import flatten_layers, weights_added_to_train
from kerasmem.compat.keras_state import names_restarted, safe_mode
from kerasmem.compat.keras_training import compile_arguments
from kerasmem.errors import KerasmemError, ModelError, ModelFileError, UsageError
from kerasmem.models import user_code, vocabulary
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.compiling import TrainingSettings, compile_from_file
from kerasmem.models.document import ModelDocument, check_factory_name, check_model_name, is_factory_name, read_document
from kerasmem.models.keras2 import RECURRENT, Keras2Translator, is_keras2
from kerasmem.models.own_step import as_loop, compiles_as_keras, has_own_compile_config, takes_settings
from kerasmem.models.unchanged import state_restored
from kerasmem.models.weightless import weightless

OBJECT_SOURCE = "Python object"
_MOST_UNROLLED = 2000  # steps of a recurrent layer
_PLAIN = (bool, int, float, str, type(None))
_BESIDE_THE_MODEL = ("compile_config", "keras_version", "backend")


@dataclass(frozen=True)
class OpenedModel:
    """An opened Keras model.

    Attributes:
        model: the Keras model. Its variables have values only if it was a Keras object.
        source: its origin: a path, "package.module:function" or "Python object".
        notes: remarks for the user.
        caveats: differences from the file's `compile`, for the first line of an answer.
    """

    model: Any
    source: str
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()


@contextlib.contextmanager
def open_model(
    source: Any,
    *,
    factory: str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
    dtype_policy: str | None = None,
    training: TrainingSettings = TrainingSettings(),  # noqa: B008 (immutable)
) -> Iterator[OpenedModel]:
    """Open a model while the context lasts, without allocating its weights, compiled as its author wrote.

    A Keras model may be changed while the context lasts, also one in the arguments of a function. Its Python state is
    restored at the end.

    Args:
        source: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function" (or "file.py:function"), a
            Keras model, or a function that returns a model. The function may also return the step function of a
            training loop, or a tuple of objects that the step uses and the step.
        factory: function that builds the model, if the file contains only weights.
        factory_args: keyword arguments of the function that builds the model. `weights` defaults to None for functions
            of Keras (`keras.applications:VGG16`), so that they download nothing.
        custom_objects: classes and functions by the names that the file uses.
        trust: whether serialised Python code in the file may run.
        dtype_policy: policy to use instead of float32, such as "mixed_float16".
        training: optimizer and loss that replace those of a file, which are then not read.

    Raises:
        ModelFileError: If the file cannot be opened as a model.
        ModelError: If the code that builds the model fails.
        UsageError: If `source` has another type.
    """
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if name is not None:
        check_model_name(name)
    is_live = isinstance(source, import_keras().Model)
    with weightless(), state_restored(source if is_live else None, factory_args):
        if is_live:
            yield OpenedModel(with_policy(source, dtype_policy), OBJECT_SOURCE)
        elif isinstance(source, PackedModel):
            yield OpenedModel(source.built(dtype_policy), OBJECT_SOURCE)
        elif factory is not None:
            opened = _open_factory(find_function(factory, "--factory"), factory, factory_args, dtype_policy)
            if name is not None:
                note = f"the architecture is from {factory}, not from {name}"
                opened = replace(opened, source=f"{name} ({factory})", notes=(*opened.notes, note))
            yield opened
        elif name is not None and is_factory_name(name):
            yield _open_factory(find_function(name, "model"), name, factory_args, dtype_policy)
        elif name is not None:
            yield _open_document(read_document(name), custom_objects, trust, dtype_policy, training)
        elif inspect.isroutine(source) or isinstance(source, (type, functools.partial)):
            yield _open_factory(source, getattr(source, "__qualname__", repr(source)), factory_args, dtype_policy)
        else:
            kind = f"{type(source).__module__}.{type(source).__qualname__}"
            raise UsageError(
                f"model must be a path, 'package.module:function', a function or a Keras 3 model; got {kind}"
            )


def with_policy(model: Any, name: str | None) -> Any:
    """Return the model with another dtype policy instead of float32, changed in place if the variables keep theirs.

    Raises:
        UsageError: If the policy is unknown to Keras, or quantizes.
        NotRebuiltError: If the policy changes the variables, and the model cannot be rebuilt with it.
    """
    if name is None:
        return model
    if vocabulary.checked_policy(name).variable_dtype != "float32":
        return pack_model(model).built(name)
    for layer in flatten_layers(model):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = name
    if getattr(model, "compiled", False) and takes_settings(model):
        model.compile(**compile_arguments(model))  # with loss scaling if the policy needs it
    return model


def _open_document(
    document: ModelDocument,
    custom_objects: Mapping[str, Any] | None,
    trust: bool,
    dtype_policy: str | None,
    training: TrainingSettings,
) -> OpenedModel:
    keras = import_keras()
    path = os.fspath(document.path)
    objects = vocabulary.with_registered(custom_objects)
    caveats: tuple[str, ...] = ()
    try:
        model = _build(document, objects, trust, dtype_policy)
        if document.training and isinstance(model, keras.Model):
            caveats = compile_from_file(model, document.training, objects, trust, training)
    except ModelFileError as error:
        raise type(error)(f"{path}: {error}") from error
    except KerasmemError:
        raise
    except RecursionError as error:
        raise ModelFileError(f"{path}: the configuration is nested too deeply") from error
    except Exception as error:
        raise ModelFileError(f"{path}: Keras cannot build the model: {keras_reason(error)}") from error
    if not isinstance(model, keras.Model):
        raise ModelFileError(f"{path}: contains a {type(model).__name__}, not a model")
    return OpenedModel(model, path, caveats=caveats)


def _build(document: ModelDocument, objects: Mapping[str, Any], trust: bool, dtype_policy: str | None) -> Any:
    """Translate a configuration to Keras 3, check it, and build the model."""
    vocabulary.register_own_classes(document.config)
    config: Any = {key: value for key, value in document.config.items() if key not in _BESIDE_THE_MODEL}
    if is_keras2(document.keras_version, config):
        config = Keras2Translator(objects).value(config)
    config = _with_modules(config, objects)
    if not trust:
        vocabulary.check_trust(config)  # after the translation, which may change it
    vocabulary.check_names(config, objects)
    vocabulary.check_graph(config)
    if dtype_policy is not None:
        config = vocabulary.with_dtype_policy(config, dtype_policy)
    unrolled = _roll(config)
    model = _deserialize(config, objects, trust)
    _unroll(model, unrolled)
    return model


def _roll(config: Any) -> set[str]:
    """Set `unroll` of recurrent layers to False, so that building the model is fast, and return their names."""
    names = set()
    for node in vocabulary.dictionaries(config):
        settings = node.get("config")
        if node.get("class_name") in RECURRENT and isinstance(settings, dict) and settings.get("unroll"):
            settings["unroll"] = False
            names.add(str(settings.get("name")))
    return names


def _unroll(model: Any, names: set[str]) -> None:
    """Set `unroll` of recurrent layers to True.

    Raises:
        ModelFileError: If tracing so many steps would take hours.
    """
    for layer in flatten_layers(model) if names else ():
        if layer.name in names and hasattr(layer, "unroll"):
            _, steps, *_ = (layer.get_build_config() or {}).get("input_shape") or (None, None)
            if steps is not None and steps > _MOST_UNROLLED:
                raise ModelFileError(
                    f"layer {layer.name!r} unrolls {steps:,} steps, more than {_MOST_UNROLLED:,}; set unroll=False"
                )
            layer.unroll = True


def _deserialize(config: dict[str, Any], objects: Mapping[str, Any], trust: bool) -> Any:
    with warnings.catch_warnings(), safe_mode(not trust):  # overrides a global setting
        warnings.simplefilter("ignore")  # about the style of model code
        config = deepcopy(config)  # Keras removes parts of it
        return import_keras().saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=not trust)


def _with_modules(value: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Add the module of Keras's objects, omitted by older formats."""
    if isinstance(value, list):
        return [_with_modules(item, custom_objects) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: _with_modules(item, custom_objects) for key, item in value.items()}
    class_name, config = result.get("class_name"), result.get("config")
    if (
        isinstance(class_name, str)
        and "config" in result
        and not result.get("module")
        and not vocabulary.is_custom(custom_objects, class_name, result.get("registered_name"))
    ):
        # A node of a graph without the setting `trainable` is an operation, not a layer.
        is_operation = "inbound_nodes" in result and isinstance(config, dict) and "trainable" not in config
        module = vocabulary.module_of(class_name, is_operation)
        if module is not None:
            result["module"], result["registered_name"] = module, None
    return result


def find_function(text: str, option: str) -> Callable[..., Any]:
    """Return the user's function of a text "package.module:function" or "file.py:function".

    Raises:
        UsageError: If the module cannot be imported, or lacks the function.
    """
    check_factory_name(text, option)
    module_name, _, function = text.rpartition(":")
    names = user_code.import_user_module(module_name, option)
    build: Callable[..., Any] | None = names.get(function)
    if not callable(build):
        hint = nearest(function, sorted(names, reverse=True))  # prefers ResNet50 to the module resnet50
        raise UsageError(f"{option} {text!r}: {module_name} has no function {function!r}{hint}")
    return build


def _open_factory(
    build: Callable[..., Any], source: str, arguments: Mapping[str, Any] | None, dtype_policy: str | None
) -> OpenedModel:
    keras = import_keras()
    previous_policy = keras.config.dtype_policy()
    arguments = dict(arguments or {})
    if str(getattr(build, "__module__", "")).startswith("keras.") and "weights" in inspect.signature(build).parameters:
        arguments.setdefault("weights", None)  # no download
    try:
        if dtype_policy is not None:
            keras.config.set_dtype_policy(dtype_policy)
        model = _call_factory(build, arguments)
    except KerasmemError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{source} failed to build the model: {type(error).__name__}: {keras_reason(error)}"
        ) from error
    finally:
        keras.config.set_dtype_policy(previous_policy)
    if not isinstance(model, keras.Model):
        returned, model = model, as_loop(model)
        if model is None:
            kind = type(returned).__name__
            raise ModelError(f"{source} must return a Keras model or a step function; got {kind}")
    return OpenedModel(model, source)


def _call_factory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call the function with layer names numbered from the start, as in a new process.

    TensorFlow orders operations by name. Without this, dense_9 and dense_10 would swap places in a later call.
    """
    try:
        with names_restarted():
            return build(**arguments)
    except KerasmemError:
        raise
    except ValueError as error:  # the model may reuse an older layer with the same name
        if not {"name", "unique"} <= {word.removesuffix("s") for word in re.findall(r"\w+", str(error).lower())}:
            raise
        return build(**arguments)


class NotRebuiltError(UsageError):
    """A Keras model cannot be rebuilt from its configuration."""


@dataclass(frozen=True)
class _PackedPart:
    """Configuration of an optimizer, loss or metric."""

    config: dict[str, Any]


def _pack(part: Any) -> Any:
    """Describe an argument of `compile`. Functions are sent as they are."""
    keras = import_keras()
    is_object = isinstance(part, (keras.Optimizer, keras.Loss, keras.Metric))
    return _PackedPart(keras.saving.serialize_keras_object(part)) if is_object else part


@dataclass(frozen=True)
class PackedModel:
    """Description of a compiled Keras model without its weights, to rebuild it in another process.

    Attributes:
        name: name of the model.
        config: configuration of the model, without that of `compile`.
        compiled: the arguments of `compile`, or the configuration for `compile_from_config`; empty if not compiled.
        objects: the user's classes and functions in the model, by the names that Keras uses for them.
        trained_layers: name and `trainable` of each layer at any depth; empty if all are trainable.
        trained_weights: path and `trainable` of each weight; empty if all follow from their layers.
        settings: class name and plain attributes of each object of the user's classes, to check the copy.
    """

    name: str
    config: dict[str, Any]
    compiled: dict[str, Any]
    objects: Mapping[str, Any]
    trained_layers: tuple[tuple[str, bool], ...] = ()
    trained_weights: tuple[tuple[str, bool], ...] = ()
    settings: tuple[tuple[str, dict[str, Any]], ...] = ()

    def built(self, dtype_policy: str | None = None) -> Any:
        """Build and compile the model, optionally with another dtype policy.

        Raises:
            NotRebuiltError: If the configuration does not build the whole model.
        """
        vocabulary.register_own_classes(self.config)
        try:
            config = self.config if dtype_policy is None else vocabulary.with_dtype_policy(self.config, dtype_policy)
            copy = _deserialize(config, self.objects, trust=True)  # an object of the user's program
            self._freeze(copy)  # before `compile`, as the optimizer creates slots for trainable weights
            if self.compiled and has_own_compile_config(copy):
                with import_keras().saving.custom_object_scope(self.objects), safe_mode(False):
                    copy.compile_from_config(self.compiled)
            elif self.compiled:
                copy.compile(**import_keras().tree.map_structure(self._unpack, self.compiled))
        except NotRebuiltError:
            raise
        except Exception as error:
            raise _not_rebuilt(self.name, keras_reason(error)) from error
        for (kind, settings), (_, copied) in zip(self.settings, _settings_of(copy), strict=False):
            lost = [key for key, value in settings.items() if key in copied and copied[key] != value]
            if lost:
                raise _not_rebuilt(self.name, f"get_config() of {kind} lacks {', '.join(lost[:3])}")
        return copy

    def _unpack(self, part: Any) -> Any:
        return _deserialize(part.config, self.objects, trust=True) if isinstance(part, _PackedPart) else part

    def _freeze(self, copy: Any) -> None:
        layers = [(layer.name, layer) for layer in flatten_layers(copy)]
        weights = [(weight.path, weight) for weight in copy.weights]
        for parts, flags in ((layers, self.trained_layers), (weights, self.trained_weights)):
            if flags and len(parts) != len(flags):
                missing = [name for name, _ in flags if name not in dict(parts)][:3]
                raise NotRebuiltError(
                    f"model {copy.name!r} is partly frozen and cannot be rebuilt from its configuration, which lacks "
                    f"{', '.join(missing)}; pass a function that builds it"
                )
            for (_, part), (_, flag) in zip(
                parts, flags, strict=False
            ):  # an outer layer sets its inner layers, so it is first
                if part.trainable != flag:
                    part.trainable = flag


def pack_model(model: Any) -> PackedModel:
    """Describe a Keras model and its `compile` without weights.

    Raises:
        NotRebuiltError: If the model is not built, or has parts without a configuration.
    """
    if not model.built and not isinstance(model, import_keras().Sequential):
        raise _not_rebuilt(model.name, "it is not built")
    compiled = {}
    try:
        config = vocabulary.configuration(model)
        config.pop("compile_config", None)
        if getattr(model, "compiled", False):
            if has_own_compile_config(model):
                compiled = model.get_compile_config()
            elif compiles_as_keras(model):
                compiled = import_keras().tree.map_structure(_pack, compile_arguments(model))
            else:
                raise TypeError("its compile() has other arguments than Keras's, and no compile_from_config()")
    except Exception as error:
        raise _not_rebuilt(model.name, keras_reason(error)) from error
    text = repr((config, compiled))
    objects = {name: value for name, value in user_code.own_objects(model).items() if repr(name) in text}
    layers = flatten_layers(model)
    flags = tuple((layer.name, bool(layer.trainable)) for layer in layers)
    follow = all(weight.trainable == layer.trainable for layer in layers for weight in weights_added_to_train(layer))
    return PackedModel(
        model.name,
        config,
        compiled,
        objects,
        trained_layers=() if all(is_trained for _, is_trained in flags) else flags,
        trained_weights=() if follow else tuple((weight.path, bool(weight.trainable)) for weight in model.weights),
        settings=tuple(_settings_of(model)),
    )


def _settings_of(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the class name and the plain public attributes of each object of the user's classes."""
    for part in (*flatten_layers(model), *user_code.compiled_parts(model)):
        if not isinstance(part, (str, FunctionType)) and not user_code.is_of_a_library(part):
            attributes = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "built"}
            yield type(part).__name__, {key: value for key, value in attributes.items() if isinstance(value, _PLAIN)}


def _not_rebuilt(name: str, reason: str) -> NotRebuiltError:
    return NotRebuiltError(
        f"model {name!r} cannot be rebuilt in another process ({reason}); pass a function that builds it"
    )
