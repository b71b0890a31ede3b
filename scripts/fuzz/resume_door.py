"""Files to go on from: checkpoints of ResumeTraining, and the folders of interrupted conversions."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, Door, Told, Verdict, judge_command, place_of, run_command
from hdf5_doors import warm_data_commands
from hdf5_seeds import floats, hdf5_bytes
from mutation import mutate
from source_doors import _with_header, made_elsewhere, rezipped
from text_doors import changed_json

_PARTIAL = "out.h5.kerasmem-partial"
_CONVERT = ("data", "convert", "train.h5", "-o", "out.h5")
_WAYS = (("--shuffle",), ("--shuffle", "--compression", "gzip"), (), ("--compression", "gzip", "--split", "0.5,0.5"))
_TARGETS = ("../../private/secret.txt", "../../private/pipe", "../../private", "/dev/zero", "../train.h5", "missing")


class ResumeDoor(Door):
    """Changed checkpoints and conversions, gone on from."""

    name = "resume"
    packages = ("keras", "tensorflow", "numpy")
    seconds, waiting, memory, batch = 15.0, 60.0, 2 << 30, 10

    def prepare(self, folder: Path) -> None:
        """Train until there is a checkpoint, in a process of its own."""
        self.data = hdf5_bytes(_fill)
        self.checkpoint = made_elsewhere(lambda: _checkpoint(folder, self.data))["run.resume"]
        import kerasmem.streaming.sequence
        import kerasmem.training.resume  # noqa: F401

        warm_data_commands()

    def make(self, draw: random.Random) -> Case:
        """Return a changed checkpoint, or how a conversion's folder is changed."""
        files = {"train.h5": self.data}
        if draw.random() < 0.4:
            options: dict[str, object] = {
                "seed": draw.random(),
                "after": draw.randrange(4),
                "way": draw.randrange(len(_WAYS)),
            }
            return Case(files, (), {}, "a conversion", options)
        data = self.checkpoint
        if draw.random() < 0.2:
            changed = mutate(data, draw)
        elif draw.random() < 0.7:
            changed = _with_story(data, draw)
        else:
            changed = rezipped(
                data, draw, lambda inner: _with_header(inner, draw) if draw.random() < 0.5 else mutate(inner, draw)
            )
        options = {"fit": draw.random() < 0.5}
        return Case(files | {"run.resume": changed}, (), {"run.resume": data}, "a checkpoint", options)

    def attempt(self, case: Case, told: Told) -> Verdict:
        """Go on from what there is; whatever is wrong with it is told, and nothing outside is touched."""
        before = _private()
        verdict = self._converted(case, told) if case.note == "a conversion" else self._resumed(case, told)
        return verdict if _private() == before else Verdict("outside", "a file outside was changed")

    def _resumed(self, case: Case, told: Told) -> Verdict:
        from kerasmem.errors import KerasmemError

        told("fit" if case.options["fit"] else "reading")
        try:
            if case.options["fit"]:
                _train("run.resume", None)
            else:
                _read("run.resume")
        except KerasmemError as error:
            return Verdict("refused", str(error))
        except MemoryError as error:
            return Verdict("memory", str(error))
        except Exception as error:
            return Verdict("defect", place_of(error))
        return Verdict("ok")

    def _converted(self, case: Case, told: Told) -> Verdict:
        """Interrupt a conversion, change what it left, and start it again."""
        draw = random.Random(str(case.options["seed"]))
        arguments = (*_CONVERT, *_WAYS[int(str(case.options["way"]))])
        told("interrupted conversion")
        _interrupted(arguments, int(str(case.options["after"])))
        folder = Path(_PARTIAL)
        if not folder.is_dir():
            return Verdict("ok, nothing left to go on from")
        for _ in range(draw.choice((1, 1, 2))):
            _spoil(folder, draw)
        told("conversion gone on with")
        return judge_command(run_command(arguments), case)


