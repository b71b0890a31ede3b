"""States of a sequence that are saved, and the settings that a resumed sequence must share with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kerasmem.errors import DataError, UsageError
from kerasmem.streaming.order import Position
from kerasmem.streaming.stream_plan import StreamPlan

FORMAT_VERSION = 1
_SHOWN = 100  # characters
# Fixes for settings that are not simply an argument of the same name.
_REMEDIES = {
    "shard": "use as many workers as before, and load in each worker the state that it saved",
    "datasets": "the files, or the names, shapes, types or roles of the datasets have changed; use the saved ones",
    "selection": "use the saved `rows`",
    "batches": "use the saved data and settings",
    "windows": "the order of rows depends on it; use the saved memory_budget",
    "block_rows": "the order of rows depends on it; use the saved memory_budget and the same chunks",
}


def compatibility(plan: StreamPlan) -> dict[str, Any]:
    """Return the settings that determine every batch together with the seed.

    They include names, shapes, types and roles of the datasets, the order of several files, and the sizes that the
    memory budget gives to windows and blocks. Paths and the code of `transform` are not included.
    """
    layout, settings, selection = plan.layout, plan.settings, plan.selection
    datasets = repr([(dataset.name, dataset.shape, dataset.dtype) for dataset in layout.datasets]) + repr(plan.parts)
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
        "datasets": _digest((datasets + files).encode("utf-8", "surrogateescape")),
        "dtype": _short([column.dtype for column in plan.columns]),
        "scale": _short([column.scale and [column.scale, column.offset] for column in plan.columns]),
        "selection": _digest(rows),
        "batches": plan.num_batches,
        "windows": windows if settings.shuffle else None,
        "block_rows": block_rows if settings.shuffle and (windows > 1 or shared) else None,
    }


def make_state(plan: StreamPlan, position: Position) -> dict[str, Any]:
    """Return the state of a sequence before the training batch at `position`."""
    return {
        "format_version": FORMAT_VERSION,
        "seed": plan.settings.seed,
        "epoch": position.epoch,
        "batch": position.batch,
        "agrees": compatibility(plan),
    }


def read_state(state: Any, plan: StreamPlan) -> tuple[int, Position]:
    """Return the seed and the position of a state, which may have been through JSON.

    Args:
        state: result of `make_state`.
        plan: plan of the sequence to resume. If its seed was drawn, any seed of the state is accepted.

    Raises:
        DataError: If this is not a state, or has another version.
        UsageError: If the sequence would deliver other batches. The message names the setting.
    """
    current = compatibility(plan)
    if not isinstance(state, Mapping) or not isinstance(state.get("agrees"), Mapping):
        raise DataError("state must be the result of state_dict()")
    if state.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"state: format_version must be {FORMAT_VERSION}; got {state.get('format_version')!r}. Load the state with "
            "the version of kerasmem that saved it"
        )
    for name in ("seed", "epoch", "batch"):
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(f"state: {name} must be a whole number from 0; got {value!r}")
    for name, value in current.items():
        saved = state["agrees"].get(name)
        if saved != value:
            remedy = _REMEDIES.get(name, f"create the sequence with the saved {name}")
            raise UsageError(f"state: {name} was {saved!r} when it was saved and is {value!r} now; {remedy}")
    if not plan.settings.seed_drawn and plan.settings.shuffle and state["seed"] != plan.settings.seed:
        raise UsageError(
            f"state: seed was {state['seed']} when it was saved and is {plan.settings.seed} now; "
            "create the sequence with the saved seed, or with seed=None to adopt it"
        )
    if state["batch"] >= plan.num_batches:
        raise DataError(f"state: batch must be below {plan.num_batches}, the batches of an epoch; got {state['batch']}")
    return state["seed"], Position(state["epoch"], state["batch"])


def _short(values: list[Any]) -> list[Any] | str:
    """Return the values if a message can show them, or else their digest."""
    text = repr(values)
    return values if len(text) <= _SHOWN else _digest(text.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
