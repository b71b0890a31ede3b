"""How the model will be trained, as far as the file or the object says: optimizer and loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kerasmem.checks import nearest
from kerasmem.compat.keras_compile import user_loss_weights, user_metrics
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras
from kerasmem.models.document import ModelDocument
from kerasmem.models.inputs import BY_THE_LOSS, GivenTargets
from kerasmem.models.names import check_optimizer_name
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.weightless import weightless


@dataclass(frozen=True)
class TrainingSettings:
    """Arguments of `compile`.

    Attributes:
        optimizer: its class name in lower case ("adam"), or None if the model was not compiled.
        optimizer_config: the optimizer's configuration; None means its defaults.
        loss: the loss's name, or None.
        loss_config: the loss as a file has it (a name, a configuration, a list or dict of them), or a name given.
        metrics_config: the metrics as a file has them.
        loss_weights: of several losses, by place or by name; None if all count alike.
        keeps_optimizer: the model was compiled by its own code, and its optimizer stands.
        keeps_loss: likewise its loss and metrics.
        targets: the user's settings of them.
    """

    optimizer: str | None = None
    optimizer_config: dict[str, Any] | None = None
    loss: str | None = None
    loss_config: Any = None
    metrics_config: Any = None
    loss_weights: Any = None
    keeps_optimizer: bool = False
    keeps_loss: bool = False
    targets: GivenTargets = BY_THE_LOSS


def training_of_document(document: ModelDocument) -> TrainingSettings:
    """Return the settings in a file, without those that cannot be read."""
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
    """Return the settings of a live model."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        own = bool(getattr(model, "compiled", False))  # without one: its step updates the weights itself
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


def training_of_copy(model: Any, own: TrainingSettings) -> TrainingSettings:
    """Return the settings for a copy of a live model: the same loss, new metrics."""
    keras = import_keras()
    metrics = keras.tree.map_structure(
        lambda each: keras.saving.serialize_keras_object(each) if isinstance(each, keras.Metric) else each,
        user_metrics(model),
    )
    loss = getattr(model, "loss", None)
    return replace(own, loss_config=loss, metrics_config=metrics, keeps_optimizer=False, keeps_loss=False)


def with_replaced(
    own: TrainingSettings, optimizer: str | None, loss: str | None, targets: GivenTargets
) -> TrainingSettings:
    """Return the model's own settings with those that were asked for in their place.

    Raises:
        UsageError: If Keras has no such optimizer or loss.
    """
    own = replace(own, targets=targets)
    if loss is not None:
        check_loss(loss)
    if optimizer is not None:
        check_optimizer_name(optimizer)
    if optimizer is not None and optimizer.lower() != own.optimizer:
        own = replace(own, optimizer=optimizer.lower(), optimizer_config=None, keeps_optimizer=False)
    return own if loss is None else replace(own, loss=loss, loss_config=loss, loss_weights=None, keeps_loss=False)


def _name_of(loss: Any) -> str | None:
    if isinstance(loss, str) or loss is None:
        return loss
    if isinstance(loss, dict):
        inner = loss.get("config")
        if isinstance(inner, str):
            return inner
        if isinstance(inner, dict):
            return str(inner.get("name") or loss.get("class_name"))
        return ", ".join(f"{key}: {_name_of(value)}" for key, value in loss.items())
    if isinstance(loss, (list, tuple)):
        return ", ".join(str(_name_of(item)) for item in loss)
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__))


def check_loss(name: str) -> None:
    """Refuse the name of a loss that Keras cannot find.

    Raises:
        UsageError: If Keras has no such loss, and none is registered with it.
    """
    losses = import_keras().losses
    try:
        found = losses.get(name)
    except ValueError:
        found = None
    if found is None:
        known = [each for each in vars(losses) if each == each.lower() and not each.startswith("_")]
        hint = nearest(name, known) or "; register your own with keras.saving.register_keras_serializable"
        raise UsageError(f"loss {name!r} is not one of Keras's{hint}")


def _optimizer_classes() -> dict[str, Any]:
    keras = import_keras()
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.Optimizer) and value is not keras.Optimizer
    }


def optimizer_slot_bytes(settings: TrainingSettings, variables: list[Any]) -> int | None:
    """Return the bytes that an optimizer keeps beside the weights (moments, accumulators, its counters).

    Args:
        settings: the optimizer and its configuration; settings of older Keras versions are passed over.
        variables: the trainable variables of the model, with or without values.

    Returns:
        Bytes, or None if the optimizer is unknown or not one of Keras's.
    """
    if settings.optimizer is None:
        return None
    try:
        with weightless():
            optimizer = make_optimizer(settings.optimizer, settings.optimizer_config or {})
            optimizer.build(variables)
            return sum(variable_bytes(variable) for variable in optimizer.variables)
    except Exception:  # a custom or misconfigured optimizer: the estimate goes on and says that it does not know
        return None


def make_optimizer(name: str, config: dict[str, Any]) -> Any:
    """Return an optimizer of Keras's from its name and those settings in a configuration that this Keras knows.

    Raises:
        ValueError: If a setting is one that is not read from files.
    """
    cls = _optimizer_classes().get(name)
    if cls is None:
        raise ValueError(f"{name} is not one of Keras's optimizers; name one (optimizer=…) or give a function")
    if "inner_optimizer" in config:  # LossScaleOptimizer
        inner = config["inner_optimizer"]
        return cls(make_optimizer(inner["class_name"].rpartition(">")[2].lower(), inner["config"]))
    if config.get("exclude_layers"):  # patterns of Muon's, from a file perhaps, that are not worth matching
        raise ValueError("exclude_layers")
    known = cls().get_config()
    kept = {key: value for key, value in config.items() if key in known and key != "learning_rate"}
    if isinstance(config.get("learning_rate"), dict):  # a schedule, perhaps a custom one: it has no variable
        kept["learning_rate"] = lambda: 0.001
    return cls.from_config(kept)
