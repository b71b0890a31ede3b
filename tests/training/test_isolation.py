"""Functions in processes of their own: values, limits, ends."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from waiting import is_alive, until

from kerasmem import KerasmemError, run_isolated
from kerasmem.errors import UsageError
from kerasmem.processes.forking import _servers

WIDTH = 100_000  # of a layer that the limit below has no room for


def train(units):
    import keras

    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(units), keras.layers.Dense(10)])
    model.compile("adam", "mse")
    model.fit(np.zeros((256, 100), "float32"), np.zeros((256, 10), "float32"), verbose=0)
    return model


def numbers(seed):
    import random

    return random.random(), float(np.random.rand()), os.getpid()


def grandchild(path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(path, "w") as file:
        file.write(str(process.pid))
    time.sleep(60)


def test_value_and_what_it_took():
    factor = 2
    run = run_isolated(lambda width, more: factor * width + more, 20, more=2)
    assert (run.status, run.value, run.get(), run.reason, run.out_of_memory) == ("done", 42, 42, None, False)
    assert run.peak_bytes is None and run.device is None  # no tensor was made
    assert run.host_peak_bytes > 10 * 2**20 and run.seconds > 0


def test_each_call_is_a_process_of_its_own_with_its_own_random_numbers():
    found = [run_isolated(numbers, n).value for n in range(3)]
    assert len({each[0] for each in found}) == len({each[1] for each in found}) == len({each[2] for each in found}) == 3
    assert os.getpid() not in {each[2] for each in found}


def test_a_model_comes_back_and_its_peak_is_the_allocators():
    small, large = run_isolated(train, 10, output=False), run_isolated(train, 1000, output=False)
    assert large.device == "CPU:0"
    # weights, gradients and Adam's two slots of 111,010 numbers are live at once in any case
    assert large.peak_bytes > 4 * 4 * 111_010 > small.peak_bytes
    assert large.value.count_params() == 111_010
    assert np.isfinite(large.value.predict(np.ones((1, 100)), verbose=0)).all()


def state_put_back():
    """Weights that fill most of the device's memory are put back from a copy, into the buffers that they have."""
    import keras
    import tensorflow as tf

    from kerasmem.training.run_state import load_state, read_state

    model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(2048, kernel_initializer="zeros")])
    state = read_state(model)
    state["model"][0][:] = 3
    held = tf.zeros(3 * 2**20)  # 12 MiB
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    load_state(model, state)
    told = tf.config.experimental.get_memory_info("CPU:0")
    del held
    return told["peak"] - before, told["current"] - before, float(model.get_weights()[0].min())


def test_a_copy_of_the_state_is_put_back_where_there_is_no_room_for_another():
    """TensorFlow copies arrays into its own memory first, and a process without room for that ends."""
    run = run_isolated(state_put_back, device_memory_limit="40MiB")
    beyond, left, value = run.get()
    assert beyond < 2**20 and left == 0 and value == 3


def test_out_of_memory_is_a_value():
    run = run_isolated(train, WIDTH, device_memory_limit="64MB", output=False)
    assert run.out_of_memory and run.status == "out of memory" and run.value is None
    assert run.diagnosis.out_of_memory and run.diagnosis.family == "tensorflow"
    assert 0 < run.peak_bytes <= 64 * 10**6
    with pytest.raises(KerasmemError, match="out of memory"):
        run.get()
    assert run_isolated(train, 10, device_memory_limit="64MB", output=False).status == "done"  # nothing is left of it


def test_host_memory_that_runs_out_is_a_value():
    run = run_isolated(lambda: len(bytearray(3 << 30)), host_memory_limit="1GB", output=False)
    assert run.out_of_memory and "host memory" in run.reason
    assert run.host_peak_bytes > 500 * 2**20

    def too_much():
        raise MemoryError

    assert run_isolated(too_much, output=False).out_of_memory


def test_what_the_function_raises_is_raised_here():
    def fails():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing") as caught:
        run_isolated(fails)
    assert "in fails" in str(caught.value.__cause__)

    class Odd(Exception):  # cannot be made again from what it was pickled as
        def __init__(self, one, two):
            super().__init__(one)

    def fails_oddly():
        raise Odd("first", "second")

    with pytest.raises(KerasmemError, match=r"Odd: first"):
        run_isolated(fails_oddly)
    with pytest.raises(KerasmemError, match="SystemExit: 3"):
        run_isolated(lambda: sys.exit(3))


