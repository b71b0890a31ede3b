"""The statistics of JAX's allocators, under the names that their documentation gives."""

import sys
from types import SimpleNamespace

import pytest

from kerasmem.devices import training_devices as tracked
from kerasmem.devices.training_devices import TrackedDevice, devices_of_jax, jax_allocator

# What a device of JAX tells of its BFC allocator (`xla::AllocatorStats`, by way of `PjRtDevice::GetAllocatorStats`).
JAX_STATS = {"num_allocs": 7, "bytes_in_use": 1024, "peak_bytes_in_use": 4096, "pool_bytes": 8192}


class JaxDevice:
    platform, device_kind, local_hardware_id = "gpu", "NVIDIA A100", 1

    def __init__(self, stats=JAX_STATS):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.fixture
def devices(monkeypatch):
    def listed(device):
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(local_devices=lambda: [device]))
        return devices_of_jax()

    return listed


def test_jax_tells_in_use_peak_and_pool(devices):
    found, notes = devices(JaxDevice())
    assert notes == [] and found == [TrackedDevice("GPU:1", jax_allocator("GPU:1", JaxDevice()), 1, "NVIDIA A100")]
    assert found[0].allocator.read() == (1024, 4096, 8192)
    with pytest.raises(NotImplementedError, match="cannot reset"):
        found[0].allocator.reset()


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}])
def test_a_jax_device_that_does_not_tell_is_named(devices, stats):
    found, notes = devices(JaxDevice(stats))
    assert found == [TrackedDevice("GPU:1", None, 1, "NVIDIA A100")]
    assert notes == ["allocator: GPU:1: JAX has no statistics of its allocator there"]


def test_without_a_pool_reserved_is_unknown():
    stats = {name: JAX_STATS[name] for name in ("bytes_in_use", "peak_bytes_in_use")}
    assert jax_allocator("GPU:0", JaxDevice(stats)).read().reserved_bytes is None


def test_a_device_that_cannot_be_asked_gives_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    assert devices_of_jax()[0] == [TrackedDevice(None)]
    monkeypatch.setattr("keras.config.backend", lambda: "openvino")
    found, notes = tracked.tracked_devices()
    assert found == [TrackedDevice(None)] and "openvino" in notes[0] and "host memory is logged" in notes[0]
