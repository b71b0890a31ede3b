"""Any model a user has → a Keras model without weights."""

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
from kerasmem.models import vocabulary
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
    """A Keras model ready to be asked for its shapes.

    Attributes:
        model: the Keras model; its variables have shapes and, unless it came from Python, no values.
        source: its origin: a path, "package.module:function" or "Python object".
        training: the optimizer and loss it was compiled with, if known.
        notes: remarks for the user on how it was opened.
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
    """Open a model for as long as the context lasts, without allocating its weights.

    Args:
        source: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function" (or "file.py:function"),
            a function that returns a model or the step function of a training loop (alone, or behind what it uses in a
            tuple), or a Keras model (used as it is).
        factory: code that builds the model, if the file does not say how (weights only).
        factory_args: keyword arguments for the function that builds the model. Functions of Keras
            (`keras.applications:VGG16`) are given `weights=None`: no weights are downloaded.
        custom_objects: name to class or function, for names in a file that are not Keras's.
        trust: allow serialised Python in the file to run.
        dtype_policy: build with this policy ("mixed_float16") in place of the model's float32.
        shapes_only: make a copy without weights of a Keras model too, so that its training can be prepared without
            touching it.

    Raises:
        ModelFileError: If the file cannot be opened as a model; the subclasses say why.
        ModelError: If the code that builds the model failed.
        UsageError: `source` is none of these.
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
                note = f"the architecture comes from {factory}, not from {name}"
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
                f"a {kind} is no model; give a path, 'package.module:function', a function or a Keras 3 model"
            )


def _open_document(
    document: ModelDocument, custom_objects: Mapping[str, Any] | None, trust: bool, dtype_policy: str | None
) -> OpenedModel:
    keras = import_keras()
    where = os.fspath(document.path)
    try:
        model = _build(document, custom_objects, trust, dtype_policy)
        training = training_of_document(document)
    except ModelFileError as error:
        raise type(error)(f"{where}: {error}") from error
    except KerasmemError:
        raise
    except RecursionError as error:
        raise ModelFileError(f"{where}: the configuration is nested too deeply to be a model") from error
    except Exception as error:
        raise ModelFileError(f"{where}: Keras cannot build the model it describes: {keras_reason(error)}") from error
    if not isinstance(model, keras.Model):
        raise ModelFileError(f"{where}: describes a {type(model).__name__}, not a model")
    return OpenedModel(model, where, training)


def _build(
    document: ModelDocument, custom_objects: Mapping[str, Any] | None, trust: bool, dtype_policy: str | None
) -> Any:
    """Translate a configuration, check it and hand it to Keras."""
    vocabulary.register_own_classes(document.config)
    objects = vocabulary.with_registered(custom_objects)
    config: Any = {key: value for key, value in document.config.items() if key not in _BESIDE_THE_MODEL}
    if is_keras2(document.keras_version, config):
        config = Keras2Translator(objects).value(config)
    config = _with_modules(config, objects)
    if not trust:
        vocabulary.check_trust(config)  # of what will be built, after translation
    vocabulary.check_names(config, objects)
    vocabulary.check_graph(config)
    if dtype_policy is not None:
        config = _with_dtype_policy(config, dtype_policy)
    return _deserialize(config, objects, trust)


def _deserialize(config: dict[str, Any], objects: Mapping[str, Any], trust: bool) -> Any:
    """Let Keras build what a configuration describes, without its advice on how to write models."""
    with warnings.catch_warnings(), safe_mode(not trust):  # also if it is switched off globally
        warnings.simplefilter("ignore")
        config = deepcopy(config)  # Keras takes parts out of it
        return import_keras().saving.deserialize_keras_object(config, custom_objects=objects, safe_mode=not trust)


