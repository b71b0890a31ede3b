"""How a step is compiled: the model's own `compile`, that of a file, and the user's replacements."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasmem.checks import nearest
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_state import safe_mode
from kerasmem.compat.keras_training import compile_arguments
from kerasmem.errors import KerasmemError, ModelError, ModelFileError, UnknownLayerError, UsageError
from kerasmem.models import vocabulary
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.data import Batch
from kerasmem.models.inputs import TargetSettings
from kerasmem.models.own_step import has_own_compile_config, has_own_step, takes_settings
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.weightless import weightless

ASSUMED_OPTIMIZER = "adam"
_METRICS = ("metrics", "weighted_metrics")
_OTHER_ARGUMENTS = ("loss_weights", "run_eagerly", "steps_per_execution", "auto_scale_loss")


@dataclass(frozen=True)
class TrainingSettings:
    """The user's replacements of arguments of `compile`, and the user's data.

    Attributes:
        optimizer: class name of an optimizer of Keras in lower case ("adam"), or None for the model's.
        optimizer_config: configuration of that optimizer. Defaults to Keras's defaults.
        loss: name of a loss, or None for the model's.
        targets: settings of the targets and sample weights.
        batch: a batch of the user's data, which decides on inputs, targets and sample weights; or None.
    """

    optimizer: str | None = None
    optimizer_config: dict[str, Any] | None = None
    loss: str | None = None
    targets: TargetSettings = field(default_factory=TargetSettings)
    batch: Batch | None = None


def training_settings(
    optimizer: str | None, loss: str | None, targets: TargetSettings, batch: Batch | None
) -> TrainingSettings:
    """Check the user's settings of the training.

    Raises:
        UsageError: If Keras does not know the optimizer or loss.
    """
    if loss is not None:
        check_loss(loss)
    if optimizer is not None:
        _optimizer_class(optimizer.lower())
    return TrainingSettings(None if optimizer is None else optimizer.lower(), None, loss, targets, batch)


def optimizer_name(model: Any) -> str | None:
    """Return the class name of a model's optimizer in lower case, or None if it is not compiled."""
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else type(optimizer).__name__.lower()


def loss_name(model: Any) -> str | None:
    """Return the name of a model's loss, or None."""
    return _name_of(getattr(model, "loss", None))


def _name_of(loss: Any) -> str | None:
    if isinstance(loss, str) or loss is None:
        return loss
    if isinstance(loss, (list, tuple)):
        return ", ".join(str(_name_of(item)) for item in loss)
    if isinstance(loss, Mapping):
        return ", ".join(f"{key}: {_name_of(value)}" for key, value in loss.items())
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


def check_loss(name: str) -> None:
    """Refuse the name of an unknown loss.

    Raises:
        UsageError: If the loss is unknown to Keras and not registered.
    """
    losses = import_keras().losses
    try:
        losses.get(name)
    except ValueError:
        known = [key for key in vars(losses) if key == key.lower() and not key.startswith("_")]
        hint = nearest(name, known) or "; register your own with keras.saving.register_keras_serializable"
        raise UsageError(f"loss must be one of Keras's; got {name!r}{hint}") from None


def optimizer_slot_bytes(optimizer: Any, variables: list[Any]) -> int | None:
    """Return the bytes of an optimizer's variables (moments, accumulators, counters), without changing it.

    Args:
        optimizer: an optimizer of Keras or the user, or None.
        variables: the trainable variables of the model, with or without values.

    Returns:
        The bytes, or None without an optimizer, or if it cannot be copied.
    """
    if optimizer is None:
        return None
    try:
        with weightless():
            if not optimizer.built:
                optimizer = type(optimizer).from_config(optimizer.get_config())
                optimizer.build(variables)
            return sum(variable_bytes(variable) for variable in optimizer.variables)
    except Exception:  # a custom or misconfigured optimizer has an unknown size
        return None


