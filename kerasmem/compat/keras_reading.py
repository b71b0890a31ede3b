"""How Keras reads a `PyDataset`: the adapter for one, and the call around it.

Keras gives a `PyDataset` no word on who reads it. `fit(shuffle=True)`, its default, asks for batch indices in random
order; validation reads the same object in between; TensorFlow asks ahead, and asks for two batches more to see their
shapes. So this module takes one look, when Keras makes an adapter: it finds the adapter, and has it read through a
reader from then on.

The look goes to stack frames, of the own thread only and once for each call of `fit`, `evaluate` or `predict`. Nothing
else serves. Keras takes a `DataAdapter` as it is, which would need no frame, but then drops `fit(class_weight=…)`
without a word. Keras tells a data set nothing of its adapter, and nowhere is another adapter registered. The public
hooks (`num_batches`, `on_epoch_begin`, `__getitem__`) name no reader: while `fit` reads ahead in a thread, a batch that
a callback asks for cannot be told from the next one of `fit`.

Without these parts of Keras index `i` is batch `i` for `fit` too: still each row once, in the order that Keras asks
for.
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

_FRAMES = 16  # looked at on the way up to `fit`
_CALLS = ("fit", "evaluate", "predict")


@dataclass(frozen=True)
class Call:
    """The reader of a data set.

    Args:
        name: "fit", "validate" (within `fit`), "evaluate" or "predict"; "" where something else reads.
        model: the Keras model; None if something else reads.
        steps: batches of one of Keras's epochs where `steps_per_epoch` or the like says so; else 0.
    """

    name: str = ""
    model: Any = None
    steps: int = 0


def attach_reader(dataset: Any, make_reader: Callable[[Call], Any]) -> None:
    """Have Keras read a `PyDataset` through a reader, if it is just making an adapter for it.

    Args:
        dataset: the `PyDataset`, one of whose properties Keras asks for.
        make_reader: returns the reader for a call; not called if Keras does not ask. A reader has the attributes of a
            `PyDataset`, `batches()`, which yields the batches of an epoch, and `for_tensorflow(data, look)`, which
            returns a `tf.data.Dataset` of them; `look()` yields batches without it.
    """
    if not all(part.exists() for part in (ADAPTER, ITERATION, STANDARD_BATCH)):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is dataset:  # its own properties, and those of subclasses
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "__init__":
        return
    adapter: Any = frame.f_locals.get("self")
    if type(adapter) is ADAPTER.get() and adapter.py_dataset is dataset:
        adapter.py_dataset = make_reader(find_call(frame))
        adapter.__class__ = _adapter_class()


def find_call(frame: FrameType | None = None) -> Call:
    """Return the nearest call of `fit`, `evaluate` or `predict` that this thread is in.

    Args:
        frame: where to begin; by default with the caller.
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
            # `fit` makes its own iterator first, and then one for validation.
            validates = name == "fit" and "epoch_iterator" in frame.f_locals
            return Call("validate" if validates else name, caller, steps)
        frame = frame.f_back
    return Call(steps=steps)


@functools.cache
def _adapter_class() -> type:
    base: Any = ADAPTER.get()

    class ReaderAdapter(base):
        """Keras's adapter with a `Reader` as its `py_dataset`."""

        def _get_iterator(self) -> Iterator[Any]:
            return (self._standardize_batch(batch) for batch in self.py_dataset.batches())

        def get_tf_dataset(self) -> Any:
            return self.py_dataset.for_tensorflow(super().get_tf_dataset(), self._get_iterator)

    return ReaderAdapter