def test_a_process_that_dies_or_takes_too_long_is_a_value():
    died = run_isolated(os.abort, output=False)
    assert (died.status, died.killed, died.reason) == ("died", False, "the process was ended by SIGABRT")
    killed = run_isolated(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert killed.status == "died" and killed.killed and "memory runs out" in killed.reason
    slow = run_isolated(time.sleep, 60, timeout=0.5)
    assert slow.status == "timed out" and "0.5 s" in slow.reason and slow.seconds < 30


def test_a_crash_whose_log_says_out_of_memory_is_called_so():
    def crash():
        text = (
            "OOM when allocating tensor with shape[512,12,12,32] and type float on /device:GPU:0 by allocator GPU_0_bfc"
        )
        os.write(2, text.encode() + b"\n")
        os.abort()

    run = run_isolated(crash, output=False)
    assert run.out_of_memory and "SIGABRT" in run.reason and run.diagnosis.tensor_shape == (512, 12, 12, 32)


def test_output_is_shown_or_not(capsys):
    def talk():
        print("to out", flush=True)
        print("to err", file=sys.stderr, flush=True)

    run_isolated(talk)
    shown = capsys.readouterr()
    assert "to out" in shown.out and "to err" in shown.err
    run_isolated(talk, output=False)
    assert capsys.readouterr() == ("", "")


def test_what_cannot_be_sent_is_said():
    with pytest.raises(UsageError, match="cannot be sent"):
        run_isolated(lambda lock: None, threading.Lock())
    with pytest.raises(KerasmemError, match="lock, cannot be sent back"):
        run_isolated(threading.Lock)
    with pytest.raises(UsageError, match="function must be callable"):
        run_isolated("train")


@pytest.mark.parametrize(
    "options",
    [{"device_memory_limit": "lots"}, {"device_memory_limit": -1}, {"host_memory_limit": True}, {"timeout": 0}],
    ids=str,
)
def test_wrong_limits(monkeypatch, options):
    with pytest.raises(UsageError, match=next(iter(options))):
        run_isolated(len, (), **options)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(UsageError, match="TensorFlow backend"):
        run_isolated(len, (), device_memory_limit="1GB")


def test_environment_and_folder_are_those_of_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("KERASMEM_TEST_WORD", "first")
    monkeypatch.chdir(tmp_path)
    look = functools.partial(run_isolated, lambda: (os.environ.get("KERASMEM_TEST_WORD"), os.getcwd()))
    before = dict(_servers)
    assert look().value == ("first", str(tmp_path))
    monkeypatch.setenv("KERASMEM_TEST_WORD", "second")
    assert look().value[0] == "second"
    assert _servers == before  # still the same process that starts the others


def test_threads_call_it_at_the_same_time():
    def one(n):
        return run_isolated(lambda: (time.sleep(0.2), n)[1]).value

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == list(range(8))


def test_many_calls_leave_nothing_open():
    run_isolated(len, ())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run_isolated(len, ())
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_server_that_was_killed_is_replaced():
    run_isolated(len, ())
    for server in _servers.values():
        server.process.kill()
        server.process.wait()
    assert run_isolated(len, ()).value == 0


def test_what_the_function_has_started_ends_with_it(tmp_path):
    path = tmp_path / "pid"
    assert run_isolated(grandchild, path, timeout=5).status == "timed out"
    until(lambda: not is_alive(path.read_text()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_all_ends_with_the_process_that_asked(tmp_path, how):
    script = tmp_path / "script.py"  # no `if __name__ == "__main__"`, and a function of the script itself
    script.write_text(
        textwrap.dedent("""
        import os, time, kerasmem

        def wait(path):
            with open(path + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            time.sleep(60)

        kerasmem.run_isolated(wait, "pid")
        """)
    )
    process = subprocess.Popen([sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE)
    path = tmp_path / "pid"
    until(path.exists)
    pid = int(path.read_text())
    assert is_alive(pid)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    until(lambda: not is_alive(pid))
    assert how == signal.SIGKILL or b"KeyboardInterrupt" in said
