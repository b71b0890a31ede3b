"""Keras on JAX and numpy: what can be read there, and why the rest is missing."""

import importlib.util
import json

import pytest

SCRIPT = """
import json, sys
before = {name for name in sys.modules}
import kerasmem
kerasmem.MemoryLogger
after_import = "tensorflow" in sys.modules
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
logger = kerasmem.MemoryLogger("run.csv", epoch_logs="bytes")
x, y = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")
history = {}
if keras.config.backend() == "numpy":  # which cannot train
    model.predict(x, batch_size=8, verbose=0, callbacks=[logger])
else:
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[logger]).history
print("RESULT", json.dumps({
    "tensorflow": ["tensorflow" in sys.modules, after_import],
    "backend": keras.config.backend(), "rows": [sample._asdict() for sample in logger.timeline],
    "notes": logger.notes, "history": history, "phases": [peaks.phase for peaks in logger.phases],
    "run_peak": logger.run_peak, "growth": logger.growth.state,
}))
"""


@pytest.fixture(params=["jax", "numpy"])
def backend(request):
    if importlib.util.find_spec("jax") is None:  # Keras's numpy backend borrows from JAX's
        pytest.skip("JAX is not installed")
    return request.param


def test_the_host_is_logged_and_the_rest_explained(backend, run_python):
    done = run_python("-c", SCRIPT, new=True, KERAS_BACKEND=backend, JAX_PLATFORMS="cpu")
    found = json.loads(next(line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT")))
    assert found["backend"] == backend and found["growth"] == "other backend"
    assert found["tensorflow"] == [False, False], "nothing of it is needed"
    phase = "predict" if backend == "numpy" else "train"
    assert [row["batch"] for row in found["rows"] if row["phase"] == phase] == [0, 1, 2] * (
        1 if phase != "train" else 2
    )
    assert all(row["rss_bytes"] > 0 and row["peak_bytes"] is None for row in found["rows"])
    (why,) = [note for note in found["notes"] if note.startswith("allocator:")]
    said = {"jax": "JAX has no statistics", "numpy": "runs on numpy"}
    assert said[backend] in why and "host memory is logged" in why
    assert found["run_peak"] is None and found["phases"]
    if phase == "train":
        assert "memory_rss_bytes" in found["history"] and "memory_peak_bytes" not in found["history"]
