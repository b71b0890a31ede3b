"""`kerasmem.track`: real allocations, in processes of their own where TensorFlow or the program's end matter."""

import json
import os
import threading
import time

import numpy as np
import pytest

import kerasmem
from kerasmem.errors import UsageError

MIB = 2**20
REST = 0.7  # seconds, longer than the thread rests between readings, also where the machine is busy


_before = set()


@pytest.fixture(autouse=True)
def _threads_of_other_tests():
    _before.update(threading.enumerate())


def threads():
    new = (thread for thread in threading.enumerate() if thread not in _before)
    return [thread.name for thread in new if thread.name.startswith("kerasmem")]


def hold(mebibytes, seconds=0.0):
    block = np.ones(mebibytes * MIB // 8)
    time.sleep(seconds)
    return block


def test_what_stays_and_what_passes_are_told_apart():
    with kerasmem.track("passes") as passes:
        hold(200, REST)
    with kerasmem.track("stays") as stays:
        kept = hold(120, REST)
    host = passes.result.host
    assert 190 * MIB < host.peak_bytes - host.before_bytes < 260 * MIB and host.kept_bytes < 40 * MIB
    assert 110 * MIB < stays.result.host.kept_bytes < 160 * MIB
    assert REST < passes.result.seconds < 5 and passes.result.error is None
    del kept


def test_a_peak_too_short_to_be_sampled_is_the_kernels():
    hold(300)  # nothing below can rise above this: only the sampled peak is known then
    with kerasmem.track("brief") as brief:
        hold(700)
    host = brief.result.host
    assert host.peak_bytes - host.before_bytes > 600 * MIB


def test_a_result_is_one_line():
    with pytest.raises(KeyError), kerasmem.track("read [red]\x1b[2Jpart") as tracker:
        raise KeyError("x")
    line = str(tracker.result)
    assert line.startswith("read [red]\\x1b[2Jpart: ") and ", ended by KeyError; " in line and "; host " in line
    assert "\x1b" not in line and ", peak " in line


def test_nested_actions_each_have_their_own_and_the_outer_has_all():
    with kerasmem.track("outer") as outer:
        with kerasmem.track("first") as first:
            hold(150, REST)
        assert threads() == ["kerasmem track"], "that of the outer one"
        with kerasmem.track("second") as second:
            time.sleep(0.1)
    assert [t.result.path for t in (outer, first, second)] == [("outer",), ("outer", "first"), ("outer", "second")]
    assert first.result.host.peak_bytes - first.result.host.before_bytes > 140 * MIB
    assert second.result.host.peak_bytes - second.result.host.before_bytes < 60 * MIB
    assert outer.result.host.peak_bytes >= first.result.host.peak_bytes
    assert threads() == []


def test_as_decorator_it_keeps_name_result_and_recursion():
    tracker = kerasmem.track("count")

    @tracker
    def count(n):
        """Doc."""
        return 1 if n == 0 else 1 + count(n - 1)

    assert (count(3), count.__name__, count.__doc__) == (4, "count", "Doc.")
    assert tracker.result.path == ("count",)


def test_functions_whose_body_runs_later_are_refused():
    def pieces():
        yield 1

    async def wait():
        pass

    for function in (pieces, wait):
        with pytest.raises(UsageError, match="cannot decorate"):
            kerasmem.track("later")(function)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_inside_an_action_can_track_and_end():
    with kerasmem.track("parent"):
        child = os.fork()
        if child == 0:
            with kerasmem.track("child") as inner:
                pass
            os._exit(0 if inner.result.host.before_bytes else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("label", ["", "  ", 7, None])
def test_a_label_must_be_text(label):
    with pytest.raises(UsageError, match="label must be a name"):
        kerasmem.track(label)


ALLOCATOR = """
import json, sys
import kerasmem

with kerasmem.track("without TensorFlow") as first:
    pass
loaded = "tensorflow" in sys.modules
import tensorflow as tf
with kerasmem.track("not started") as second:
    started = tf.python.eager.context.context()._initialized if hasattr(tf, "python") else False
growable = kerasmem.enable_memory_growth().state
kept = tf.zeros([1024])
with kerasmem.track("outer") as outer:
    with kerasmem.track("inner") as inner:
        tf.zeros([2**24]).numpy()
    kept2 = tf.zeros([2**20])
    with kerasmem.track("later") as later:
        tf.zeros([2**18]).numpy()
results = [tracker.result.to_dict()["allocator"] for tracker in (first, second, outer, inner, later)]
print("RESULT", json.dumps([loaded, growable] + results))
"""


def test_the_allocators_peak_is_exact_and_tensorflow_is_left_alone(run_python):
    done = run_python("-c", ALLOCATOR, new=True)
    loaded, growable, first, second, outer, inner, later = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert (loaded, first, second) == (False, {}, {})
    assert growable == "no gpu", "had its devices been started, on a GPU this would be too late"
    peak = {name: use["CPU:0"]["peak_bytes"] for name, use in (("outer", outer), ("inner", inner), ("later", later))}
    assert 64 * MIB <= peak["inner"] < 66 * MIB
    assert peak["outer"] == peak["inner"]
    assert 5 * MIB <= peak["later"] < 7 * MIB
    assert outer["CPU:0"]["after_bytes"] - outer["CPU:0"]["before_bytes"] == 4 * MIB
