"""Import all of kerasmem and use its core, on any system. CI runs it on Linux, Windows and macOS."""

import importlib
import pkgutil

import h5py
import keras
import numpy as np

import kerasmem
from kerasmem import cli

for name in kerasmem.__all__:
    getattr(kerasmem, name)
for module in pkgutil.iter_modules(cli.__path__, "kerasmem.cli."):
    importlib.import_module(module.name)

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("adam", "mse")
for method in ("formula", "graph"):
    assert kerasmem.estimate(model, batch_size=4, method=method).bytes.total > 0
with h5py.File("train.h5", "w") as file:
    file["x"], file["y"] = np.arange(512, dtype="f4").reshape(64, 8), np.zeros((64, 1), "f4")
    file.create_dataset("z", data=np.arange(64), chunks=(16,), compression="gzip")
for columns in (("x", "y"), ("x", "z")):
    with kerasmem.H5ChunkSequence("train.h5", *columns, batch_size=8) as train:
        rows = np.concatenate([x for x, _ in train])
        assert np.array_equal(np.sort(rows[:, 0]), np.arange(0, 512, 8))
with kerasmem.H5ChunkSequence("train.h5", batch_size=8) as train:
    logger = kerasmem.MemoryLogger("run.csv")
    resume = kerasmem.ResumeTraining("run.resume", train)
    model.fit(train, epochs=2, verbose=0, callbacks=[logger, resume])
assert len(kerasmem.read_timeline("run.csv")) > 8 and logger.timeline.max("rss_bytes") > 0
kerasmem.fit(model, np.ones((8, 8)), np.ones((8, 1)), verbose=0)
assert kerasmem.explain_oom("MemoryError: Unable to allocate 1.39 GiB").out_of_memory
try:
    print(kerasmem.run_isolated(len, "four").get())
except kerasmem.KerasmemError as error:
    print(error)