def _fill(file: Any) -> None:
    file.create_dataset("x", data=floats(64, 4), chunks=(8, 4))
    file["y"] = np.arange(64) % 2


def _private() -> list[tuple[str, int, bytes]]:
    paths = sorted(Path("../private").iterdir())
    return [(path.name, path.lstat().st_mode, path.read_bytes() if path.is_file() else b"") for path in paths]


def _train(path: str, stop_after: int | None) -> None:
    import keras

    from kerasmem import H5ChunkSequence, ResumeTraining

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == stop_after:
                raise InterruptedError

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    with H5ChunkSequence("train.h5", batch_size=16, workers=0) as sequence:
        resume = ResumeTraining(path, sequence, save_freq=1)
        model.fit(sequence, epochs=2, callbacks=[resume, Stop()], verbose=0)


def _read(path: str) -> None:
    from kerasmem import H5ChunkSequence
    from kerasmem.training.checkpoint import Checkpoint
    from kerasmem.training.dataset_sources import SequenceSource

    with H5ChunkSequence("train.h5", batch_size=16, workers=0) as sequence:
        source = SequenceSource(sequence)
        checkpoint = Checkpoint(os.path.abspath(path), source)
        checkpoint.points()
        saved = checkpoint.read()
        if saved is not None:
            checkpoint.check(steps=4, at_once=1)
            source.go_to(saved.position, saved.run)


def _checkpoint(folder: Path, data: bytes) -> dict[str, bytes]:
    os.chdir(folder)
    Path("train.h5").write_bytes(data)
    with contextlib.suppress(InterruptedError):
        _train("run.resume", 2)
    return {"run.resume": Path("run.resume").read_bytes()}


def _with_story(data: bytes, draw: random.Random) -> bytes:
    """Return a checkpoint that says something else of the run."""
    memory = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(memory, "w") as new:
        for name in old.namelist():
            inner = old.read(name)
            if name == "saved.npy":
                text = np.load(io.BytesIO(inner)).tobytes()
                story = io.BytesIO()
                np.save(
                    story,
                    np.frombuffer(
                        changed_json(text, draw, ("float16", "bfloat16", "string", "resource", "O")), np.uint8
                    ),
                )
                inner = story.getvalue()
            new.writestr(name, inner)
    return memory.getvalue()


def _interrupted(arguments: tuple[str, ...], after: int) -> None:
    """Convert, with a checkpoint as often as there can be one, and break off after so many."""
    from kerasmem.datatools.converting import job

    saved, count = job.Job.checkpoint, 0
    size = job.CHECKPOINT_BYTES

    def checkpoint(self: Any, state: Any) -> None:
        nonlocal count
        saved(self, state)
        count += 1
        if count > after:
            raise KeyboardInterrupt

    job.Job.checkpoint, job.CHECKPOINT_BYTES = checkpoint, 1  # type: ignore[method-assign]
    try:
        run_command(arguments)
    finally:
        job.Job.checkpoint, job.CHECKPOINT_BYTES = saved, size  # type: ignore[method-assign]


def _spoil(folder: Path, draw: random.Random) -> None:
    """Change a file of a conversion, or put a link in its place."""
    path = draw.choice([each for each in sorted(folder.iterdir()) if each.is_symlink() or not each.is_dir()])
    kind = draw.random()
    if kind < 0.15:
        path.unlink()
        path.symlink_to(draw.choice(_TARGETS))
        return
    if kind < 0.2:
        path.unlink()
        os.mkfifo(path) if draw.random() < 0.5 else path.mkdir()
        return
    if not path.is_file() or path.is_symlink():
        return
    data = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.8:
        with contextlib.suppress(ValueError):  # it was changed before, and is no JSON any more
            path.write_bytes(changed_json(data, draw))
    else:
        path.write_bytes(mutate(data, draw) if data else json.dumps({"a": 1}).encode())