def make_optimizer(name: str, config: dict[str, Any]) -> Any:
    """Create an optimizer of Keras from its name and configuration. Unknown settings are ignored.

    Raises:
        UsageError: If Keras does not know the optimizer.
        ValueError: If a setting must not be read from files.
    """
    cls = _optimizer_class(name)
    if "inner_optimizer" in config:  # LossScaleOptimizer
        inner = config["inner_optimizer"]
        return cls(make_optimizer(inner["class_name"].rpartition(">")[2].lower(), inner["config"]))
    if config.get("exclude_layers"):  # patterns of Muon, which could be slow to match if a file provides them
        raise ValueError("exclude_layers has patterns, which are not read from files")
    known = cls().get_config()
    return cls.from_config({key: value for key, value in config.items() if key in known})


def _optimizer_class(name: str) -> Any:
    """Return the optimizer class of Keras with this name in lower case.

    Raises:
        UsageError: If the class does not exist.
    """
    optimizers = import_keras().optimizers
    classes = {key.lower(): value for key, value in vars(optimizers).items() if _is_kind(value, optimizers.Optimizer)}
    known = sorted(classes.keys() - {"optimizer"})
    if name not in known:
        raise UsageError(f"optimizer must be one of {', '.join(known)}; got {name!r}{nearest(name, known)}")
    return classes[name]


def compile_model(model: Any, training: TrainingSettings, outputs: Callable[[], Any]) -> tuple[str, ...]:
    """Compile the model in place with the user's replacements, and return the assumptions.

    A compiled model keeps its own objects. Without `compile` the optimizer is Adam, and the loss follows from the last
    activation.

    Args:
        model: a Keras model.
        training: the replacements.
        outputs: function that returns the model's symbolic outputs.

    Raises:
        UsageError: If the model's `compile` does not take these arguments.
        ModelError: If Keras refuses them.
    """
    assumptions: list[str] = []
    is_own = bool(getattr(model, "compiled", False))
    try:
        changes: dict[str, Any] = {}
        config = training.optimizer_config
        if training.optimizer is not None and (config is not None or training.optimizer != optimizer_name(model)):
            changes["optimizer"] = make_optimizer(training.optimizer, config or {})
        elif not is_own:
            changes["optimizer"] = make_optimizer(ASSUMED_OPTIMIZER, {})
            assumptions.append(f"optimizer {ASSUMED_OPTIMIZER}")
        if training.loss is not None and training.loss != model.loss if is_own else training.loss is not None:
            changes.update(loss=training.loss, loss_weights=None)
        elif not is_own and not has_own_step(model):
            changes["loss"] = _assumed_loss(model, outputs())
            assumptions.append(f"loss {changes['loss']}")
        if changes and not takes_settings(model):
            raise UsageError(
                f"the compile() of model {model.name!r} has other arguments than Keras's; set the optimizer and the "
                "loss in the function that builds the model"
            )
        if changes:
            model.compile(**{**(compile_arguments(model) if is_own else {}), **changes})
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be compiled for training: {keras_reason(error)}") from error
    if not assumptions:
        return ()
    return (
        f"the model is not compiled: {' and '.join(assumptions)} {'is' if len(assumptions) == 1 else 'are'} assumed",
    )


