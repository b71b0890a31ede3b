"""`kerasmem.fit`: `model.fit` that survives running out of memory."""

from __future__ import annotations

import os
from typing import Any

import keras

from kerasmem import checks
from kerasmem.compat.keras_layers import flatten_layers
from kerasmem.compat.keras_training import epoch_iterators_recorded, is_under_strategy
from kerasmem.errors import UsageError, warn_user
from kerasmem.models.own_step import has_own_step
from kerasmem.streaming.sequence import H5ChunkSequence
from kerasmem.training.checkpoint import SAVE_FREQ, Checkpoint
from kerasmem.training.indexed_sources import ArraySource, BatchSource, split_rows
from kerasmem.training.run_state import RunState, plain, read_state
from kerasmem.training.sources import SequenceSource, Source, StreamSource
from kerasmem.training.steps.remote import refuse_in_worker
from kerasmem.training.trainer import FitOptions, SaveCallback, Trainer


def fit(
    model: Any,
    # as those of Keras's `Model.fit`
    x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1, verbose: str | int = "auto",
    callbacks: Any = None, validation_split: float = 0.0, validation_data: Any = None, shuffle: bool | str = True,
    class_weight: Any = None, sample_weight: Any = None, initial_epoch: int = 0, steps_per_epoch: int | None = None,
    validation_steps: int | None = None, validation_batch_size: int | None = None, validation_freq: Any = 1,
    *,
    micro_batches: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
    save_freq: int = SAVE_FREQ, keep: bool = False, isolated: bool | None = None,
) -> Any:  # fmt: skip
    """Train a model as `model.fit` does, and survive running out of memory.

    If a step runs out of memory, `fit` restores weights, optimizer, random generators and metrics, and repeats the step
    in micro-batches. Their gradients are added up for one update of the whole batch. Sample weights, class weights,
    masks, penalties, clipping, loss scaling and a smaller last micro-batch count as they do in the whole batch, so
    results differ by rounding only. Layers such as BatchNormalization and Dropout are an exception, and a warning names
    them. `fit` first tries one row, to see if fewer rows help at all; then it halves the batch until the step fits.
    Later batches use the same size.

    A batch is divided only if the result is known to be the same: for Keras's own step and `compute_loss`. If a model
    with a custom step runs out of memory, the step is undone and the error lists the options.

    A failed step may leave weights half updated, so `fit` keeps a copy of the state on the host. It takes the copy
    before the first step of training and of validation, and then from time to time; it repeats the batches since then
    (at most 1 GiB).

    Under XLA a failed step destroys the weights, so steps run in a separate process, built from the model's
    configuration. Data, callbacks and History stay in this process. Callbacks see, and may change, weights at the ends
    of epochs only; the learning rate at any batch. On the CPU a failed step often ends the process in graph mode too;
    `isolated=True` survives that.

    If `checkpoint` is set, a killed run resumes at the very next batch when the script is started again. Arrays and the
    batches of a `PyDataset` are then shuffled by the epoch's number and a saved seed, not in Keras's order; the seed
    follows `keras.utils.set_random_seed`. Data of tf.data or a generator is read again up to the position, so give
    `shuffle()` a seed. The state of callbacks is not saved; see `ResumeTraining`. With deterministic operations the
    result is the same bit for bit. At the end of data of unknown length Keras's graph counts one step more in
    `optimizer.iterations`; `kerasmem.fit` does not.

    Args:
        model: a compiled Keras model.
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight,
        sample_weight, initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq: as
            for `model.fit`. Steps are taken one by one, also with `steps_per_execution`.
        micro_batches: number of pieces of each batch, from the start. Defaults to whole batches until one runs out.
        checkpoint: path of a file for the position of the run; removed at the end.
        save_freq: batches between two checkpoints; each epoch's end is saved too. Defaults to 100.
        keep: keep the file at the end. Defaults to False.
        isolated: run steps in a separate process. Defaults to True if XLA compiles them, else False.

    Returns:
        Keras's `History`, including the epochs before a restart. Its attribute `recoveries` has a `Recovery` for each
        repeated step, and for each time that the separate process ended between two steps.

    Raises:
        UsageError: If an argument is wrong, the model cannot be trained in pieces, or the checkpoint belongs to another
            run.
        DataError: If the checkpoint cannot be read.
        ModelError: If not even one row fits, or a batch that ran out of memory cannot be divided.

    Examples:
        >>> import keras, kerasmem, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse", jit_compile=False)
        >>> history = kerasmem.fit(model, np.ones((10, 8)), np.ones((10, 1)), batch_size=5, verbose=0)
        >>> len(history.history["loss"]), history.recoveries
        (1, [])
    """
    arguments = {
        "x": x, "y": y, "batch_size": batch_size, "epochs": epochs, "verbose": verbose, "callbacks": callbacks,
        "validation_split": validation_split, "validation_data": validation_data, "shuffle": shuffle,
        "class_weight": class_weight, "sample_weight": sample_weight, "initial_epoch": initial_epoch,
        "steps_per_epoch": steps_per_epoch, "validation_steps": validation_steps,
        "validation_batch_size": validation_batch_size, "validation_freq": validation_freq,
    }  # fmt: skip
    refuse_in_worker()
    if micro_batches is not None:
        micro_batches = checks.whole("micro_batches", micro_batches)
    if checkpoint is not None:
        checkpoint = os.path.abspath(checks.path("checkpoint", checkpoint))
    save_freq = checks.whole("save_freq", save_freq)
    check_fit(model)
    isolated = checks.flag("isolated", bool(model.jit_compile) if isolated is None else isolated)
    keep = checks.flag("keep", keep)
    return train(model, arguments, FitOptions(micro_batches, checkpoint, save_freq, keep, isolated))


