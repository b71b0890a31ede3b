"""Open models from files, functions and Keras objects, without allocating their weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.checks import nearest
from kerasmem.compat.keras_layers import flatten_layers, weights_added_to_train
from kerasmem.compat.keras_state import names_restarted, safe_mode
from kerasmem.errors import KerasmemError, ModelError, ModelFileError, UsageError
from kerasmem.models import user_code, vocabulary
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.document import ModelDocument, check_factory_name, check_model_name, is_factory_name, read_document
from kerasmem.models.keras2 import RECURRENT, Keras2Translator, is_keras2
from kerasmem.models.own_step import as_loop
from kerasmem.models.training import TrainingSettings, training_of_copy, training_of_document, training_of_model
from kerasmem.models.weightless import weightless

OBJECT_SOURCE = "Python object"
_BESIDE_THE_MODEL = ("compile_config", "keras_version", "backend")


@dataclass(frozen=True)
class OpenedModel:
    """An opened Keras model.

    Attributes:
        model: the Keras model. Its variables have values only if it was a Keras object.
        source: its origin: a path, "package.module:function" or "Python object".
        training: arguments of `compile`, such as optimizer and loss, if known.
        notes: remarks for the user.
    """

    model: Any
    source: str
    training: TrainingSettings
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_model(
    source: Any,
    *,
    factory: str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
    dtype_policy: str | None = None,
    shapes_only: bool = False,
) -> Iterator[OpenedModel]:
    """Open a model while the context lasts, without allocating its weights.

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
        shapes_only: whether to copy a Keras model without its weights, so that preparing its training does not
            change it.

    Raises:
        ModelFileError: If the file cannot be opened as a model.
        ModelError: If the code that builds the model fails.
        UsageError: If `source` has another type.
    """
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    if name is not None:
        check_model_name(name)
    is_live = isinstance(source, import_keras().Model)
    if is_live and source.built and not shapes_only and dtype_policy is None:
        yield OpenedModel(source, OBJECT_SOURCE, training_of_model(source))
        return
    with weightless():
        if is_live:
            copy, training = pack_model(source).built(dtype_policy), training_of_model(source)
            yield OpenedModel(copy, OBJECT_SOURCE, training_of_copy(source, training))
        elif isinstance(source, PackedModel):
            yield OpenedModel(source.built(dtype_policy), OBJECT_SOURCE, source.training)
        elif factory is not None:
            opened = _open_factory(_find_factory(factory, "--factory"), factory, factory_args, dtype_policy)
            if name is not None:
                note = f"the architecture is from {factory}, not from {name}"
                opened = replace(opened, source=f"{name} ({factory})", notes=(*opened.notes, note))
            yield opened
        elif name is not None and is_factory_name(name):
            yield _open_factory(_find_factory(name, "model"), name, factory_args, dtype_policy)
        elif name is not None:
            yield _open_document(read_document(name), custom_objects, trust, dtype_policy)
        elif inspect.isroutine(source) or isinstance(source, (type, functools.partial)):
            yield _open_factory(source, getattr(source, "__qualname__", repr(source)), factory_args, dtype_policy)
        else:
            kind = f"{type(source).__module__}.{type(source).__qualname__}"
            raise UsageError(
                f"model must be a path, 'package.module:function', a function or a Keras 3 model; got {kind}"
            )


def _open_document(
    document: ModelDocument, custom_objects: Mapping[str, Any] | None, trust: bool, dtype_policy: str | None
) -> OpenedModel:
    keras = import_keras()
    path = os.fspath(document.path)
    try:
        model = _build(document, custom_objects, trust, dtype_policy)
        training = training_of_document(document)
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
    return OpenedModel(model, path, training)


def _build(
    document: ModelDocument, custom_objects: Mapping[str, Any] | None, trust: bool, dtype_policy: str | None
) -> Any:
    """Translate a configuration to Keras 3, check it, and build the model."""
    vocabulary.register_own_classes(document.config)
    objects = vocabulary.with_registered(custom_objects)
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
    return _deserialize(config, objects, trust)


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
    if class_name in RECURRENT and isinstance(config, dict) and config.get("unroll"):
        result["config"] = {**result["config"], "unroll": False}  # the same model with fewer operations
    return result


def _find_factory(text: str, option: str) -> Callable[..., Any]:
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
    return OpenedModel(model, source, training_of_model(model))


def _call_factory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call the function with layer names numbered from the start, as in a new process.

    TensorFlow orders operations by name. Without this, dense_9 and dense_10 would swap places in a later call.
    """
    try:
        with names_restarted():
            return build(**arguments)
    except KerasmemError:
        raise
    except ValueError:  # the model may reuse an older layer with the same name
        return build(**arguments)


def check_built(model: Any) -> None:
    """Refuse a Keras model that is not built, unless it is Sequential.

    Raises:
        UsageError: If the model is not built.
    """
    if not model.built and not isinstance(model, import_keras().Sequential):
        raise UsageError(
            f"model {model.name!r} must be built; call it on data if its weights fit in memory here, or pass "
            "the class or function that creates it"
        )


class NotRebuiltError(UsageError):
    """A Keras model cannot be rebuilt from its configuration."""


@dataclass(frozen=True)
class PackedModel:
    """Description of a Keras model without its weights, to rebuild it here or in another process.

    Attributes:
        name: name of the model.
        config: configuration of the model, without that of `compile`.
        compile_config: Keras's configuration of `compile`; empty or None if the model is not compiled.
        objects: the user's classes and functions in the model, by the names that Keras uses for them.
        training: arguments of `compile`, without objects of the user's classes.
        trained_layers: name and `trainable` of each layer at any depth; empty if all are trainable.
        trained_weights: path and `trainable` of each weight; empty if all follow from their layers.
    """

    name: str
    config: dict[str, Any]
    compile_config: dict[str, Any] | None
    objects: Mapping[str, Any]
    training: TrainingSettings
    trained_layers: tuple[tuple[str, bool], ...] = ()
    trained_weights: tuple[tuple[str, bool], ...] = ()

    def built(self, dtype_policy: str | None = None) -> Any:
        """Build the model, optionally with another dtype policy.

        Raises:
            NotRebuiltError: If the configuration does not build the whole model.
        """
        vocabulary.register_own_classes(self.config)
        try:
            config = self.config if dtype_policy is None else vocabulary.with_dtype_policy(self.config, dtype_policy)
            copy = _deserialize(config, self.objects, trust=True)  # an object of the user's program
        except Exception as error:
            raise _not_rebuilt(self.name, error) from error
        self._freeze(copy)
        return copy

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
    """Describe a Keras model without its weights.

    Raises:
        UsageError: If the model is not built, or has no configuration.
    """
    check_built(model)
    try:
        config = vocabulary.configuration(model)
    except Exception as error:
        raise _not_rebuilt(model.name, error) from error
    compiled = config.pop("compile_config", None)
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
        training_of_copy(model, training_of_model(model), is_sent=True),
        trained_layers=() if all(is_trained for _, is_trained in flags) else flags,
        trained_weights=() if follow else tuple((weight.path, bool(weight.trainable)) for weight in model.weights),
    )


def _not_rebuilt(name: str, error: Exception) -> NotRebuiltError:
    return NotRebuiltError(
        f"model {name!r} cannot be rebuilt from its configuration ({keras_reason(error)}); "
        "pass a function that builds it"
    )
