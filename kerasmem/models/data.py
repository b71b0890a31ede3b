"""The batch that `fit` passes to a step, as shapes, from the data that the user passes to `fit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.compat.keras_training import data_adapter, dataset_batch_size
from kerasmem.errors import KerasmemError, UsageError
from kerasmem.models.backend import import_keras, keras_reason, runs_on_jax

DEFAULT_SIZE = 32  # of `fit`
_KINDS = "arrays, (x, y), (x, y, sample_weight), a tf.data.Dataset, a PyDataset or a generator"


@dataclass(frozen=True)
class Leaf:
    """One tensor of a batch.

    Attributes:
        shape: shape with the batch; open dimensions of ragged tensors are None.
        dtype: dtype.
        is_batched: whether the first dimension is the batch.
        values: non-zero values of a sparse tensor, or None.
        rows: lengths of a ragged tensor's values and row splits, or ().
        traced: shape with which `fit` traces the step, or None if only the batch is open, as it is where the last batch
            may be smaller.
    """

    shape: tuple[int | None, ...]
    dtype: str
    is_batched: bool = True
    values: int | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    traced: tuple[int | None, ...] | None = None

    def resized(self, new: int) -> Leaf:
        """Return the tensor of a batch of another size, with as many values in each sample."""
        old = self.shape[0]
        if not self.is_batched or old is None:
            return self
        values = None if self.values is None else -(-self.values * new // old)
        rows = tuple((-(-first * new // old), *rest) for first, *rest in self.rows)
        traced = self.traced
        if traced is not None and traced[0] is not None:
            traced = (new, *traced[1:])
        return replace(self, shape=(new, *self.shape[1:]), values=values, rows=rows, traced=traced)

    def tensor(self) -> Any:
        """Return the Keras tensor."""
        kind = {"sparse": True} if self.values is not None else {"ragged": True} if self.rows else {}
        return import_keras().KerasTensor(self.shape, self.dtype, **kind)

    def parts(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the dense tensors that hold this one."""
        if self.values is not None:
            return [((self.values, len(self.shape)), "int64"), ((self.values,), self.dtype)]
        if self.rows:
            splits = [((length + 1,), "int64") for length, *_ in self.rows[1:]]
            return [(self.rows[0], self.dtype), *splits]
        return [(self.shape, self.dtype)]  # type: ignore[list-item]

    def open_parts(self) -> list[tuple[tuple[int | None, ...], str]]:
        """Return the shapes and dtypes of these tensors in the step that `fit` traces."""
        if self.values is not None or self.rows or not self.shape:
            return [*self.parts()]
        return [((None, *self.shape[1:]) if self.traced is None else self.traced, self.dtype)]

    def zeros(self) -> Any:
        """Return a tensor of zeros, with as many values."""
        import numpy

        keras, parts = import_keras(), self.parts()
        arrays: list[Any] = [
            numpy.full(shape, b"") if dtype == "string" else keras.ops.zeros(shape, dtype) for shape, dtype in parts
        ]
        if self.rows:
            ends = [length for length, *_ in (*self.rows[2:], self.rows[0])]
            for index, end in enumerate(ends):
                arrays[index + 1] = numpy.linspace(0, end, parts[index + 1][0][0]).astype("int64")
        elif self.values is not None:
            shape = tuple(map(int, filter(None, self.shape)))
            places = numpy.linspace(0, math.prod(shape) - 1, self.values).astype("int64")
            arrays[0] = numpy.stack(numpy.unravel_index(places, shape), axis=1)
        return self.joined(iter(arrays))

    def joined(self, parts: Iterator[Any]) -> Any:
        """Return TensorFlow's tensor of these dense tensors."""
        if self.values is None and not self.rows:
            return next(parts)
        import tensorflow as tf

        own = [next(parts) for _ in self.parts()]
        if self.rows:
            return tf.RaggedTensor.from_nested_row_splits(own[0], own[1:], validate=False)
        return tf.SparseTensor(*own, self.shape)


