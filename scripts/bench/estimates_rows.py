"""The designed selection of rows of the estimates' bench: which model, batch, optimizer, mode and dtypes, in order.

Nothing is drawn by chance. Every round goes once through the models; what varies moves on by fixed strides, so a prefix
of the rows is balanced over models, modes and optimizers, and a run that was stopped early is a fair sample already.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from kerasmem.estimation.truth.rows import KERNELS, Row

ROUNDS = 5
HEAVY_ROUNDS = 4
MODES = ("graph", "xla")
# Eleven places, a prime, so that any stride visits all of them; what people use most has two.
OPTIMIZER_CYCLE = (
    "adam", "sgd", "adamw", "momentum", "rmsprop", "adam", "lion", "adafactor", "adam_ema", "sgd", "adam_accumulate",
)  # fmt: skip
QUICK_ROWS = 24


class ModelEntry(Protocol):
    """What the design must know of a model of the zoo."""

    @property
    def batches(self) -> tuple[int, ...]: ...
    @property
    def held_out(self) -> bool: ...
    @property
    def heavy(self) -> bool: ...
    @property
    def modes(self) -> tuple[str, ...]: ...
    @property
    def mixed(self) -> tuple[str, ...]: ...


def design(zoo: Mapping[str, ModelEntry]) -> list[Row]:
    """Return all rows, in the order in which they are measured."""
    rows: dict[str, Row] = {}
    for turn in range(ROUNDS):
        heavies = 0
        for index, (name, entry) in enumerate(zoo.items()):
            heavies += entry.heavy
            if entry.heavy and turn >= HEAVY_ROUNDS:
                continue
            mode = _mode(entry, index if not entry.heavy else heavies, turn)
            row = Row(
                model=name,
                batch_size=entry.batches[(index + turn // 2) % len(entry.batches)],
                optimizer=OPTIMIZER_CYCLE[(3 * index + 4 * turn) % len(OPTIMIZER_CYCLE)],
                mode=mode,
                dtype=_dtype(entry, index, turn),
                metrics=(index + turn) % 3 == 0,
                held_out=entry.held_out,
                heavy=entry.heavy,
            )
            rows.setdefault(row.key, row)
    # What XLA compiles for minutes comes last, so that a short run gets far.
    return sorted(rows.values(), key=lambda row: row.heavy and row.mode == "xla")


def _mode(entry: ModelEntry, index: int, turn: int) -> str:
    mode = MODES[(index + turn) % 2]
    if entry.heavy and turn > 1:  # XLA once, in the first round or in the second
        mode = "graph"
    return mode if mode in entry.modes else entry.modes[0]


def _dtype(entry: ModelEntry, index: int, turn: int) -> str:
    if turn == 3 or (turn == 2 and index % 4 == 0):
        return entry.mixed[(index // 2) % len(entry.mixed)]
    if turn == 4 and index % 4 == 1:
        return entry.mixed[(index // 4 + 1) % len(entry.mixed)]
    return "float32"


def on_kernels(rows: list[Row], kinds: list[str]) -> list[Row]:
    """Return graph rows once for each kind of kernels asked for, side by side; XLA rows as they are."""
    return [
        replace(row, kernels=kind)
        for row in rows
        for kind in (kinds if row.mode == "graph" else KERNELS[:1])
    ]  # fmt: skip


def one_a_model(rows: list[Row]) -> list[Row]:
    """Return of each model its first graph row that is not heavy."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.mode == "graph" and not row.heavy:
            first.setdefault(row.model, row)
    return list(first.values())


def quick(rows: list[Row]) -> list[Row]:
    """Return rows of the first round that are cheap to train, and mixed ones: half graph, half XLA, each model once."""
    chosen: list[Row] = []
    for mode in MODES:
        ours = [row for row in rows if row.mode == mode and not (row.heavy and mode == "xla")]
        mixed = [row for row in ours if row.dtype != "float32" and not row.heavy][:3]
        taken = {row.model for row in [*chosen, *mixed]}
        plain = [row for row in ours if row.dtype == "float32" and row.model not in taken]
        first = list({row.model: row for row in reversed(plain)}.values())[::-1]
        chosen += [*mixed, *first[: QUICK_ROWS // 2 - len(mixed)]]
    keys = {row.key for row in chosen}
    return [row for row in rows if row.key in keys]


def select(rows: list[Row], patterns: list[str]) -> list[Row]:
    """Return the rows whose key matches one of the shell patterns (a bare word matches anywhere); all for none."""
    if not patterns:
        return rows
    globs = [each if any(sign in each for sign in "*?[") else f"*{each}*" for each in patterns]
    return [row for row in rows if any(fnmatch.fnmatchcase(row.key, each) for each in globs)]