def _with_modules(value: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Add the module to objects of Keras that older formats name by their class alone."""
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
        result["config"] = {**result["config"], "unroll": False}  # the same model, without a call for each time step
    return result


def _find_factory(text: str, option: str) -> Callable[..., Any]:
    check_factory_name(text, option)
    module_name, _, function = text.rpartition(":")
    names = vocabulary.import_user_module(module_name, option)
    build: Callable[..., Any] | None = names.get(function)
    if not callable(build):
        hint = nearest(function, sorted(names, reverse=True))  # ResNet50 rather than the module resnet50
        raise UsageError(f"{option} {text!r}: {module_name} has no function {function!r}{hint}")
    return build


def _open_factory(
    build: Callable[..., Any], source: str, arguments: Mapping[str, Any] | None, dtype_policy: str | None
) -> OpenedModel:
    keras = import_keras()
    before = keras.config.dtype_policy()
    arguments = dict(arguments or {})
    if str(getattr(build, "__module__", "")).startswith("keras.") and "weights" in inspect.signature(build).parameters:
        arguments.setdefault("weights", None)  # else Keras downloads them
    try:
        if dtype_policy is not None:
            keras.config.set_dtype_policy(dtype_policy)
        model = _call_factory(build, arguments)
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(
            f"{source} failed to build the model: {type(error).__name__}: {keras_reason(error)}"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)
    if not isinstance(model, keras.Model):
        returned, model = model, as_loop(model)
        if model is None:
            kind = type(returned).__name__
            raise ModelError(f"{source} returned a {kind}, neither a Keras model nor a step function")
    return OpenedModel(model, source, training_of_model(model))


def _call_factory(build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the function's result, with layers named as in a new process.

    TensorFlow orders operations by their names, so dense_9 and dense_10 would change places from one call to another.
    """
    try:
        with names_restarted():
            return build(**arguments)
    except KerasmemError:
        raise
    except ValueError:  # the model may contain an older layer of the same name
        return build(**arguments)


def check_built(model: Any) -> None:
    """Refuse a live model that does not know its shapes yet.

    Raises:
        UsageError: If it does not.
    """
    if not model.built and not isinstance(model, import_keras().Sequential):
        raise UsageError(
            f"model {model.name!r} is not built yet, and building it would allocate its weights: call it once on a "
            "batch, or give the class or function that makes it in place of the model"
        )


def _with_dtype_policy(config: dict[str, Any], name: str) -> Any:
    """Replace float32, Keras's default dtype policy, in a Keras 3 configuration; inputs keep their dtype.

    Raises:
        UsageError: If Keras has no such policy, such as "mixed_float16".
    """
    try:
        policy = import_keras().dtype_policies.get(name)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"dtype policy {name!r} is not one of Keras's: float32, mixed_float16, mixed_bfloat16, …"
        ) from error
    if getattr(policy, "quantization_mode", None) is not None:
        raise UsageError(f"dtype policy {name!r} quantises: call model.quantize(…) and give the model or its file")
    return _replace_policy(config, name)


def _replace_policy(value: Any, policy: str) -> Any:
    if isinstance(value, list):
        return [_replace_policy(item, policy) for item in value]
    if not isinstance(value, dict) or value.get("class_name") in ("InputLayer", "__keras_tensor__"):
        return value
    replaced = {key: _replace_policy(item, policy) for key, item in value.items()}
    dtype = replaced.get("dtype")
    if isinstance(dtype, dict) and isinstance(dtype.get("config"), dict):
        dtype = dtype["config"].get("name")
    if dtype == "float32" and "name" in replaced:
        replaced["dtype"] = policy
    return replaced


class NotRebuiltError(UsageError):
    """A live model cannot be built again from its configuration."""


@dataclass(frozen=True)
class PackedModel:
    """A Keras model without its weights, to be built again here or, sent by cloudpickle, in another process.

    Attributes:
        name: of the model.
        config: its configuration, without that of `compile`.
        compile_config: the settings of `compile` as Keras writes them; empty or None if the model is not compiled.
        objects: its classes and functions that are not Keras's, by the names Keras looks for them under.
        training: its optimizer, loss and metrics, without those of the user's classes.
        trained_layers: whether a layer is trained, with its name, for each at any depth; empty if all are.
        trained_weights: likewise for each weight; empty if it follows from the layers.
    """

    name: str
    config: dict[str, Any]
    compile_config: dict[str, Any] | None
    objects: Mapping[str, Any]
    training: TrainingSettings
    trained_layers: tuple[tuple[str, bool], ...] = ()
    trained_weights: tuple[tuple[str, bool], ...] = ()

    def built(self, dtype_policy: str | None = None) -> Any:
        """Build the model, with another policy if one is given.

        Raises:
            NotRebuiltError: If the configuration does not build all of it.
        """
        vocabulary.register_own_classes(self.config)
        try:
            config = self.config if dtype_policy is None else _with_dtype_policy(self.config, dtype_policy)
            copy = _deserialize(config, self.objects, trust=True)  # the user's own live object
        except Exception as error:
            raise _not_rebuilt(self.name, error) from error
        self._freeze(copy)
        return copy

    def _freeze(self, copy: Any) -> None:
        """Copy the `trainable` flags of layers and weights to a copy."""
        layers = [(layer.name, layer) for layer in flatten_layers(copy)]
        weights = [(weight.path, weight) for weight in copy.weights]
        for parts, flags in ((layers, self.trained_layers), (weights, self.trained_weights)):
            if flags and len(parts) != len(flags):
                missing = [name for name, _ in flags if name not in dict(parts)][:3]
                raise NotRebuiltError(
                    f"model {copy.name!r} is frozen in part, and its configuration does not build all of it "
                    f"({', '.join(missing)}); only a function that builds the model (in Python, or module:function) "
                    "does"
                )
            for (_, part), (_, flag) in zip(parts, flags, strict=False):  # outer layers first: they set those inside
                if part.trainable != flag:
                    part.trainable = flag


def pack_model(model: Any) -> PackedModel:
    """Describe a live model without its weights.

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
    objects = {name: value for name, value in vocabulary.own_objects(model).items() if repr(name) in text}
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
        "give a function that builds it in place of the model"
    )