def compile_from_file(
    model: Any, stored: Mapping[str, Any], objects: Mapping[str, Any], trust: bool, training: TrainingSettings
) -> tuple[str, ...]:
    """Compile the model of a file as the file describes, and return the caveats.

    Parts that the user replaces are not read. If the user replaces the loss, unknown metrics are left out.

    Args:
        model: the model.
        stored: the configuration of `compile` in the file, of Keras 2 or 3.
        objects: the user's classes and functions by name.
        trust: whether serialised Python code may run.
        training: the user's replacements.

    Raises:
        UnknownLayerError: If the file names an optimizer, loss or metric that Keras and `objects` lack.
        UntrustedModelError: If the file contains code.
        ModelFileError: If a part cannot be read.
    """
    if has_own_compile_config(model):
        return _compile_by_class(model, stored, objects, trust)
    parts = {key: stored[key] for key in ("loss", *_METRICS) if stored.get(key)}
    parts["optimizer"] = training.optimizer or stored.get("optimizer_config", stored.get("optimizer"))
    others = {key: stored[key] for key in _OTHER_ARGUMENTS if stored.get(key) is not None}
    if training.loss is not None:
        parts["loss"] = training.loss
        others.pop("loss_weights", None)
    if parts["optimizer"] is None:
        return ()  # a model without an optimizer was saved
    if not takes_settings(model):
        raise ModelFileError(
            f"the compile() of {type(model).__name__} has other arguments than Keras's; pass a function that builds "
            "and compiles the model (--factory package.module:function)"
        )
    if not trust:
        vocabulary.check_trust(parts)
    with safe_mode(not trust):  # overrides a global setting
        read, caveats = _read_parts(parts, objects, trust, lenient=training.loss is not None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the style of model code
            model.compile(**read, **others)
    except Exception as error:
        raise _not_compiled(error) from error
    return caveats


def _not_compiled(error: Exception) -> ModelFileError:
    return ModelFileError(f"the model cannot be compiled as it was saved: {keras_reason(error)}")


def _read_parts(
    parts: Mapping[str, Any], objects: Mapping[str, Any], trust: bool, lenient: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Create the optimizer, losses and metrics of a file, and return caveats.

    Args:
        parts: their configurations by argument of `compile`.
        objects: the user's classes and functions by name.
        trust: whether serialised Python code may run.
        lenient: whether unknown metrics are left out.
    """
    keras = import_keras()
    bases: dict[str, Any] = {"optimizer": keras.Optimizer, "loss": keras.Loss}
    read: dict[str, Any] = {}
    caveats: list[str] = []
    for name, part in parts.items():
        words = name.replace("_", " ")
        try:
            read[name] = _Reader(bases.get(name, keras.Metric), objects, trust).read(part)
        except UnknownLayerError as error:
            if name in bases or not lenient:
                fix = f"--{name} NAME takes another one" if name in bases else "--loss NAME replaces loss and metrics"
                raise UnknownLayerError(f"the {words} of its compile() {error}; {fix}") from error
            names = str(error).partition(";")[0].rpartition(": ")[2]
            caveats.append(f"the {words} of the file are left out, as their code is missing: {names}")
        except (KerasmemError, RecursionError):
            raise
        except Exception as error:
            raise ModelFileError(f"the {words} of its compile() cannot be read: {keras_reason(error)}") from error
    return read, tuple(caveats)


def _compile_by_class(
    model: Any, stored: Mapping[str, Any], objects: Mapping[str, Any], trust: bool
) -> tuple[str, ...]:
    """Compile a model by its class's `compile_from_config`."""
    if not trust:
        vocabulary.check_trust(dict(stored))
    vocabulary.check_names(dict(stored), objects)
    try:
        with import_keras().saving.custom_object_scope(objects), safe_mode(not trust):
            model.compile_from_config(stored)
    except Exception as error:
        raise _not_compiled(error) from error
    return ()


_SHORT_NAMES = ("accuracy", "acc", "crossentropy", "ce")  # `compile` chooses the function by the outputs


@dataclass(frozen=True)
class _Reader:
    """Reads optimizers, losses or metrics from their configuration in a file.

    Attributes:
        base: the class `Optimizer`, `Loss` or `Metric`.
        objects: the user's classes and functions by name.
        trust: whether serialised Python code may run.
    """

    base: type
    objects: Mapping[str, Any]
    trust: bool

    def read(self, config: Any) -> Any:
        """Create an object, or a list or dictionary of objects.

        Raises:
            UnknownLayerError: If neither Keras nor the user defines it.
        """
        if isinstance(config, (list, tuple)):
            return [self.read(item) for item in config]
        if isinstance(config, str):
            return self._named(config)
        if not isinstance(config, dict):
            return config
        class_name, inner = config.get("class_name"), config.get("config")
        if not isinstance(class_name, str):
            return {key: self.read(value) for key, value in config.items()}
        return self._object(config, class_name, inner) if isinstance(inner, dict) else self._named(str(inner))

    def _object(self, config: dict[str, Any], class_name: str, inner: dict[str, Any]) -> Any:
        """Create an object from its class name and settings."""
        keras, own, name = import_keras(), self._own(class_name), class_name.rpartition(">")[2]
        if own is None and class_name.startswith("Custom>"):  # as Keras 2 names its own optimizers
            config = {**config, "class_name": name}
        objects = self.objects if own is None else {**self.objects, class_name: own}
        vocabulary.check_names(config, objects)
        if "module" in config and (own is not None or self.base is not keras.Optimizer):
            return keras.saving.deserialize_keras_object(config, objects, safe_mode=not self.trust)
        if own is not None:
            return own.from_config(inner)
        modules = {keras.Optimizer: keras.optimizers, keras.Loss: keras.losses}
        cls: Any = getattr(modules.get(self.base, keras.metrics), name, None)
        if not _is_kind(cls, self.base):
            raise ValueError(f"{class_name} is no {self.base.__name__.lower()}")
        if self.base is keras.Optimizer:
            rate: Any = 0.001  # a number needs no memory, whatever its value
            if isinstance(inner.get("learning_rate"), dict):
                rate = keras.optimizers.schedules.deserialize(inner["learning_rate"], objects)
            return make_optimizer(name.lower(), {**inner, "learning_rate": rate})
        # Keras 2 had other arguments, and another default for `reduction`.
        known = inspect.signature(cls).parameters
        left_out = {"dtype", "reduction"} if inner.get("reduction") == "auto" else {"dtype"}
        return cls.from_config({key: value for key, value in inner.items() if key in known and key not in left_out})

    def _own(self, name: str) -> Any:
        """Return the user's class or function with this name or registered name, or None."""
        short = name.rpartition(">")[2]
        return next((value for key, value in self.objects.items() if key.rpartition(">")[2] == short), None)

    def _named(self, name: str) -> Any:
        keras, own = import_keras(), self._own(name)
        if own is not None:
            return own() if _is_kind(own, self.base) else own
        modules = {keras.Optimizer: keras.optimizers, keras.Loss: keras.losses}
        try:
            if name not in _SHORT_NAMES:
                modules.get(self.base, keras.metrics).get(name)
        except (ValueError, TypeError):
            vocabulary.check_names({"class_name": "function", "config": f"{name}"}, {})
            raise
        return name


def sparse_losses(loss: Any, outputs: Any, names: Sequence[str] | None = None) -> list[bool]:
    """Return for each flat output whether its loss takes class numbers, given the names of the outputs."""
    flat = import_keras().tree.flatten(outputs)
    if isinstance(loss, Mapping):
        losses = [loss.get(key) for key in (outputs if isinstance(outputs, dict) else names or loss)]
    elif isinstance(loss, (list, tuple)):
        losses = list(loss)
    else:
        losses = [loss] * len(flat)
    losses += [None] * (len(flat) - len(losses))
    return ["sparse" in f"{_name_of(item)} {type(item).__name__}".lower() for item in losses]


def _is_kind(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _assumed_loss(model: Any, outputs: Any) -> Any:
    """Return the usual loss for the last activation. Most other losses have labels of the same size."""
    flat = import_keras().tree.flatten(outputs)
    activation = None
    for layer in flatten_layers(model, include_self=False):
        activation = getattr(layer, "activation", None) or activation
    name = getattr(activation, "__name__", "")
    if len(flat) == 1 and name == "softmax":
        return "sparse_categorical_crossentropy"
    return "binary_crossentropy" if len(flat) == 1 and name == "sigmoid" else "mean_squared_error"
