"""`BestWeights`: of many models the best one's weights and configuration, and none of the models."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kerasmem.errors import UsageError
from kerasmem.models.vocabulary import configuration

MODES = ("auto", "min", "max")
# What grows as a model gets better; as Keras's own callbacks guess it from the name.
_GROWING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "similarity")


class BestWeights(keras.callbacks.Callback):
    """Keep the weights and the configuration of the best of many models, and none of the models.

    A search that keeps a list of models keeps all their weights, optimizers and graphs. This keeps one copy of one
    model's weights, on the host, whatever the number of trials; a better one's replace them. Given to `fit`, it looks
    at the end of each epoch; `offer` takes a score from elsewhere, such as a `kerasmem.run_isolated` trial. Of equal
    scores the first stays; NaN is never the best. Threads may share it.

    Args:
        monitor: the name in `logs`, for `fit`.
        mode: "min", "max", or "auto": "max" where the name says so (accuracy, AUC, …), else "min".

    Attributes:
        score: the best score; None before the first.
        config: what was said of that trial.
        epoch: of that trial, from 0; None where it was offered without.
        weights: its weights, as `model.get_weights()` gives them.

    Raises:
        UsageError: the mode is none of these; from `fit`, `logs` has nothing of that name.

    Examples:
        >>> import keras, numpy as np
        >>> x, y = np.random.rand(64, 8), np.random.rand(64, 1)
        >>> best = BestWeights("loss")
        >>> for units in (4, 8, 16):
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        ...     history = model.fit(x, y, epochs=2, verbose=0, callbacks=[best.of(units=units)])
        >>> best.config["units"] in (4, 8, 16), best.build().count_params() > 0
        (True, True)
    """

    def __init__(self, monitor: str = "val_loss", mode: str = "auto") -> None:
        super().__init__()
        if mode not in MODES:
            raise UsageError(f"mode {mode!r}: choose from {', '.join(MODES)}")
        self.monitor = monitor
        name = monitor.lower()
        grows = mode == "max" or (mode == "auto" and any(word in name for word in _GROWING) and "loss" not in name)
        self.mode = "max" if grows else "min"
        self.score: float | None = None
        self.config: dict[str, Any] = {}
        self.epoch: int | None = None
        self.weights: list[np.ndarray] = []
        self._architecture: str | None = None
        self._lock = threading.Lock()

    def of(self, **config: Any) -> keras.callbacks.Callback:
        """Return a callback for one trial, with its configuration.

        Args:
            **config: whatever tells the trial from the others.
        """
        return _Trial(self, config)

    def offer(
        self, score: float, model: Any, config: Mapping[str, Any] | None = None, epoch: int | None = None
    ) -> bool:
        """Take over a model's weights if its score is the best so far.

        Args:
            score: to compare.
            model: a Keras model, or the weights as `model.get_weights()` gives them.
            config: whatever tells the trial from the others.
            epoch: of the trial.

        Returns:
            Whether it is the best so far.

        Raises:
            UsageError: the score is no number, or `model` neither a model nor a list of arrays.
        """
        try:
            value = float(score)
        except (TypeError, ValueError):
            raise UsageError(f"score {score!r}: must be a number") from None
        is_model = isinstance(model, keras.Model)
        if not is_model and not (isinstance(model, Sequence) and all(hasattr(each, "shape") for each in model)):
            raise UsageError(f"model: give a Keras model or its get_weights(), not a {type(model).__name__}")
        with self._lock:
            if math.isnan(value) or (self.score is not None and not self._is_better(value, self.score)):
                return False
            self._keep([each.value for each in model.weights] if is_model else model)
            self._architecture = _architecture(model) if is_model else None
            self.score, self.config, self.epoch = value, dict(config or {}), epoch
            return True

    def restore(self, model: keras.Model) -> keras.Model:
        """Give the kept weights to a model of the same architecture, and return it.

        Raises:
            UsageError: nothing was kept, or the model's weights have other shapes.
        """
        self._require()
        shapes, own = [each.shape for each in self.weights], [tuple(each.shape) for each in model.weights]
        if shapes != own:
            raise UsageError(
                f"model {model.name!r} has other weights than the best one ({len(own)} in place of {len(shapes)}, or "
                f"other shapes); build it with the configuration of the best: {self.config}"
            )
        model.set_weights(self.weights)
        return model

    def build(self, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
        """Return the best model, rebuilt from its configuration, with its weights; it is not compiled.

        Args:
            custom_objects: name to class or function, for what it uses beyond Keras.

        Raises:
            UsageError: nothing was kept, weights alone were offered, or the model has no configuration.
        """
        self._require()
        if self._architecture is None:
            raise UsageError(
                "the best model's configuration is not known (weights alone were offered, or it has none); build it "
                f"yourself ({self.config}) and give it to restore()"
            )
        config = json.loads(self._architecture)
        try:  # safe mode is for files of others; this was a live model
            model = keras.saving.deserialize_keras_object(
                config, custom_objects=dict(custom_objects or {}), safe_mode=False
            )
        except (TypeError, ValueError, ImportError) as error:
            raise UsageError(f"the best model cannot be rebuilt ({error}); name its classes in custom_objects") from (
                error
            )
        return self.restore(model)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Look at an epoch's score."""
        self.look(self.model, epoch, logs, {})

    def look(self, model: Any, epoch: int, logs: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
        """Look at an epoch's score of a model with its configuration."""
        if self.monitor not in (logs or {}):
            known = ", ".join(sorted(logs or {}))
            raise UsageError(f"BestWeights: logs have no {self.monitor!r}; monitor one of these: {known}")
        self.offer((logs or {})[self.monitor], model, config, epoch)

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than

    def _keep(self, values: Sequence[Any]) -> None:
        """Copy the weights, into the memory of the last ones where they fit."""
        kept = self.weights
        if [(each.shape, each.dtype) for each in kept] != [(tuple(each.shape), _dtype(each)) for each in values]:
            self.weights = kept = [np.empty(tuple(each.shape), _dtype(each)) for each in values]
        for array, value in zip(kept, values, strict=True):
            array[...] = keras.ops.convert_to_numpy(value)

    def _require(self) -> None:
        if self.score is None:
            raise UsageError("no weights were kept: no score was offered that is a number")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_model")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _model=None)


class _Trial(keras.callbacks.Callback):
    def __init__(self, best: BestWeights, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._best, self._config = best, dict(config)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._best.look(self.model, epoch, logs, self._config)


def _dtype(value: Any) -> np.dtype:
    return np.dtype(keras.backend.standardize_dtype(value.dtype))


def _architecture(model: keras.Model) -> str | None:
    """Return the model's configuration without that of `compile`; None where it has none."""
    try:
        config = configuration(model)
        return json.dumps({name: value for name, value in config.items() if name != "compile_config"})
    except Exception:  # a model of one's own without get_config raises what it likes
        return None
