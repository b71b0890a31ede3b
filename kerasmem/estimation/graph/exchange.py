"""The gradient exchange of `tf.distribute` in a step that is traced in one process, with no other worker there.

Under `MultiWorkerMirroredStrategy`, and `MirroredStrategy` over several GPUs, Keras's optimizer sums its gradients
over all replicas before it applies the first of them. So all gradients are there at once; they are packed end to end
into one buffer (`bytes_per_pack` is 0 unless the user's `CommunicationOptions` say otherwise), that buffer is reduced
in place, and it is split again: twice the gradients, before and after. Here the same operations are put into the
graph, where the simulation meets them as any other (from `batch_all_reduce` in
`tensorflow/python/distribute/cross_device_utils.py`).
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
    """What a traced step exchanges: tensors and bytes of the packed gradients, and of the rows gathered beside them."""

    tensors: int = 0
    packed: int = 0
    sparse: int = 0
    gathered: int = 0


@contextlib.contextmanager
def gradients_exchanged(replicas: int) -> Iterator[Exchanged]:
    """Have steps that are traced inside exchange their gradients with so many replicas.

    Args:
        replicas: devices, this one among them.
    """
    import_keras()
    found = Exchanged()

    def exchange(pairs: Pairs) -> Pairs:
        summed = iter(_sum(replicas, [gradient for gradient, _ in pairs if gradient is not None], found))
        return [(None if gradient is None else next(summed), variable) for gradient, variable in pairs]

    with gradients_summed_by(exchange):
        yield found


def _sum(replicas: int, gradients: list[Any], found: Exchanged) -> list[Any]:
    import tensorflow as tf

    dense = [each for each in gradients if not isinstance(each, tf.IndexedSlices)]
    with tf.name_scope(SCOPE):
        reduced = iter(_reduced(replicas, dense, found))
        return [
            _gathered(replicas, each, found) if isinstance(each, tf.IndexedSlices) else next(reduced)
            for each in gradients
        ]


def _reduced(replicas: int, gradients: list[Any], found: Exchanged) -> list[Any]:
    """Return dense gradients after one all-reduce for each dtype: what was computed last comes first in the pack."""
    import tensorflow as tf

    results: dict[int, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in gradients):
        places = [place for place, each in enumerate(gradients) if each.dtype == dtype][::-1]
        pack = [gradients[place] for place in places]
        packed = tf.concat([tf.reshape(each, [-1]) for each in pack], 0)
        whole = tf.raw_ops.CollectiveReduceV2(
            input=packed, group_size=replicas, group_key=1, instance_key=1, ordering_token=[], merge_op="Add",
            final_op="Id",
        )  # fmt: skip
        parts = tf.split(whole, [tf.reduce_prod(tf.shape(each)) for each in pack], axis=0)
        for place, part, each in zip(places, parts, pack, strict=True):
            results[place] = tf.reshape(part, tf.shape(each))
        found.tensors += len(pack)
        found.packed += sum((each.shape.num_elements() or 0) * dtype.size for each in pack)
    return [results[place] for place in range(len(gradients))]


def _gathered(replicas: int, rows: Any, found: Exchanged) -> Any:
    """Return a gradient of some rows (an embedding's): those of all replicas are put one after another."""
    import tensorflow as tf

    # The operation itself (CollectiveGatherV2) has no shape until it runs; this one allocates the same.
    values, indices = tf.concat([rows.values] * replicas, 0), tf.concat([rows.indices] * replicas, 0)
    found.sparse += 1
    found.gathered += (values.shape.num_elements() or 0) * values.dtype.size
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def with_exchange(outcome: Outcome, replicas: int, found: Exchanged) -> Outcome:
    """Return the outcome of a step with its exchange named."""
    notes = []
    if found.tensors:
        notes.append(
            f"before the first update {found.tensors} gradients are packed into one buffer of {found.packed:,} B, "
            f"reduced over {replicas} replicas and split again: while that is done they are there twice"
        )
    if found.sparse:
        notes.append(
            f"of {found.sparse} gradients only rows are exchanged: those of all {replicas} replicas take "
            f"{found.gathered:,} B"
        )
    why = "on GPUs its channels and staging buffers lie outside the allocator; they depend on its version and the links"
    missing = (Unmodelled("NCCL's own buffers", why),) if notes else ()
    instant = outcome.instant
    if instant is not None and f"{SCOPE}/" in (instant.operation or ""):
        instant = replace(instant, text="while the gradients of all replicas are exchanged")
    return replace(outcome, notes=(*outcome.notes, *notes), unmodelled=(*outcome.unmodelled, *missing), instant=instant)


def not_exchanged(outcome: Outcome) -> Outcome:
    """Return the outcome of a method that knows one device only, with what it leaves out named."""
    why = (
        f"{outcome.method} looks at one device; graph has the buffers in which TensorFlow's replicas exchange gradients"
    )
    return replace(outcome, unmodelled=(*outcome.unmodelled, Unmodelled("exchange of gradients", why)))
