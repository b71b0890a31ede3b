"""Changed checkpoints of ResumeTraining, resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case, Report, Target, Verdict, place_of
from hdf5_seeds import floats, hdf5_bytes
from hdf5_targets import warm_data_commands
from mutation import mutate

_VALUES = (
    -1, 0, 1, 2, 3, 1 << 31, 1 << 63, 1 << 70, -(1 << 63), 0.5, 1e308, float("nan"), float("inf"), None, True, [], {},
    "", [None], {"": None}, [[[[[[[[1]]]]]]]], "x" * 5000, "\x1b[2J", "../../private/secret.txt", "float16", "bfloat16",
    "string", "resource", "O", "9" * 400,
)  # fmt: skip
_DTYPES = (b"'|O'", b"'<f4'", b"'<f8'", b"'|S5'", b"'<U3'", b"[('a', '<f4'), ('b', '|O')]", b"'|V8'", b"'<c8'", b"1/0")
_SHAPES = (b"(20, 3)", b"()", b"(0,)", b"(-1,)", b"(9999999999,)", b"(2**40,)", b"(1,) * 40", b"(20.0,)", b"(True,)")


class ResumeTarget(Target):
    """Changed checkpoints, resumed by `fit`."""

    name = "resume"
    seconds, waiting, memory, batch = 15.0, 60.0, 2 << 30, 10

    def prepare(self, folder: Path) -> None:
        """Train until there is a checkpoint, in a process of its own."""
        self.data = hdf5_bytes(_fill)
        path = folder / "run.resume"
        child = os.fork()
        if not child:  # its threads and memory end with it
            try:
                (folder / "train.h5").write_bytes(self.data)
                with contextlib.suppress(InterruptedError):
                    _train("run.resume", 2)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.checkpoint = path.read_bytes()
        import kerasmem.streaming.sequence
        import kerasmem.training.resume  # noqa: F401

        warm_data_commands()

    def make(self, draw: random.Random) -> Case:
        """Return a changed checkpoint: its bytes, its description or the members of its archive."""
        data = self.checkpoint
        changed = mutate(data, draw) if draw.random() < 0.25 else _repacked(data, draw)
        return Case({"train.h5": self.data, "run.resume": changed}, (), {"run.resume": data})

    def attempt(self, case: Case, report: Report) -> Verdict:
        """Resume. It must succeed or raise an error of kerasmem, and change no file outside."""
        before = _private()
        report("fit")
        try:
            _train("run.resume", None)
            verdict = Verdict("ok")
        except MemoryError as error:
            verdict = Verdict("memory", str(error))
        except Exception as error:
            from kerasmem.errors import KerasmemError

            is_refused = isinstance(error, KerasmemError)
            verdict = Verdict("refused", str(error)) if is_refused else Verdict("defect", place_of(error))
        return verdict if _private() == before else Verdict("outside", "a file outside was changed")


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
    parts = [keras.layers.Dense(3), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    with H5ChunkSequence("train.h5", batch_size=16, workers=0) as sequence:
        resume = ResumeTraining(path, sequence, save_freq=1)
        model.fit(sequence, epochs=2, callbacks=[resume, Stop()], verbose=0)


def _repacked(data: bytes, draw: random.Random) -> bytes:
    """Return an archive with one member changed, or named or packed differently."""
    memory = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(memory, "w") as new:
        names = old.namelist()
        chosen = "saved.npy" if "saved.npy" in names and draw.random() < 0.7 else draw.choice(names)
        for name in names:
            inner, packing = old.read(name), zipfile.ZIP_STORED
            if name == chosen:
                inner = _described(inner, draw) if name == "saved.npy" else _with_header(inner, draw)
                if draw.random() < 0.05:
                    name = draw.choice(("../out.npy", "/tmp/x.npy", "x", "y.npy", "\x1b[31m.npy", "x" * 300))
                if draw.random() < 0.02:
                    inner, packing = inner + bytes(100 << 20), zipfile.ZIP_DEFLATED
            new.writestr(name, inner, packing)
    return memory.getvalue()


def _described(inner: bytes, draw: random.Random) -> bytes:
    """Return the JSON description of a run with some values changed."""
    story = json.loads(np.load(io.BytesIO(inner)).tobytes())
    for _ in range(1 + int(draw.expovariate(0.8))):
        places: list[tuple[Any, Any]] = []
        pending = [story]
        while pending:
            node = pending.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            places += [(node, key) for key in keys]
            pending += [node[key] for key in keys]
        node, key = draw.choice(places)
        if draw.random() < 0.2:
            del node[key]
        else:
            other, source = draw.choice(places)
            node[key] = draw.choice((*_VALUES, [node[key]], json.loads(json.dumps(other[source]))))
        if not story:
            break
    text = json.dumps(story).encode("utf-8", "surrogatepass")
    memory = io.BytesIO()
    np.save(memory, np.frombuffer(text, np.uint8))
    return memory.getvalue()


def _with_header(data: bytes, draw: random.Random) -> bytes:
    """Return an .npy with changed bytes, or with a sound header of other dtype and shape."""
    if draw.random() < 0.5:
        return mutate(data, draw)
    size = struct.unpack("<H", data[8:10])[0]
    dtype, shape = draw.choice(_DTYPES), draw.choice(_SHAPES)
    header = draw.choice((
        b"{'descr': " + dtype + b", 'fortran_order': False, 'shape': " + shape + b"}",
        b"__import__('os').system('touch OWNED')", b"(" * 5000,
    ))  # fmt: skip
    header = header.ljust((len(header) + 10) // 64 * 64 + 54) + b"\n"
    return data[:8] + struct.pack("<H", len(header) % 65536) + header + data[10 + size :]
