"""`kerasmem.fit` where Keras runs on JAX: `model.fit` with a checkpoint; steps are Keras's own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.resume import ResumeTraining

_WAY_OUT = "KERAS_BACKEND=tensorflow has it"


def fit_on_jax(
    model: Any, arguments: Mapping[str, Any], divided: bool, checkpoint: str | None, save_freq: int | None, keep: bool
) -> Any:
    """Train as `model.fit` does, and go on from the checkpoint where there is one.

    Args:
        model: a compiled Keras model.
        arguments: of `model.fit`, by name.
        divided: whether micro-batches, an isolated process or the largest batch were asked for.
        checkpoint: where training is saved; None for nowhere.
        save_freq: batches from one saving to the next; None: as `ResumeTraining` has it.
        keep: whether the file stays at the end.

    Returns:
        Keras's `History`, with `recoveries`, which is empty.

    Raises:
        UsageError: something that only the TensorFlow backend has was asked for.
    """
    if divided:
        raise UsageError(f"fit: micro_batches, isolated and batch_size='max' are not there on JAX; {_WAY_OUT}")
    given = dict(arguments)
    callbacks = given.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    resume = None
    if checkpoint is None:
        warnings.warn(
            f"kerasmem.fit on JAX takes no step again that runs out of memory; {_WAY_OUT}", RuntimeWarning, stacklevel=3
        )
    elif not isinstance(given.get("x"), H5ChunkSequence):
        raise UsageError(
            f"checkpoint: on JAX training goes on with an H5ChunkSequence as x only; {_WAY_OUT} for others"
        )
    else:
        resume = ResumeTraining(checkpoint, given["x"], save_freq=save_freq, keep=keep)
        callbacks.append(resume)
    history = model.fit(**{**given, "callbacks": callbacks})
    if resume is not None:  # the epochs of earlier processes, too
        history.history, history.epoch = resume.run.history, resume.run.epochs
    history.recoveries = []
    return history
