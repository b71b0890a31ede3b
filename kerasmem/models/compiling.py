"""Compile an opened model as it will be trained: its own settings, or those that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kerasmem.compat.keras_compile import user_loss_weights, user_metrics
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.own_step import has_own_step, takes_settings
from kerasmem.models.training import TrainingSettings, make_optimizer

ASSUMED_OPTIMIZER = "adam"


def compile_model(
    model: Any, training: TrainingSettings, outputs: Callable[[], Any], jit_compile: bool
) -> tuple[str, ...]:
    """Compile the model in place by its settings, and return the assumptions.

    A model that its own code compiled keeps what it was given there, but for what `training` replaces. If no loss
    is known one is assumed by the last activation.

    Args:
        model: a Keras model.
        training: the settings.
        outputs: returns the model's symbolic outputs, for losses that must be assumed.
        jit_compile: whether XLA compiles the step.

    Raises:
        ModelError: If Keras refuses these settings.
    """
    notes: list[str] = []
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
            loss, weights = _loss(training.loss_config), training.loss_weights
            metrics = _metrics(training.metrics_config, len(import_keras().tree.flatten(outputs())))
        if loss is None and not own and not has_own_step(model):
            loss = _assumed_loss(model, outputs())
            notes.append(f"no loss is given: {loss} is assumed, by the outputs")
        if own and training.keeps_optimizer and training.keeps_loss:
            model.jit_compile = jit_compile
        elif not takes_settings(model):
            raise UsageError(
                f"the compile() of model {model.name!r} takes arguments of its own: name the optimizer and the "
                "loss that it is to have in the function that builds it"
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
    """Return for each flat output whether its loss takes class numbers in place of one value an output."""
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
    return ["sparse" in _name(each) for each in losses]


def _name(loss: Any) -> str:
    found = loss if isinstance(loss, str) else (getattr(loss, "name", None) or getattr(loss, "__name__", ""))
    return str(found).lower() + type(loss).__name__.lower()


def _loss(config: Any) -> Any:
    """Return Keras's loss for a name or configuration, or None if it is not Keras's."""
    keras = import_keras()
    if isinstance(config, keras.losses.Loss) or callable(config):  # of a live model
        return config
    if isinstance(config, str):
        return config if _is_known(keras.losses, config) else None
    if isinstance(config, (list, tuple)):
        found = [_loss(each) for each in config]
        return None if any(each is None for each in found) else found
    if not isinstance(config, dict):
        return None
    if "class_name" not in config:
        named = {key: _loss(value) for key, value in config.items()}
        return None if any(each is None for each in named.values()) else named
    inner = config.get("config")
    if config["class_name"] == "function" or isinstance(inner, str):
        return _loss(inner) if isinstance(inner, str) else None
    cls = _class_of(keras.losses, keras.losses.Loss, config)
    if cls is None:
        return None
    known = ("from_logits", "label_smoothing", "ignore_class", "axis", "delta", "alpha", "gamma")
    return cls(**{key: inner[key] for key in known if isinstance(inner, dict) and key in inner})


def _is_known(module: Any, name: str) -> bool:
    try:
        return module.get(name) is not None
    except ValueError:
        return False


def _class_of(module: Any, base: Any, config: Mapping[str, Any]) -> Any:
    """Return Keras's class for a configuration, or None if it is not Keras's."""
    found = getattr(module, str(config.get("class_name")).rpartition(">")[2], None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _metrics(config: Any, outputs: int) -> Any:
    """Return the metrics in a configuration: one list, or one metric or list for each output, by place or by name.

    Those that are not Keras's are left out.
    """
    if isinstance(config, dict) and not isinstance(config.get("class_name"), str):
        return {key: _metrics(value, 1) for key, value in config.items()}
    if not isinstance(config, (list, tuple)):
        return _metric(config)
    found = [_metrics(each, 1) for each in config]
    return found if outputs > 1 and len(found) == outputs else [each for each in found if each is not None]


def _metric(config: Any) -> Any:
    keras = import_keras()
    is_function = isinstance(config, dict) and config.get("class_name") == "function"
    name = config.get("config") if is_function else config
    if isinstance(name, str):
        return name if _is_known(keras.metrics, name) else None
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        return config if callable(config) else None  # a function of a live model
    cls = _class_of(keras.metrics, keras.metrics.Metric, config)
    try:
        return cls and cls(**{key: value for key, value in config["config"].items() if key not in ("dtype", "fn")})
    except (TypeError, ValueError):
        return None


def _assumed_loss(model: Any, outputs: Any) -> Any:
    """Return the usual loss for the last activation: the size of the labels is the same for most others."""
    flat = import_keras().tree.flatten(outputs)
    activation = None
    for layer in flatten_layers(model, include_self=False):
        activation = getattr(layer, "activation", None) or activation
    name = getattr(activation, "__name__", "")
    if len(flat) == 1 and name == "softmax":
        return "sparse_categorical_crossentropy"
    return "binary_crossentropy" if len(flat) == 1 and name == "sigmoid" else "mean_squared_error"
