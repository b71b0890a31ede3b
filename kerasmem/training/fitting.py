"""`kerasmem.fit`: `model.fit` that goes on where memory ran out."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from kerasmem.errors import UsageError
from kerasmem.training.steps.checks import check_model
from kerasmem.training.steps.packing import refuse_in_worker


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    micro_batches: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    keep: bool = False,
    isolated: bool | None = None,
) -> Any:
    """Train a model as `model.fit` does, and go on where a step runs out of memory.

    The step that ran out is undone (weights, optimizer, random generators, metrics), and taken again in micro-batches
    whose gradients are added up: one update for the whole batch, as without. Sample weights, class weights, masks,
    penalties, clipping, loss scaling and a last micro-batch that is smaller count as they do in the whole batch,
    so that results differ by rounding only; except with layers such as BatchNormalization and Dropout, of which a
    warning names those there are. Later batches are taken in pieces of the same size, halved where that runs out too.

    A failed step may leave weights half updated, so there is always a copy on the host to go back to, taken before
    each step of new shapes and then from time to time; the batches since (at most 1 GiB) are trained on once more.

    Under XLA a failed step takes the weights with it, so there (`isolated=None`) steps run in a process of their
    own, made from the model's configuration; it gets the batches and sends back logs. Data, callbacks and History
    stay in this process. Callbacks see, and may change, weights at the ends of epochs only; the learning rate at
    any batch. On the CPU a failed step often ends the process in graph mode as well: `isolated=True` is for that.

    With `checkpoint` a run that was killed goes on with the very next batch when the script is started again. Arrays
    and a `PyDataset` then have an order that depends on a seed and the epoch's number (the seed is drawn from
    Python's generator, which `keras.utils.set_random_seed` sets, and saved). Data of tf.data or a generator is read
    again up to the place, and must be the same. Not saved is what callbacks remember; see `ResumeTraining`. With
    deterministic operations the result is the same bit for bit.

    Args:
        model: a compiled Keras model with Keras's own `train_step`.
        x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight,
        sample_weight, initial_epoch, steps_per_epoch, validation_steps, validation_batch_size, validation_freq: as
            for `model.fit`. `steps_per_execution` is heeded as to callbacks; steps are taken one by one.
        micro_batches: pieces of a batch from the start; None for whole batches until one runs out.
        checkpoint: file in which to save where training stands; removed when training is over.
        every: batches from one saving to the next; each epoch's end is saved too.
        keep: leave the file where it is at the end.
        isolated: run steps in a process of their own; None: where XLA compiles them.

    Returns:
        Keras's `History`, also of the epochs before it was gone on with; its attribute `recoveries` has a `Recovery`
        for each step that was taken again.

    Raises:
        UsageError: an argument is wrong, the model cannot be trained in pieces, or the checkpoint is of another run.
        DataError: the checkpoint cannot be read.
        ModelError: not even one row at a time fits.

    Example:
        >>> import keras, kerasmem, numpy as np
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse", jit_compile=False)
        >>> history = kerasmem.fit(model, np.ones((10, 8)), np.ones((10, 1)), batch_size=5, verbose=0)
        >>> len(history.history["loss"]), history.recoveries
        (1, [])
    """
    arguments = {name: value for name, value in locals().items() if name not in _OWN}
    refuse_in_worker()
    check_model(model)
    supervised = sys.modules.get("kerasmem.training.script")  # `kerasmem run` has begun this process
    if supervised is not None and supervised.SESSION is not None:
        return supervised.SESSION.fit(model, type(model).fit, arguments, micro_batches=micro_batches)
    return train(
        model,
        arguments,
        micro_batches=_whole("micro_batches", micro_batches),
        path=None if checkpoint is None else os.path.abspath(os.fsdecode(os.fspath(checkpoint))),
        every=_whole("every", every) or 1,
        keep=keep,
        isolated=bool(model.jit_compile) if isolated is None else bool(isolated),
    )


_OWN = ("model", "micro_batches", "checkpoint", "every", "keep", "isolated")


def train(
    model: Any,
    arguments: dict[str, Any],
    *,
    micro_batches: int | None,
    path: str | None,
    every: int,
    keep: bool,
    isolated: bool,
    source: Any = None,
    progress: Any = None,
) -> Any:
    """Train; `arguments` are those of `model.fit`, by name.

    Args:
        model: checked.
        arguments: of `fit`.
        source: what `make_source` made of them, if it was called.
        micro_batches, every, keep, isolated: as for `fit`.
        path: of the checkpoint, or None.
        progress: for `kerasmem run`: told of each step; then a failure that costs the process is not dealt with here.
    """
    import keras

    from kerasmem.training.running import Run
    from kerasmem.training.saving import Checkpoint

    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    if isolated:
        _check_callbacks(callbacks)
    saved = None
    arguments = dict(arguments)
    if path is not None:
        source = source or make_source(arguments)
        arguments.update(source.arguments)
        saved = Checkpoint(path, every, source)
    run = Run(
        model,
        isolated=isolated,
        micro_batches=micro_batches,
        source=source,
        checkpoint=saved,
        may_stay=progress is None,
    )
    run.progress, run.initial_epoch = progress, arguments.get("initial_epoch") or 0
    if progress is not None:
        run.size = progress.size
    arguments["callbacks"] = [run.first, *callbacks, run.last]
    run.install(callbacks)
    try:
        history = model.fit(**arguments)
    except BaseException:
        run.rescue()
        raise
    finally:
        run.uninstall()
    found = _history(history, saved, run)
    if saved is not None and not keep:
        saved.remove()
    elif saved is not None:
        _finish(saved, model, found, arguments)
    return found


def finished(model: Any, source: Any, path: str) -> Any:
    """Return the history of a run that was over when its checkpoint was written, its state in the model; or None."""
    import keras

    from kerasmem.training.running import load_saved
    from kerasmem.training.saving import Checkpoint

    if not os.path.exists(path):
        return None
    saved = Checkpoint(path, 1, source)
    if not saved.more.get("done"):
        return None
    saved.check(steps=None, at_once=1)
    load_saved(model, saved)
    history = keras.callbacks.History()
    history.set_model(model)
    history.history, history.epoch = saved.more["history"], saved.more["epochs"]
    model.history, history.recoveries = history, []
    return history


def pass_again(model: Any, arguments: Mapping[str, Any], source: Any, epochs: int) -> None:
    """Bring data to where it was after a run that is over, for a later one on the same data.

    Args:
        model: which the run trained.
        arguments: of `fit`.
        source: what `make_source` made of them.
        epochs: that it trained for.
    """
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    walk = TFEpochIterator(
        x=arguments["x"],
        steps_per_epoch=arguments.get("steps_per_epoch"),
        steps_per_execution=model.steps_per_execution,
        distribute_strategy=model.distribute_strategy,
    )
    walk.reset()  # as `fit` does before it begins
    source.pass_over(epochs, walk, model.steps_per_execution)


def _finish(saved: Any, model: Any, history: Any, arguments: dict[str, Any]) -> None:
    """Save what training came to, with what callbacks did at its end."""
    from kerasmem.training.callbacks import plain
    from kerasmem.training.steps.state import read_state

    values = {name: [plain(each) for each in some] for name, some in history.history.items()}
    more = {**saved.more, "history": values, "epochs": list(history.epoch), "done": True}
    epoch = max(arguments.get("epochs") or 1, *history.epoch, 0) if history.epoch else arguments.get("epochs") or 1
    saved.write(read_state(model), epoch=epoch, done=0, steps=None, logs={}, more=more)


def make_source(arguments: dict[str, Any]) -> Any:
    """Return the data of a call of `fit` as a source; takes what it uses up out of the arguments.

    Raises:
        UsageError: it is nothing whose place could be found again.
    """
    from kerasmem.training import ordered
    from kerasmem.training.sources import ArraySource, StreamSource

    x: Any = arguments.get("x")
    y, weight = arguments.get("y"), arguments.get("sample_weight")
    steps = arguments.get("steps_per_epoch")
    if ordered.is_sequence(x):
        return ordered.SequenceSource(x)
    if ordered.is_dataset(x):
        return ordered.DatasetSource(x, bool(arguments.get("shuffle", True)), steps)
    if hasattr(x, "element_spec") or hasattr(x, "__next__"):
        return StreamSource(x, steps)
    if arguments.get("validation_split") and arguments.get("validation_data") is None:
        from keras.src.trainers.data_adapters import array_slicing

        split = array_slicing.train_validation_split((x, y, weight), validation_split=arguments["validation_split"])
        (x, y, weight), arguments["validation_data"] = split
    if arguments.get("validation_data") is not None and not arguments.get("validation_batch_size"):
        arguments["validation_batch_size"] = arguments.get("batch_size")
    source = ArraySource(x, y, weight, arguments.get("batch_size"), arguments.get("shuffle", True), steps)
    for name in ("y", "sample_weight", "batch_size"):
        arguments[name] = None
    arguments["validation_split"] = 0.0
    return source


def _check_callbacks(callbacks: list[Any]) -> None:
    import keras

    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise UsageError(
                "callbacks: SwapEMAWeights exchanges weights for each validation, which the process that takes the "
                "steps does not see; compile with jit_compile=False and isolated=False, or use `kerasmem run`"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            warnings.warn(
                "ModelCheckpoint(save_freq=…) within an epoch saves the weights of the epoch's begin: steps run in "
                "another process, and weights come back at the ends of epochs; kerasmem.fit(checkpoint=…) saves them",
                RuntimeWarning,
                stacklevel=4,
            )


def _history(history: Any, saved: Any, run: Any) -> Any:
    import keras

    if history is None:
        history = keras.callbacks.History()
        history.history, history.epoch = {}, []
    if saved is not None and saved.more.get("history"):
        before = saved.more["history"]
        history.history = {
            name: [*before.get(name, []), *history.history.get(name, [])] for name in {**before, **history.history}
        }
        history.epoch = [*saved.more["epochs"], *history.epoch]
    history.recoveries = [] if run.driver is None else run.driver.recoveries
    return history


def _whole(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{name}: {value!r} is not a whole number from 1")
    return value
