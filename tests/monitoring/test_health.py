"""The health of TensorFlow's real BFC allocator, judged by what it then does."""

import json

import onednn
import pytest

from kerasmem.devices.health import AllocatorHealth, solve
from kerasmem.devices.recording import AllocatorEvent
from kerasmem.monitoring.results import EpochHealth, health_notes

MIB = 2**20


def event(in_use, free, largest, allocated=4096):
    told = {"available": 2**33 - in_use, "fragmentation": float(f"{1 - largest / free:.6g}")}
    return AllocatorEvent(0, "allocate", "bfc", 0, allocated, allocated, in_use, 0, **told)


@pytest.mark.parametrize(
    ("free", "largest", "taken_from_largest"),
    [(100 * MIB, 60 * MIB, False), (100 * MIB, 60 * MIB, True), (40_000 * MIB, 100 * MIB, False)],
)
def test_two_allocations_tell_what_is_free(free, largest, taken_from_largest):
    size = free // 100
    before = event(5 * MIB, free, largest)
    after = event(5 * MIB + size, free - size, largest - size if taken_from_largest else largest, size)
    assert solve(before, after) == pytest.approx(free, rel=2e-2 if largest < free / 100 else 1e-3)


def test_what_does_not_change_tells_nothing():
    same = event(0, 100, 100)
    assert solve(same, same) is None


def test_the_gaps_are_said_in_words():
    health = AllocatorHealth("GPU:0", 4 * 2**30, 10 * 2**30, 2 * 2**30, 2 / 3, 12 * 2**30)
    first, second, third = health.explain(13 * 2**30)
    assert "4.00 GiB in use of 10.0 GiB reserved" in first
    assert "keeps the 6.00 GiB" in first and "until the process ends" in first
    assert "67 % of it lies outside the largest block of 2.00 GiB" in second and "2.00 GiB may still be taken" in second
    assert "counts 13.0 GiB; the 3.00 GiB beyond" in third and "other processes" in third
    assert AllocatorHealth.from_dict(json.loads(json.dumps(health.to_dict()))) == health
    assert len(AllocatorHealth("GPU:0", 9, 10, 1, 0.0, 12).explain()) == 1


SCRIPT = """
import json
import tensorflow as tf
from kerasmem.devices.health import read_health

def empty(size):
    return tf.raw_ops.Empty(shape=[size // 4], dtype=tf.float32)

def health():
    found, why_not = read_health("CPU:0")
    assert found is not None, why_not
    return found.to_dict()

kept = [empty(300_000) for _ in range(300)]
whole = health()
del kept[::2]
holes = health()
block = empty(holes["largest_free_bytes"])
fits = health()
del block
beyond = empty(holes["largest_free_bytes"] + 65536)
grown = health()
nothing = read_health("GPU:7")
folder = __import__("tempfile").mkdtemp()
tf.profiler.experimental.start(folder)
busy = read_health("CPU:0")
tf.profiler.experimental.stop()
print("RESULT", json.dumps([whole, holes, fits, grown, nothing, busy, tf.config.experimental.get_memory_info("CPU:0")]))
"""


def test_the_largest_free_block_is_just_what_fits_without_growing(run_python):
    done = run_python("-c", SCRIPT)
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    whole, holes, fits, grown, nothing, busy, info = json.loads(result.removeprefix("RESULT "))
    assert whole["reserved_bytes"] == holes["reserved_bytes"] == fits["reserved_bytes"]
    assert grown["reserved_bytes"] > holes["reserved_bytes"]
    assert holes["reserved_bytes"] % (2 * MIB) == 0, "regions are whole MiB"
    assert holes["fragmentation"] > whole["fragmentation"] and 0.2 < holes["fragmentation"] < 1
    assert holes["in_use_bytes"] < holes["reserved_bytes"] - holes["largest_free_bytes"]
    assert grown["in_use_bytes"] == info["current"]
    for found, why_not in (nothing, busy):
        assert found is None and "could not be asked" in why_not


@onednn.needed
def test_an_allocator_that_does_not_tell_has_a_reason(run_python):
    script = "from kerasmem.devices.health import read_health; print(read_health('CPU:0'))"
    done = run_python("-c", script, TF_CPU_ALLOCATOR_USE_BFC=None, **onednn.ENVIRONMENT)
    assert "None, 'health: CPU:0: its allocator does not tell" in done.stdout


def test_the_logger_asks_at_every_epochs_end(scenario):
    result = scenario("allocator_health")
    assert [(entry["device"], entry["epoch"]) for entry in result["health"]] == [("CPU:0", 0), ("CPU:0", 1)]
    assert result["without"] == 0
    assert [{name: line[name] for name in result["health"][0]} for line in result["file"]] == result["health"]
    assert any("in use of" in note and "until the process ends" in note for note in result["notes"])
    with_health, without = result["peaks"]
    assert with_health < 1.5 * without, "asking does not count as training's peak"


def test_growth_that_does_not_come_back_is_told():
    def at(epoch, reserved, in_use=10 * MIB):
        return EpochHealth(0, epoch, AllocatorHealth("GPU:0", in_use, reserved, 4 * MIB, 0.1, 2**33))

    grown = health_notes([at(0, 20 * MIB), at(1, 60 * MIB)], 0, {"GPU:0": 100 * MIB})
    assert "reserved grew by 40.0 MiB" in grown[-1] and any("counts 100 MiB" in note for note in grown)
    assert len(health_notes([at(0, 20 * MIB), at(1, 20 * MIB)], 0, {})) == 1
    assert len(health_notes([at(0, 20 * MIB), at(1, 60 * MIB, 45 * MIB)], 0, {})) == 1, "it is in use"
    assert health_notes([], 0, {}) == []
