"""Where training stands, as a few plain numbers, and whether a sequence can go on from there. Pure arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kerasmem.errors import DataError, UsageError
from kerasmem.hdf5.grid import Grid
from kerasmem.hdf5.layout import DataLayout

FORMAT_VERSION = 1
_POSITION = ("seed", "epoch", "batch")
# What has to agree, and what to do where it does not; in the order in which differences are told.
_REMEDIES = {
    "shard": "each worker has to load the state that it saved itself",
    "batch_size": "make the sequence with the batch_size of the saved one",
    "shuffle": "make the sequence with the shuffle of the saved one",
    "drop_remainder": "make the sequence with the drop_remainder of the saved one",
    "datasets": "the names, shapes or types of the datasets read are others, or the files; use the files and names of "
    "the saved one",
    "selection": "use the `rows` of the saved one",
    "batches": "use the data and settings of the saved one",
    "windows": "the order of rows depends on it; use the memory_budget of the saved one",
    "block_rows": "the order of rows depends on it; use the memory_budget of the saved one, and the same chunks",
}


def make_agreement(
    *,
    layout: DataLayout,
    grid: Grid,
    selection: range | np.ndarray,
    shard: tuple[int, int],
    batch_size: int,
    batches: int,
    shuffle: bool,
    drop_remainder: bool,
    windows: int,
) -> dict[str, Any]:
    """Return what makes a batch what it is, wherever the file lies: equal agreements and seeds, equal batches.

    Args:
        layout: the datasets read: names, shapes and types count; of several files their order too.
        grid: the blocks.
        selection: the rows used.
        shard: (index, count).
        batch_size: rows a batch.
        batches: batches an epoch.
        shuffle: whether rows are shuffled.
        drop_remainder: whether a last batch that is not full is left out.
        windows: windows an epoch; counts where rows are shuffled.
    """
    named = repr([(dataset.name, dataset.shape, dataset.dtype) for dataset in layout.datasets])
    files = repr(layout.identity) if layout.identity else ""
    sizes = grid.sizes
    block_rows = sizes[0] if len(sizes) == 1 else _digest(repr(sizes).encode())
    rows = repr(selection).encode() if isinstance(selection, range) else selection.tobytes()
    return {
        "shard": list(shard),
        "batch_size": batch_size,
        "shuffle": shuffle,
        "drop_remainder": drop_remainder,
        "datasets": _digest((named + files).encode("utf-8", "surrogateescape")),
        "selection": _digest(rows),
        "batches": batches,
        "block_rows": block_rows if shuffle and (windows > 1 or shard[1] > 1) else None,
        "windows": windows if shuffle else None,
    }


def make_state(agreement: Mapping[str, Any], *, seed: int, epoch: int, batch: int) -> dict[str, Any]:
    """Return the state of a sequence whose next batch to be trained on is `batch` of `epoch`."""
    return {"format_version": FORMAT_VERSION, "seed": seed, "epoch": epoch, "batch": batch, "agrees": {**agreement}}


def read_state(state: Any, agreement: Mapping[str, Any], *, seed: int | None) -> tuple[int, int, int]:
    """Return (seed, epoch, batch) of a state that `make_state` wrote, also after a trip through JSON.

    Args:
        state: the state.
        agreement: what the sequence that shall go on from it has to offer.
        seed: its seed; None where it takes that of the state.

    Raises:
        DataError: this is no state, or one of another version.
        UsageError: the sequence would deliver other batches; the message names the setting.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("agrees"), Mapping):
        raise DataError("state: this is not what state_dict() returned")
    if state.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"state: format_version {state.get('format_version')!r} is not known here, {FORMAT_VERSION} is; "
            "load it with the version of kerasmem that saved it"
        )
    for name in _POSITION:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"state: {name} {value!r} is not a whole number from 0")
    for name, remedy in _REMEDIES.items():
        saved, here = state["agrees"].get(name), agreement[name]
        if saved != here:
            raise UsageError(f"state: {name} was {saved!r} when it was saved and is {here!r} now; {remedy}")
    if seed is not None and state["seed"] != seed and agreement["shuffle"]:
        raise UsageError(
            f"state: seed was {state['seed']} when it was saved and is {seed} now; "
            "make the sequence with that seed, or with seed=None to take it over"
        )
    if state["batch"] >= agreement["batches"]:
        raise DataError(f"state: batch {state['batch']} does not exist; an epoch has {agreement['batches']}")
    return state["seed"], state["epoch"], state["batch"]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
