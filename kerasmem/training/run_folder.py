"""The folder of a `kerasmem run`: checkpoints, plans, and where the script was, so that a death tells it."""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any, NamedTuple

_LAYOUT = struct.Struct("<6q")
RAN_OUT = 86  # exit code of a script that ran out of memory in a step that its process could not survive
VARIABLE = "KERASMEM_RUN_FOLDER"


class ScriptPosition(NamedTuple):
    """Where a script was when it was last heard of.

    Attributes:
        fit: number of the call of `fit`, from 1; 0 before the first.
        epoch: Keras's epoch, from 0.
        batch: batches of it that were trained on.
        rows: of the batch in progress.
        size: rows of the micro-batches; 0 for whole batches.
        in_fit: whether it was within a call of `fit`.
    """

    fit: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0
    size: int = 0
    in_fit: bool = False


class RunFolder:
    """What the script's process and the one that watches it tell each other.

    Args:
        path: of the folder; it is made where there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, exist_ok=True)
        name = os.path.join(path, "position")
        if not os.path.exists(name):
            with open(name, "wb") as file:
                file.write(bytes(_LAYOUT.size))
        with open(name, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def note(self, position: ScriptPosition) -> None:
        """Note where the script is; this survives its death at any moment."""
        self._map[:] = _LAYOUT.pack(*position)

    def position(self) -> ScriptPosition:
        """Return what was noted last."""
        fit, epoch, batch, rows, size, in_fit = _LAYOUT.unpack(self._map[:])
        return ScriptPosition(fit, epoch, batch, rows, size, bool(in_fit))

    def read(self, name: str) -> dict[str, Any]:
        """Return an object from a file of the folder; empty where there is none."""
        try:
            with open(os.path.join(self.path, name), encoding="utf-8") as file:
                data = json.load(file)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Write an object to a file of the folder, by way of another name."""
        path = os.path.join(self.path, name)
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(path + ".part", path)
