"""Arguments of `compile`, from a file, an object or the user, and compiling with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.checks import nearest
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_training import user_loss_weights, user_metrics
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.document import ModelDocument
from kerasmem.models.inputs import TargetSettings
from kerasmem.models.own_step import has_own_step, takes_settings
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.weightless import weightless


@dataclass(frozen=True)
class TrainingSettings:
    """Arguments of `compile`.

    Attributes:
        optimizer: class name of the optimizer in lower case ("adam"), or None if the model was not compiled.
        optimizer_config: configuration of the optimizer. Defaults to Keras's defaults.
        loss: name of the loss, or None.
        loss_config: the loss in a file (a name, a configuration, a list or dict of these), or the user's name.
        metrics_config: the metrics in a file.
        loss_weights: weights of several losses, a list or dict; None if all are 1.
        keeps_optimizer: whether the user's code compiled the model, and its optimizer is used.
        keeps_loss: whether the user's code compiled the model, and its loss and metrics are used.
        targets: the user's settings of the targets.
    """

    optimizer: str | None = None
    optimizer_config: dict[str, Any] | None = None
    loss: str | None = None
    loss_config: Any = None
    metrics_config: Any = None
    loss_weights: Any = None
    keeps_optimizer: bool = False
    keeps_loss: bool = False
    targets: TargetSettings = field(default_factory=TargetSettings)


def training_of_document(document: ModelDocument) -> TrainingSettings:
    """Return the settings in a file, without unreadable ones."""
    training = document.training or {}
    stored = training.get("optimizer_config", training.get("optimizer"))
    name, config = None, None
    if isinstance(stored, str):
        name = stored
    elif isinstance(stored, dict) and isinstance(stored.get("class_name"), str):
        name = stored["class_name"].rpartition(">")[2]
        config = stored["config"] if isinstance(stored.get("config"), dict) else None
    return TrainingSettings(
        name.lower() if name else None, config, _name_of(training.get("loss")), training.get("loss"),
        training.get("metrics"), training.get("loss_weights"),
    )  # fmt: skip


def training_of_model(model: Any) -> TrainingSettings:
    """Return the settings of a Keras model."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        own = bool(getattr(model, "compiled", False))  # its step updates the weights itself
        return TrainingSettings(keeps_optimizer=own, keeps_loss=own)
    try:
        config = optimizer.get_config()
    except NotImplementedError:
        config = None
    loss = _name_of(getattr(model, "loss", None))
    return TrainingSettings(
        type(optimizer).__name__.lower(), config, loss, loss_weights=user_loss_weights(model), keeps_optimizer=True,
        keeps_loss=True,
    )  # fmt: skip


def training_of_copy(model: Any, own: TrainingSettings, *, is_sent: bool = False) -> TrainingSettings:
    """Return the settings for a copy of a Keras model, with configurations of its metrics.

    Args:
        model: the model.
        own: the model's settings.
        is_sent: whether the copy is for another process, and needs configurations of losses too.
    """
    keras = import_keras()
    kinds = (keras.Metric, keras.Loss) if is_sent else keras.Metric

    def to_config(part: Any) -> Any:
        return keras.saving.serialize_keras_object(part) if isinstance(part, kinds) else part

    loss, metrics = keras.tree.map_structure(to_config, (getattr(model, "loss", None), user_metrics(model)))
    return replace(own, loss_config=loss, metrics_config=metrics, keeps_optimizer=False, keeps_loss=False)


def with_replaced(
    own: TrainingSettings, optimizer: str | None, loss: str | None, targets: TargetSettings
) -> TrainingSettings:
    """Replace the model's settings by those of the user.

    Raises:
        UsageError: If Keras does not know the optimizer or loss.
    """
    own = replace(own, targets=targets)
    if loss is not None:
        check_loss(loss)
    if optimizer is not None:
        _optimizer_class(optimizer.lower())
    if optimizer is not None and optimizer.lower() != own.optimizer:
        own = replace(own, optimizer=optimizer.lower(), optimizer_config=None, keeps_optimizer=False)
    return own if loss is None else replace(own, loss=loss, loss_config=loss, loss_weights=None, keeps_loss=False)


def _name_of(loss: Any) -> str | None:
    if isinstance(loss, str) or loss is None:
        return loss
    if isinstance(loss, (list, tuple)):
        return ", ".join(str(_name_of(item)) for item in loss)
    if not isinstance(loss, dict):
        return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))
    inner = loss.get("config")
    if isinstance(inner, dict):
        return str(inner.get("name") or loss.get("class_name"))
    return inner if isinstance(inner, str) else ", ".join(f"{key}: {_name_of(value)}" for key, value in loss.items())


def check_loss(name: str) -> None:
    """Refuse the name of an unknown loss.

    Raises:
        UsageError: If the loss is unknown to Keras and not registered.
    """
    losses = import_keras().losses
    if _restore(losses, losses.Loss, name) is None:
        known = [key for key in vars(losses) if key == key.lower() and not key.startswith("_")]
        hint = nearest(name, known) or "; register your own with keras.saving.register_keras_serializable"
        raise UsageError(f"loss must be one of Keras's; got {name!r}{hint}")


