import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")

SCRIPT = """
import json, sys
import tensorflow as tf
from kerasmem.devices.training_devices import tensorflow_allocator
from kerasmem.devices.training_devices import cpu_uses_bfc, tracked_devices

found = {"bfc": cpu_uses_bfc()}
devices, notes = tracked_devices()
found["devices"] = [[device.name, device.allocator is not None, device.ordinal] for device in devices]
found["notes"] = notes
allocator = devices[0].allocator
if allocator is not None:
    start = allocator.read()
    kept = tf.zeros([2**20])
    passing = tf.zeros([2**22])
    del passing
    after = allocator.read()
    allocator.reset()
    found["readings"] = [start, after, allocator.read()]
print("RESULT", json.dumps(found))
"""


def run(**environ):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**clean, **environ}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.rpartition("RESULT ")[2])


@pytest.fixture(scope="module")
def bfc():
    return run(TF_CPU_ALLOCATOR_USE_BFC="true")


def test_the_cpu_has_the_gpus_allocator_where_asked(bfc):
    if bfc["devices"][0][0] != "CPU:0":
        pytest.skip("this machine has a GPU")
    assert bfc["bfc"] is True
    assert bfc["devices"] == [["CPU:0", True, None]]
    assert [note.split(":")[0] for note in bfc["notes"]] == ["reserved_bytes"]


def test_readings_are_in_use_and_the_peak_since_the_reset(bfc):
    start, after, reset = bfc["readings"]
    kept = after[0] - start[0]
    assert 2**22 <= kept < 2**22 + 2**16
    assert after[1] - start[0] >= 2**22 + 2**24
    assert reset[0] == reset[1] == after[0]
    assert start[2] is None, "TensorFlow tells nothing of what is reserved"


def test_without_statistics_there_is_a_reason():
    found = run(TF_ENABLE_ONEDNN_OPTS="0")
    if found["devices"][0][0] != "CPU:0":
        pytest.skip("this machine has a GPU")
    assert found["devices"] == [["CPU:0", False, None]]
    assert "Allocator stats not available" in found["notes"][0]
    assert "TF_CPU_ALLOCATOR_USE_BFC=true" in found["notes"][0]


def test_logical_gpus_are_traced_to_their_cards():
    from kerasmem.devices.training_devices import cards_behind

    class Config:
        class experimental:
            @staticmethod
            def get_device_details(gpu):
                if gpu == "b":
                    raise RuntimeError("Device returned compute capability an in invalid format")
                return {"device_name": f"card {gpu}"}

        list_physical_devices = staticmethod(lambda kind: ["a", "b", "c"])
        get_visible_devices = staticmethod(lambda kind: ["c", "b"])
        get_logical_device_configuration = staticmethod(lambda gpu: [1, 2] if gpu == "c" else None)

    class Tf:
        config = Config

    assert cards_behind(Tf) == {"GPU:0": (2, "card c"), "GPU:1": (2, "card c"), "GPU:2": (1, None)}
