"""Trace the gradient exchange of `tf.distribute` in one process, without other workers.

Under `MultiWorkerMirroredStrategy`, and `MirroredStrategy` over several GPUs, Keras's optimizer sums its gradients
over all replicas before it applies the first of them. They are packed into one buffer (`bytes_per_pack` is 0 unless
`CommunicationOptions` set it), which is reduced in place and split again. So the gradients are in memory twice. The
same operations are added to the graph here, and simulated like all others (`batch_all_reduce` in
tensorflow/python/distribute/cross_device_utils.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.compat.keras_optimizers import Pairs, gradients_summed_by
from kerasmem.estimation.report import Outcome, Unmodelled
from kerasmem.models.backend import import_keras

SCOPE = "exchange_of_gradients"


@dataclass
class Exchanged:
    """Counts and bytes of a traced step's packed gradients, and of its gathered rows."""

    tensors: int = 0
    packed: int = 0
    sparse: int = 0
    gathered: int = 0


@contextlib.contextmanager
def gradients_exchanged(replicas: int) -> Iterator[Exchanged]:
    """Let steps traced inside exchange their gradients with other replicas.

    Args:
        replicas: number of devices, with this one.
    """
    import_keras()
    exchanged = Exchanged()

    def exchange(pairs: Pairs) -> Pairs:
        summed = iter(_sum(replicas, [gradient for gradient, _ in pairs if gradient is not None], exchanged))
        return [(None if gradient is None else next(summed), variable) for gradient, variable in pairs]

    with gradients_summed_by(exchange):
        yield exchanged


def _sum(replicas: int, gradients: list[Any], exchanged: Exchanged) -> list[Any]:
    import tensorflow as tf

    dense = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    with tf.name_scope(SCOPE):
        reduced = iter(_reduced(replicas, dense, exchanged))
        return [
            _gathered(replicas, gradient, exchanged) if isinstance(gradient, tf.IndexedSlices) else next(reduced)
            for gradient in gradients
        ]


def _reduced(replicas: int, gradients: list[Any], exchanged: Exchanged) -> list[Any]:
    """Return dense gradients after one all-reduce for each dtype. The last computed ones come first in the pack."""
    import tensorflow as tf

    results: dict[int, Any] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        indices = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype][::-1]
        pack = [gradients[index] for index in indices]
        packed = tf.concat([tf.reshape(gradient, [-1]) for gradient in pack], 0)
        whole = tf.raw_ops.CollectiveReduceV2(
            input=packed, group_size=replicas, group_key=1, instance_key=1, ordering_token=[], merge_op="Add",
            final_op="Id",
        )  # fmt: skip
        parts = tf.split(whole, [tf.reduce_prod(tf.shape(gradient)) for gradient in pack], axis=0)
        for index, part, gradient in zip(indices, parts, pack, strict=True):
            results[index] = tf.reshape(part, tf.shape(gradient))
        exchanged.tensors += len(pack)
        exchanged.packed += sum((gradient.shape.num_elements() or 0) * dtype.size for gradient in pack)
    return [results[index] for index in range(len(gradients))]


def _gathered(replicas: int, rows: Any, exchanged: Exchanged) -> Any:
    """Return an embedding's gradient: its rows on all replicas, concatenated."""
    import tensorflow as tf

    # The operation itself (CollectiveGatherV2) has no shape until it runs; this one allocates the same.
    values, indices = tf.concat([rows.values] * replicas, 0), tf.concat([rows.indices] * replicas, 0)
    exchanged.sparse += 1
    exchanged.gathered += (values.shape.num_elements() or 0) * values.dtype.size
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def with_exchange(outcome: Outcome, replicas: int, exchanged: Exchanged) -> Outcome:
    """Return a step's outcome with notes on its exchange."""
    notes = []
    if exchanged.tensors:
        notes.append(
            f"before the first update {exchanged.tensors} gradients are packed into one buffer of "
            f"{exchanged.packed:,} B, reduced over {replicas} replicas and split again: they are then in memory twice"
        )
    if exchanged.sparse:
        notes.append(
            f"of {exchanged.sparse} gradients only rows are exchanged: those of all {replicas} replicas take "
            f"{exchanged.gathered:,} B"
        )
    why = "on GPUs its channels and staging buffers lie outside the allocator; they depend on its version and the links"
    missing = (Unmodelled("NCCL's own buffers", why),) if notes else ()
    instant = outcome.instant
    if instant is not None and f"{SCOPE}/" in (instant.operation or ""):
        instant = replace(instant, text="while the gradients of all replicas are exchanged")
    return replace(outcome, notes=(*outcome.notes, *notes), unmodelled=(*outcome.unmodelled, *missing), instant=instant)


def not_exchanged(outcome: Outcome) -> Outcome:
    """Return the outcome of a method for one device, with the exchange as unmodelled."""
    why = (
        f"{outcome.method} looks at one device; graph has the buffers in which TensorFlow's replicas exchange gradients"
    )
    return replace(outcome, unmodelled=(*outcome.unmodelled, Unmodelled("exchange of gradients", why)))
