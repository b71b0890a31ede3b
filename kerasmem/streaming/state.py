"""Save the position of training as plain numbers, and check that a sequence can resume there. Pure arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kerasmem.errors import DataError, UsageError
from kerasmem.streaming.order import Position
from kerasmem.streaming.plan import StreamPlan

FORMAT_VERSION = 1
_SHOWN = 100  # characters
_POSITION = ("seed", "epoch", "batch")
# How to make settings agree whose name does not say it.
_REMEDIES = {
    "shard": "each worker has to load the state that it saved itself, and there have to be as many as before",
    "datasets": "the names, shapes or types of the datasets read are others, their use as x, y and sample_weight, "
    "or the files; use the files and names of the saved one",
    "selection": "use the `rows` of the saved one",
    "batches": "use the data and settings of the saved one",
    "windows": "the order of rows depends on it; use the memory_budget of the saved one",
    "block_rows": "the order of rows depends on it; use the memory_budget of the saved one, and the same chunks",
}


def compatibility(plan: StreamPlan) -> dict[str, Any]:
    """Return the settings that, with the seed, determine every batch, independent of file paths.

    Names, shapes, types and use of the datasets count, of several files their order too; the memory budget counts as
    far as the order of the rows depends on it. What `transform` does is not known.
    """
    layout, settings, selection = plan.layout, plan.settings, plan.selection
    named = repr([(dataset.name, dataset.shape, dataset.dtype) for dataset in layout.datasets]) + repr(plan.parts)
    files = repr(layout.identity) if layout.identity else ""
    sizes = plan.blocks.grid.sizes
    block_rows = sizes[0] if len(sizes) == 1 else _digest(repr(sizes).encode())
    rows = repr(selection).encode() if isinstance(selection, range) else selection.tobytes()
    windows = -(-plan.blocks.count // plan.memory.window_blocks)
    shared = settings.shard[1] > 1
    return {
        "shard": list(settings.shard),
        "batch_size": settings.batch_size,
        "shuffle": settings.shuffle,
        "remainder": settings.remainder,
        "datasets": _digest((named + files).encode("utf-8", "surrogateescape")),
        "dtype": _short([column.dtype for column in plan.columns]),
        "scale": _short([column.scale and [column.scale, column.offset] for column in plan.columns]),
        "selection": _digest(rows),
        "batches": plan.num_batches,
        "windows": windows if settings.shuffle else None,
        "block_rows": block_rows if settings.shuffle and (windows > 1 or shared) else None,
    }


def make_state(plan: StreamPlan, position: Position) -> dict[str, Any]:
    """Return the state of a sequence whose next training batch is at `position`."""
    return {
        "format_version": FORMAT_VERSION,
        "seed": plan.settings.seed,
        "epoch": position.epoch,
        "batch": position.batch,
        "agrees": compatibility(plan),
    }


def read_state(state: Any, plan: StreamPlan) -> tuple[int, Position]:
    """Return the seed and the position of a state that `make_state` wrote, also after a trip through JSON.

    Args:
        state: the state.
        plan: of the sequence that is to go on from it; where its seed was drawn, it takes that of the state.

    Raises:
        DataError: If this is no state, or one of another version.
        UsageError: If the sequence would deliver other batches; the message names the setting.
    """
    here = compatibility(plan)
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
    for name, value in here.items():
        saved = state["agrees"].get(name)
        if saved != value:
            remedy = _REMEDIES.get(name, f"make the sequence with the {name} of the saved one")
            raise UsageError(f"state: {name} was {saved!r} when it was saved and is {value!r} now; {remedy}")
    if not plan.settings.seed_drawn and plan.settings.shuffle and state["seed"] != plan.settings.seed:
        raise UsageError(
            f"state: seed was {state['seed']} when it was saved and is {plan.settings.seed} now; "
            "make the sequence with that seed, or with seed=None to take it over"
        )
    if state["batch"] >= plan.num_batches:
        raise DataError(f"state: batch {state['batch']} does not exist; an epoch has {plan.num_batches}")
    return state["seed"], Position(state["epoch"], state["batch"])


def _short(values: list[Any]) -> list[Any] | str:
    """Return values that a message can show, or a digest of many."""
    text = repr(values)
    return values if len(text) <= _SHOWN else _digest(text.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
