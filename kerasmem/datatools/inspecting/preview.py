"""What `H5ChunkSequence` would do with a file: its order, memory and mixing, without Keras."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kerasmem.hdf5.layout import DataLayout
from kerasmem.hdf5.scan import scan_files
from kerasmem.hdf5.settings import Access, read_parts
from kerasmem.streaming.file_order import read_windows
from kerasmem.streaming.mixing import examine
from kerasmem.streaming.plan import StreamPlan, StreamSettings, dataset_names, make_plan
from kerasmem.streaming.quality import ShuffleQuality


def preview_plan(
    path: str,
    x: str,
    y: str | None,
    *,
    batch_size: int,
    access: Access | None = None,
    layout: DataLayout | None = None,
) -> StreamPlan:
    """Return the plan of `H5ChunkSequence(path, x, y)` with its other settings as they are.

    Args:
        path: the file.
        x: the features.
        y: the targets; None for none, and then rows come in file order.
        batch_size: rows a batch.
        access: what may be read.
        layout: how the datasets are stored, in place of what the file says: for files that are yet to be written.

    Raises:
        DataError: the datasets cannot be trained from.
        UsageError: no memory budget of the usual size will do.
    """
    parts = read_parts(x, y, None)
    layout = layout or scan_files([path], dataset_names(parts), access or Access())
    return make_plan(layout, parts, StreamSettings(batch_size=batch_size, shuffle=y is not None))


def preview_mixing(plan: StreamPlan, labels: str, access: Access | None = None) -> ShuffleQuality:
    """Return how well a plan mixes labels, which are read for that."""

    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        paths = [file.path for file in plan.layout.files]
        return (window[labels] for _, window in read_windows(paths, [labels], access=access, rows=rows))

    return examine(plan, labels, read)
