"""`kerasmem.fit` where Keras runs on JAX: `model.fit` with a checkpoint; steps are Keras's own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.batch_size import MAX
from kerasmem.training.resume import ResumeTraining

_WAY_OUT = "KERAS_BACKEND=tensorflow has it"


def fit_on_jax(model: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Train as `model.fit` does, and go on from the checkpoint where there is one.

    Args:
        model: a compiled Keras model.
        arguments: of `model.fit`, by name.
        options: those of `kerasmem.fit` beyond, by name, as `FitOptions` has them.

    Returns:
        Keras's `History`, with `recoveries`, which is empty.

    Raises:
        UsageError: something that only the TensorFlow backend has was asked for.
    """
    if options["micro_batches"] is not None or options["isolated"] or arguments["batch_size"] == MAX:
        raise UsageError(f"fit: micro_batches, isolated and batch_size='max' are not there on JAX; {_WAY_OUT}")
    given = dict(arguments)
    callbacks = given.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    resume = None
    if options["checkpoint"] is None:
        warnings.warn(
            f"kerasmem.fit on JAX takes no step again that runs out of memory; {_WAY_OUT}", RuntimeWarning, stacklevel=3
        )
    elif not isinstance(given.get("x"), H5ChunkSequence):
        raise UsageError(f"checkpoint: on JAX training goes on with an H5ChunkSequence as x; {_WAY_OUT} for others")
    else:
        saving = {name: options[name] for name in ("save_freq", "keep")}
        resume = ResumeTraining(options["checkpoint"], given["x"], **saving)
        callbacks.append(resume)
    history = model.fit(**{**given, "callbacks": callbacks})
    if resume is not None:  # the epochs of earlier processes, too
        history.history, history.epoch = resume.run.history, resume.run.epochs
    history.recoveries = []
    return history