@dataclass(frozen=True)
class Batch:
    """One batch of the user's data.

    Attributes:
        element: argument of `train_step`: a structure of `Leaf`.
        size: samples.
        caveats: remarks for the first line of an answer.
        notes: other remarks.
    """

    element: Any
    size: int
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def resized(self, size: int) -> Batch:
        """Return a batch of another size."""

        def resize(leaf: Leaf | None) -> Leaf | None:
            return None if leaf is None else leaf.resized(size)

        structure = import_keras().tree.map_structure(resize, self.element)
        return replace(self, element=structure, size=size)

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors, in the order of the argument."""
        return [leaf for leaf in import_keras().tree.flatten(self.element) if leaf is not None]

    @property
    def is_irregular(self) -> bool:
        """Whether a tensor is sparse or ragged."""
        return any(leaf.values is not None or leaf.rows for leaf in self.leaves)

    def parts(self) -> tuple[Any, Any, Any]:
        """Return inputs, targets and sample weights, or None for missing ones."""
        element = self.element
        if not isinstance(element, tuple) or not 1 <= len(element) <= 3:
            return element, None, None
        x, y, sample_weight = (*element, None, None)[:3]
        return x, y, sample_weight


def read_batch(data: Any, batch_size: int | None) -> Batch:
    """Read the shapes of a batch. Arrays are not copied, and a dataset is iterated only if its shapes are open.

    Args:
        data: argument of `fit`, a tuple (x, y) or (x, y, sample_weight) of such, or a function that returns one.
        batch_size: samples, or None for those of the data (32 for arrays).

    Raises:
        UsageError: If Keras cannot read the data.
    """
    keras = import_keras()
    if isinstance(data, Batch):
        return data
    try:
        if callable(data) and not isinstance(data, keras.utils.PyDataset):
            data = data()
        caveats: tuple[str, ...] = ()
        notes: tuple[str, ...] = ()
        if isinstance(data, keras.utils.PyDataset):
            data, notes = _generator(data[0]), ("data: batch 0 was read for its shapes",)
        elif hasattr(data, "__next__"):
            data = _generator(next(data))
            caveats = ("data: the generator's first batch was taken for its shapes, so give fit a new generator",)
        adapter = data_adapter(*(data if isinstance(data, tuple) else (data,)), batch_size=batch_size or DEFAULT_SIZE)
        native = _array_batch(adapter, batch_size)
        element, size, is_drawn = _element_on_jax(adapter) if runs_on_jax() else _element(adapter, native)
    except KerasmemError:
        raise
    except Exception as error:
        raise UsageError(f"data must be {_KINDS}, as fit takes it; got an error: {keras_reason(error)}") from error
    if is_drawn and not (notes or caveats):
        notes = ("data: one batch was drawn for its shapes; a dataset that shuffles goes on to its next order",)
    batch = Batch(element, size, caveats, notes)
    return batch if batch_size is None else batch.resized(batch_size)


def _generator(element: Any) -> Iterator[tuple[Any, ...]]:
    """Yield one element, as a tuple."""
    yield tuple(element) if isinstance(element, (tuple, list)) else (element,)


def _array_batch(adapter: Any, batch_size: int | None) -> int | None:
    """Return the samples of the first batch of arrays, or None for other data."""
    if adapter.batch_size is None or batch_size is not None:
        return batch_size
    rest = adapter.partial_batch_size if adapter.has_partial_batch else None
    return int(rest if rest and adapter.num_batches == 1 else adapter.batch_size)


def _element_on_jax(adapter: Any) -> tuple[Any, int, bool]:
    element = next(iter(adapter.get_jax_iterator()))
    leaves = [leaf for leaf in import_keras().tree.flatten(element) if leaf is not None]
    size = int(leaves[0].shape[0])

    def read(leaf: Any) -> Any:
        if leaf is not None and not hasattr(leaf, "__array__"):
            raise UsageError("data: sparse and ragged tensors need the TensorFlow backend of Keras; pass dense arrays")
        return None if leaf is None else _dense(leaf.shape, leaf.dtype, size)

    return import_keras().tree.map_structure(read, element), size, True


def _element(adapter: Any, size: int | None) -> tuple[Any, int, bool]:
    """Return the structure of a batch, its samples, and whether a batch was drawn."""
    import tensorflow as tf

    dataset = adapter.get_tf_dataset()
    tree = import_keras().tree
    specs: list[Any] = [spec for spec in tree.flatten(dataset.element_spec) if isinstance(spec, _tensor_specs())]
    if not specs:
        raise ValueError("it has no tensors")
    size = specs[0].shape[0] or size or dataset_batch_size(dataset)
    is_known = all(isinstance(spec, tf.TensorSpec) and None not in spec.shape[1:] for spec in specs)
    if size is not None and is_known:
        known = int(size)

        def of_spec(spec: Any) -> Any:
            if not isinstance(spec, tf.TensorSpec):
                return None
            leaf = _dense((known if spec.shape[0] is None else spec.shape[0], *spec.shape[1:]), spec.dtype, known)
            return replace(leaf, traced=tuple(spec.shape))

        return tree.map_structure(of_spec, dataset.element_spec), known, False
    element = next(iter(dataset))
    first = next(leaf for leaf in tree.flatten(element) if hasattr(leaf, "shape"))
    drawn = int(first.nrows() if isinstance(first, tf.RaggedTensor) else first.shape[0])
    specs = dataset.element_spec
    return tree.map_structure(lambda leaf, spec: _of_tensor(leaf, drawn, spec), element, specs), drawn, True


def _tensor_specs() -> tuple[type, ...]:
    import tensorflow as tf

    return tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec


def _dense(shape: Any, dtype: Any, size: int) -> Leaf:
    dimensions = tuple(int(number) for number in shape)
    return Leaf(dimensions, str(import_keras().backend.standardize_dtype(dtype)), dimensions[:1] == (size,))


def _of_tensor(tensor: Any, size: int, spec: Any) -> Leaf | None:
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor):
        dense = _dense(tensor.dense_shape.numpy(), tensor.dtype, size)
        return replace(dense, values=int(tensor.values.shape[0]))
    if isinstance(tensor, tf.RaggedTensor):
        shape = (size, *tuple(tensor.shape)[1:])
        rows = (tuple(tensor.flat_values.shape), *((int(s.shape[0]) - 1,) for s in tensor.nested_row_splits))
        return Leaf(shape, tensor.dtype.name, True, None, rows)
    if not hasattr(tensor, "shape"):
        return None
    leaf = _dense(tensor.shape, tensor.dtype, size)
    return leaf if spec.shape.rank is None else replace(leaf, traced=tuple(spec.shape))
