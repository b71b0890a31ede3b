"""The folder of a `kerasmem run`: checkpoints, plans, and where the script was, so that a death tells it."""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kerasmem import files

if TYPE_CHECKING:
    from kerasmem.training.run_state import RunState
    from kerasmem.training.steps.engine import RanOut

_LAYOUT = struct.Struct("<5q?")
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
        self.path = path = files.follow("folder", path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.own_folder("folder", path)
        self._position = files.open_plain(os.path.join(path, "position"), os.O_RDWR | os.O_CREAT)

    def note(self, position: ScriptPosition) -> None:
        """Note where the script is; this survives its death at any moment."""
        os.pwrite(self._position, _LAYOUT.pack(*position), 0)

    def position(self) -> ScriptPosition:
        """Return what was noted last."""
        noted = os.pread(self._position, _LAYOUT.size, 0)
        return ScriptPosition(*_LAYOUT.unpack(noted)) if noted else ScriptPosition()

    def read(self, name: str) -> dict[str, Any]:
        """Return an object from a file of the folder; empty where there is none."""
        try:
            with open(files.open_plain(os.path.join(self.path, name)), "rb") as file:
                data = files.read_json(file.read())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Write an object to a file of the folder, by way of another name."""
        with files.replacing(os.path.join(self.path, name)) as file:
            file.write(json.dumps(data).encode())

    def die(self, failure: dict[str, Any]) -> NoReturn:
        """Leave word of a failure, and end the process at once, saving nothing that it holds."""
        self.write("failure", failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RAN_OUT)


class Supervised:
    """Tells the watching process of each step of one `fit`.

    Args:
        folder: of the run.
        number: of the call of `fit`, from 1.

    Attributes:
        sizes: rows of a micro-batch of training ("train") and validation ("test"), where an earlier process knows them.
        is_guess: whether those of training are half of what ran out, and were not tried.
    """

    def __init__(self, folder: RunFolder, number: int) -> None:
        self._folder, self._number = folder, number
        plan = folder.read("plan")
        self.sizes = {kind: plan[f"{number} {kind}"] for kind in ("train", "test") if f"{number} {kind}" in plan}
        self.is_guess = folder.read("guess").get(f"{number} train") is True

    def before_step(self, run: RunState, rows: int) -> None:
        """Note the step that comes."""
        size = run.micro_batch_rows or 0
        self._folder.note(ScriptPosition(self._number, run.epoch, run.batch, rows, size, in_fit=True))

    def die(self, failure: RanOut, kind: str, rows: int, size: int) -> NoReturn:
        """End the process: a step on so many rows, in pieces of `size`, ran out, and this process cannot go on."""
        told = {"diagnosis": failure.diagnosis.to_dict(), "certain": failure.is_certain}
        self._folder.die({**told, "kind": kind, "rows": rows, "size": min(rows, size)})
