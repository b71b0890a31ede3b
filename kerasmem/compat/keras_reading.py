"""Keras's adapter of a `PyDataset`, and the call that reads it.

A `PyDataset` does not know its reader. `fit(shuffle=True)`, the default, requests batch indices in random order,
validation reads the same object between epochs, and TensorFlow prefetches and reads two more batches to infer their
shapes. Therefore this module detects the moment when Keras creates an adapter, and makes that adapter read through a
reader.

It inspects the stack frames of its thread, once for each call of `fit`, `evaluate` or `predict`. There is no
alternative. Keras accepts a `DataAdapter`, but then silently ignores `fit(class_weight=…)`. It has no registry of
adapters, and a dataset has no reference to its adapter. The public hooks (`num_batches`, `on_epoch_begin`,
`__getitem__`) do not identify the reader: while `fit` prefetches in a thread, a callback's request looks like that of
`fit`.

If Keras lacks these parts, index `i` is batch `i` for `fit` too. It still reads each row once, in Keras's order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kerasmem.compat.borrowing import Borrowed

ADAPTER = Borrowed(
    "keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter",
    feature="the order of H5ChunkSequence whatever fit(shuffle=…) is",
)
ITERATION = Borrowed(f"{ADAPTER.module}:PyDatasetAdapter._get_iterator", feature=ADAPTER.feature)
STANDARD_BATCH = Borrowed(f"{ADAPTER.module}:PyDatasetAdapter._standardize_batch", feature=ADAPTER.feature)

_FRAMES = 16  # between a property of the dataset and `fit`
_CALLS = ("fit", "evaluate", "predict")


@dataclass(frozen=True)
class Call:
    """The call that reads a dataset.

    Args:
        name: "fit", "validate" (within `fit`), "evaluate" or "predict"; "" for another reader.
        model: the Keras model; None for another reader.
        steps: batches per epoch if an argument such as `steps_per_epoch` sets it, else 0.
    """

    name: str = ""
    model: Any = None
    steps: int = 0


def attach_reader(dataset: Any, make_reader: Callable[[Call], Any]) -> None:
    """Make Keras read a `PyDataset` through a reader, if Keras is creating an adapter for it.

    Args:
        dataset: the `PyDataset`. This function is called from one of its properties.
        make_reader: function that returns the reader for a call. A reader has the attributes of a `PyDataset`,
            `batches()`, which yields the batches of an epoch, and `for_tensorflow(data, peek)`, which returns a
            `tf.data.Dataset`. `peek()` yields batches without TensorFlow.
    """
    if not all(part.exists() for part in (ADAPTER, ITERATION, STANDARD_BATCH)):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is dataset:  # its properties and those of subclasses
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "__init__":
        return
    adapter: Any = frame.f_locals.get("self")
    if type(adapter) is ADAPTER.get() and adapter.py_dataset is dataset:
        adapter.py_dataset = make_reader(find_call(frame))
        adapter.__class__ = _adapter_class()


def find_call(frame: FrameType | None = None) -> Call:
    """Return the innermost call of `fit`, `evaluate` or `predict` in this thread.

    Args:
        frame: the first frame to inspect. Defaults to the caller's.
    """
    frame = sys._getframe(1) if frame is None else frame
    steps = 0
    for _ in range(_FRAMES):
        if frame is None:
            break
        caller: Any = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if name == "__init__" and getattr(caller, "steps_per_epoch", None):
            at_once = int(getattr(caller, "steps_per_execution", 1))
            steps = -(-int(caller.steps_per_epoch) // at_once) * at_once
        if name in _CALLS and hasattr(caller, "train_step"):
            # `fit` creates its own iterator before that for validation.
            validates = name == "fit" and "epoch_iterator" in frame.f_locals
            return Call("validate" if validates else name, caller, steps)
        frame = frame.f_back
    return Call(steps=steps)


@functools.cache
def _adapter_class() -> type:
    base: Any = ADAPTER.get()

    class ReaderAdapter(base):
        """Adapter that reads through a reader."""

        def _get_iterator(self) -> Iterator[Any]:
            return (self._standardize_batch(batch) for batch in self.py_dataset.batches())

        def get_tf_dataset(self) -> Any:
            return self.py_dataset.for_tensorflow(super().get_tf_dataset(), self._get_iterator)

    return ReaderAdapter
