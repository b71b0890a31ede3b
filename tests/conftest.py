"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import loaded_python as loaded
import numpy as np
import onednn
import pytest
from hypothesis import settings
from programs import Result, run_python

# The same cases in every run, whatever the machine's speed.
settings.register_profile("kerasmem", derandomize=True, deadline=None, database=None)
settings.load_profile("kerasmem")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.pop("KERAS_BACKEND", None)
if "KERASMEM_TEST_BACKEND" in os.environ:  # by `scripts/test --with`
    os.environ["KERAS_BACKEND"] = os.environ["KERASMEM_TEST_BACKEND"]
# A shell's background jobs ignore Ctrl-C, and hand that on to the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


# Files of more than about 20 seconds start first, so that no process is left with a long one at the end.
LONGEST = (
    "recovery/test_advise.py",
    "training/test_any_step.py",
    "training/test_recompute_model.py",
    "training/test_fit_exact.py",
    "training/test_recompute_gradients.py",
    "estimation/test_graph_estimate.py",
    "hdf5/test_remote.py",
    "hostile/test_time_and_memory.py",
    "training/test_update_memory.py",
    "diagnosis/test_real_failures.py",
    "cli/test_advise_command.py",
    "hostile/test_model_files.py",
    "training/test_fit.py",
    "models/test_freeing.py",
    "training/test_isolation.py",
    "training/test_recompute_turns.py",
    "streaming/test_engines.py",
    "test_examples.py",
    "cli/test_run_command.py",
    "models/test_round_trips.py",
    "monitoring/test_logger.py",
)


def pytest_collection_modifyitems(items):
    """Run the longest files first. The order inside a file and of the other files stays."""
    rank = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="skip each test once it imports TensorFlow or starts a process"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--fast"):
        config.option.reportchars = "fE"  # hundreds of skips need no list
        config.option.numprocesses = 0
        config.option.dist = "no"
        sys.meta_path.insert(0, SkipHeavyImports())
        subprocess.Popen.__init__ = lambda *arguments, **options: skip_heavy("starts a process")


class SkipHeavyImports:
    """An import hook that skips the test that imports TensorFlow."""

    def find_spec(self, name, path=None, target=None):
        if name in ("tensorflow", "keras", "jax"):
            skip_heavy(f"imports {name}")


def skip_heavy(reason):
    heavy.append(reason)
    pytest.skip(f"--fast: {reason}", allow_module_level=True)


heavy: list[str] = []  # what the running test tried to start or import, perhaps in another thread


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    heavy.clear()
    try:
        return (yield)
    except Exception:
        if heavy:
            pytest.skip(f"--fast: {heavy[0]}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Load the tests without collecting garbage, and set apart what that left alive, as after each file."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_crashes: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    """Note a crash of a process of tests."""
    _crashes.append(crashitem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """After a crash, end in another way than after a test that failed: the rest of its file has not run."""
    if _crashes:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(scope="module", autouse=True)
def what_is_left_is_not_collected_again():
    """After a file, set apart what it left alive: in a process of many files a collection would take seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def cli(capfd, monkeypatch):
    """Run a kerasmem command in this process."""
    from kerasmem.cli import main

    def run(*arguments: object) -> Result:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0, printed.out, printed.err)

    return run


@pytest.fixture
def program():
    """Run Python in a process of its own: program("-m", "kerasmem", …, env={…}, cwd=…)."""
    return run_python


@pytest.fixture(scope="module")
def loaded_python():
    """Run Python, where it is started as `sys.executable`, as forks of a process that has loaded TensorFlow.

    For a file of tests: `pytestmark = pytest.mark.usefixtures("loaded_python")`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", loaded.executable())
        yield


@pytest.fixture
def new_python(monkeypatch):
    """Run a new Python all the same: for what is held of its start, its memory, or the tree of processes."""
    monkeypatch.setattr(sys, "executable", loaded.NEW_PYTHON)


@pytest.fixture
def onednn_kernels(monkeypatch):
    """Turn oneDNN's kernels on in the processes that the test starts; skip it where the CPU cannot run them."""
    if reason := onednn.reason_against():
        pytest.skip(reason)
    for name, value in onednn.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def x86_kernels():
    """Skip a test that compares graph mode's estimate with real training where the CPU's kernels are not an x86's."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"the rules are those of kernels for x86, and this CPU is {platform.machine()}")


@pytest.fixture
def mnist_cnn():
    """The convnet of the first source text; a new one each time, since saving as .h5 drops its optimizer."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ],
        name="mnist_cnn",
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model


@pytest.fixture
def write(tmp_path):
    """Return a function that writes arrays to an HDF5 file and returns its path."""

    def write(name="data.h5", chunks=None, options=None, **arrays) -> Path:
        import h5py

        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, array in arrays.items():
                array = np.asarray(array)
                extra = dict((options or {}).get(key, {}))
                if chunks:
                    extra.setdefault("chunks", (min(chunks, len(array)), *array.shape[1:]))
                file.create_dataset(key.replace("__", "/"), data=array, **extra)
        return path

    return write


@pytest.fixture
def numbered(write):
    """Return a function that writes `rows` rows whose every value is the number of the row."""

    def numbered(rows=100, chunks=8, width=3, **more) -> Path:
        x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], width, axis=1)
        return write(x=x, y=np.arange(rows), chunks=chunks, **more)

    return numbered
