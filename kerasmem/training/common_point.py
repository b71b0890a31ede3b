"""Workers of a strategy that were started again find the last point that all of them have saved.

They save at the same batches, but one may die before it has saved what another has. As each step takes all of them,
none is ahead by more than one point: with the last two of each there is one that all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasmem.cluster import worker_of
from kerasmem.errors import UsageError
from kerasmem.hdf5.layout import shown

BEGINNING = 0
_KEPT = 2


def find_common_point(strategy: Any, points: Sequence[int], path: str) -> int:
    """Return the last point that all workers have; every worker has to ask.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy`.
        points: numbers above 0 that this worker can go on from, two at most, the larger the later.
        path: of this worker's file, for the message.

    Returns:
        One of `points`, or 0 where all have to start at the beginning.

    Raises:
        UsageError: there is none that all have.
    """
    common = latest_common(points_of_all(strategy, points))
    if common is None:
        raise UsageError(
            f"{shown(path)}: the workers' files have no point of training in common; give each worker the file that "
            "it saved, or delete all of them to start over"
        )
    return common


def latest_common(points: Sequence[Sequence[int]]) -> int | None:
    """Return the largest number that all have; who has fewer than two has the beginning, 0, too."""
    each = [set(some) | ({BEGINNING} if len(some) < _KEPT else set()) for some in points]
    common = set.intersection(*each)
    return max(common) if common else None


def points_of_all(strategy: Any, points: Sequence[int]) -> list[list[int]]:
    """Return the points of every worker."""
    import tensorflow as tf

    index, count = worker_of(strategy)
    own = np.zeros((count, _KEPT), np.int64)
    own[index, : len(points)] = points
    replicas = strategy.num_replicas_in_sync // count

    def exchange() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(own))

    found = strategy.experimental_local_results(strategy.run(exchange))[0].numpy() // replicas
    return [[int(point) for point in some if point] for some in found]