def optimizer_slot_bytes(settings: TrainingSettings, variables: list[Any]) -> int | None:
    """Return the bytes of an optimizer's variables (moments, accumulators, counters).

    Args:
        settings: the optimizer and its configuration. Unknown settings are ignored.
        variables: the trainable variables of the model, with or without values.

    Returns:
        The bytes, or None if the optimizer is unknown or not Keras's.
    """
    if settings.optimizer is None:
        return None
    try:
        with weightless():
            optimizer = make_optimizer(settings.optimizer, settings.optimizer_config or {})
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
        raise ValueError("exclude_layers")
    known = cls().get_config()
    settings = {key: value for key, value in config.items() if key in known and key != "learning_rate"}
    if isinstance(config.get("learning_rate"), dict):  # a schedule, possibly custom, which has no variable
        settings["learning_rate"] = lambda: 0.001
    return cls.from_config(settings)


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


ASSUMED_OPTIMIZER = "adam"


def compile_model(
    model: Any, training: TrainingSettings, outputs: Callable[[], Any], jit_compile: bool
) -> tuple[str, ...]:
    """Compile the model in place, and return the assumptions.

    A model that the user's code compiled keeps its arguments unless `training` replaces them. An unknown loss is
    assumed from the last activation.

    Args:
        model: a Keras model.
        training: the settings.
        outputs: function that returns the model's symbolic outputs.
        jit_compile: whether XLA compiles the step.

    Raises:
        ModelError: If Keras refuses these settings.
    """
    notes: list[str] = []
    keras = import_keras()
    try:
        own = bool(getattr(model, "compiled", False))
        if own and training.keeps_optimizer:
            optimizer = model.optimizer
        else:
            name = training.optimizer or ASSUMED_OPTIMIZER
            optimizer = make_optimizer(name, training.optimizer_config or {})
            if training.optimizer is None:
                notes.append(f"no optimizer is stored with the model: optimizer {name} is assumed")
        loss, weights, metrics = None, None, None
        if own and training.keeps_loss:
            loss, weights, metrics = model.loss, user_loss_weights(model), user_metrics(model)
        elif training.loss_config is not None:
            loss, weights = _restore(keras.losses, keras.Loss, training.loss_config), training.loss_weights
            metrics = _metrics(training.metrics_config, len(keras.tree.flatten(outputs())))
        if None in keras.tree.flatten(loss) and not own and not has_own_step(model):
            loss = _assumed_loss(model, outputs())
            notes.append(f"the loss is unknown: {loss} is assumed from the outputs")
        if own and training.keeps_optimizer and training.keeps_loss:
            model.jit_compile = jit_compile
        elif not takes_settings(model):
            raise UsageError(
                f"the compile() of model {model.name!r} has other arguments than Keras's; set the optimizer and the "
                "loss in the function that builds the model"
            )
        else:
            model.compile(
                optimizer=optimizer, loss=loss, loss_weights=weights, metrics=metrics or None, jit_compile=jit_compile
            )
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be compiled for training: {keras_reason(error)}") from error
    return tuple(notes)


def sparse_losses(loss: Any, outputs: Any) -> list[bool]:
    """Return for each flat output whether its loss takes class numbers."""
    keras = import_keras()
    flat = keras.tree.flatten(outputs)
    if isinstance(loss, dict):
        keys = list(outputs) if isinstance(outputs, dict) else list(loss)
        losses = [loss.get(key) for key in keys]
    elif isinstance(loss, (list, tuple)):
        losses = list(loss)
    else:
        losses = [loss] * len(flat)
    losses += [None] * (len(flat) - len(losses))
    return ["sparse" in f"{_name_of(item)} {type(item).__name__}".lower() for item in losses]


def _metrics(config: Any, outputs: int) -> Any:
    """Create Keras's metrics in a configuration: a list, or a list or dict with the metrics of each output."""
    if isinstance(config, dict) and not isinstance(config.get("class_name"), str):
        return {key: _metrics(value, 1) for key, value in config.items()}
    if not isinstance(config, (list, tuple)):
        return _restore(import_keras().metrics, import_keras().Metric, config)
    metrics = [_metrics(item, 1) for item in config]
    return metrics if len(metrics) == outputs > 1 else [metric for metric in metrics if metric is not None]


def _restore(module: Any, kind: type, config: Any) -> Any:
    """Create losses or metrics from a name, a configuration, an object or a structure of these.

    They are None if they are not Keras's.

    Args:
        module: `keras.losses` or `keras.metrics`.
        kind: `Loss` or `Metric`.
        config: loss or metric in a file or a model.
    """
    if isinstance(config, (list, tuple)):
        return [_restore(module, kind, item) for item in config]
    if isinstance(config, dict) and not isinstance(config.get("class_name"), str):
        return {key: _restore(module, kind, value) for key, value in config.items()}
    inner: Any = config.get("config") if isinstance(config, dict) else None
    if isinstance(config, dict) and not isinstance(inner, dict):
        config = inner  # the name of a function
    if isinstance(config, str):
        try:
            return config if module.get(config) is not None else None
        except ValueError:
            return None
    if not isinstance(config, dict):
        return config if callable(config) else None
    cls: Any = getattr(module, str(config.get("class_name")).rpartition(">")[2], None)
    if not _is_kind(cls, kind):
        return None
    known = inspect.signature(cls).parameters.keys() - {"dtype", "fn", "reduction"}
    try:
        return cls(**{key: value for key, value in inner.items() if key in known})
    except (TypeError, ValueError):
        return None


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