def check_fit(model: Any) -> None:
    """Refuse a model if its steps cannot be undone or divided.

    Raises:
        UsageError: If the model is not supported; the message has the fix.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "fit: only the TensorFlow backend is supported; use model.fit, with kerasmem.ResumeTraining to resume"
        )
    if not isinstance(model, keras.Model):
        raise UsageError(f"model must be a compiled Keras model; got {type(model).__name__}")
    if not getattr(model, "compiled", False) or (model.optimizer is None and not has_own_step(model)):
        raise UsageError("model: call model.compile(optimizer, loss) first")
    if is_under_strategy(model):
        name = type(model.distribute_strategy).__name__
        raise UsageError(f"fit: {name} divides batches itself; use model.fit, with kerasmem.ResumeTraining to resume")
    recurrent = [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.RNN)]
    stateful = [layer.name for layer in recurrent if layer.stateful]
    if stateful:
        raise UsageError(
            f"model: {', '.join(stateful)} carries its state from batch to batch; use stateful=False, or model.fit"
        )
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in model.trainable_variables):
        raise UsageError("model: float8 training replaces its scales by their gradients, which do not add up")
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none"):
            raise UsageError(f'loss: {loss.name} has reduction=None; use reduction="sum" for the same gradients')


def train(model: Any, arguments: dict[str, Any], options: FitOptions, *, source: Any = None) -> Any:
    """Train a model that `check_fit` accepts.

    Args:
        model: compiled Keras model.
        arguments: arguments of `model.fit`, by name.
        options: arguments of `kerasmem.fit`.
        source: result of `make_source`, if it was called for the arguments.

    Returns:
        Keras's `History`.
    """
    arguments = dict(arguments)
    callbacks = arguments.get("callbacks")
    callbacks = [] if callbacks is None else keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    if options.isolated:
        _check_callbacks(callbacks)
    first_epoch = arguments.get("initial_epoch") or 0
    checkpoint, run = None, RunState()
    if options.checkpoint is not None:
        checkpoint = Checkpoint(options.checkpoint, source or make_source(arguments))
        saved = checkpoint.read()
        if saved is not None:
            run = saved.run
            run.resume()
            arguments["initial_epoch"] = max(run.epoch, first_epoch)
    trainer = Trainer(model, run, options, checkpoint)
    saver = SaveCallback(trainer, first_epoch, options.save_freq)
    arguments["callbacks"] = [trainer, *callbacks, saver]
    with trainer.in_place(callbacks), saver.skipping, epoch_iterators_recorded() as saver.epoch_iterators:
        history = model.fit(**arguments)
    if history is None or (checkpoint is not None and checkpoint.saved is not None):
        history = _history_of(model, run)
    history.recoveries = [] if trainer.driver is None else trainer.driver.recoveries
    if checkpoint is not None and options.keep:
        _write_end(checkpoint, model, history, run, arguments.get("epochs") or 1)
    elif checkpoint is not None:
        checkpoint.remove()
    return history


def make_source(arguments: dict[str, Any]) -> Source:
    """Return the data of a call of `fit` as a source.

    Args:
        arguments: arguments of `fit`, by name; those that the source replaces are changed.

    Raises:
        UsageError: If the data has no position to resume from.
    """
    x, y, weight = (arguments.get(name) for name in ("x", "y", "sample_weight"))
    steps, shuffle = arguments.get("steps_per_epoch"), arguments.get("shuffle", True)
    source: Source
    if isinstance(x, H5ChunkSequence):
        source = SequenceSource(x)
    elif isinstance(x, keras.utils.PyDataset):
        source = BatchSource(x, x.num_batches, shuffle, steps)
    elif hasattr(x, "element_spec") or hasattr(x, "__next__"):
        source = StreamSource(x)
    else:
        if arguments.get("validation_split") and arguments.get("validation_data") is None:
            (x, y, weight), arguments["validation_data"] = split_rows((x, y, weight), arguments["validation_split"])
        if arguments.get("validation_data") is not None and not arguments.get("validation_batch_size"):
            arguments["validation_batch_size"] = arguments.get("batch_size")
        source = ArraySource(x, y, weight, arguments.get("batch_size"), shuffle, steps)
        arguments.update(y=None, sample_weight=None, batch_size=None, validation_split=0.0)
    arguments.update(source.arguments)
    return source


def _history_of(model: Any, run: Any) -> Any:
    """Return Keras's `History`, including the epochs of earlier processes."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.history, history.epoch = run.history, run.epochs
    model.history = history
    return history


def _write_end(checkpoint: Any, model: Any, history: Any, run: Any, epochs: int) -> None:
    """Save the final state, including changes by callbacks at the end."""
    run.history = {name: [plain(value) for value in values] for name, values in history.history.items()}
    run.epochs = list(history.epoch)
    run.epoch, run.batch, run.steps, run.logs = max(epochs, *run.epochs, 0) if run.epochs else epochs, 0, None, {}
    checkpoint.write(run, read_state(model))


def _check_callbacks(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            text = "ModelCheckpoint(save_freq=…) saves the epoch's first weights; use kerasmem.fit(checkpoint=…)"
            warn_user(text, RuntimeWarning)
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            warn_user("SwapEMAWeights does not change the weights of a validation in another process", RuntimeWarning)
