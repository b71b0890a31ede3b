"""What a supervised script leaves behind while it trains, so that a death tells where it was: a few numbers on disk."""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

_LAYOUT = struct.Struct("<6q")
RAN_OUT = 86  # exit code of a script that ran out of memory in a step that its process could not survive
FOLDER = "KERASMEM_RUN_FOLDER"


@dataclass(frozen=True)
class Standing:
    """Where a script was when it was last heard of.

    Attributes:
        fit: number of the call of `fit`, from 1; 0 before the first.
        epoch: Keras's epoch, from 0.
        batch: batches of it that were trained on.
        rows: of the batch in progress.
        size: rows of the micro-batches; 0 for whole batches.
        in_fit: whether it was within a call of `fit`.
    """

    fit: int
    epoch: int
    batch: int
    rows: int
    size: int
    in_fit: bool


class Record:
    """The record in a run's folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "standing")
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(bytes(_LAYOUT.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def write(self, standing: Standing) -> None:
        """Note where the script is; survives its death at any moment."""
        values = (standing.fit, standing.epoch, standing.batch, standing.rows, standing.size, standing.in_fit)
        self._map[:] = _LAYOUT.pack(*values)

    def read(self) -> Standing:
        """Return what was noted last."""
        fit, epoch, batch, rows, size, in_fit = _LAYOUT.unpack(self._map[:])
        return Standing(fit, epoch, batch, rows, size, bool(in_fit))


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return an object from the folder; empty where there is none."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(folder: str, name: str, data: dict[str, Any]) -> None:
    """Write an object by way of another name."""
    path = os.path.join(folder, name)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(data, file)
    os.replace(path + ".part", path)
