import pytest
import tensorflow as tf

from kerasmem.devices.growth import enable_memory_growth

# What tf.config.experimental.set_memory_growth of TensorFlow 2.21 says.
TOO_LATE = "Physical devices cannot be modified after being initialized"


class RealContext:
    """TensorFlow's own rules, from its own class, on pretend GPUs."""

    def __init__(self, gpus=1, *, before=None, initialised=False, limited=()):
        from tensorflow.python.eager import context

        self.context = context.Context()
        self.gpus = [context.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        self.context._physical_devices = self.context._visible_device_list = list(self.gpus)
        self.context._pluggable_devices = []
        self.context._virtual_device_map = {}
        self.context._memory_growth_map = dict.fromkeys(self.gpus)
        self.context._memory_growth_map.update(zip(self.gpus, before or (), strict=False))
        for i in limited:
            limit = context.LogicalDeviceConfiguration(memory_limit=1024)
            self.context.set_logical_device_configuration(self.gpus[i], [limit])
        if initialised:
            self.context._context_handle = object()
        self.experimental = self.context
        self.get_logical_device_configuration = self.context.get_logical_device_configuration

    @property
    def growth(self):
        return self.context._memory_growth_map

    def get_visible_devices(self, kind):
        return self.context.get_visible_devices(kind)


@pytest.fixture
def make(monkeypatch):
    made = []
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)

    def make(*args, **kwargs):
        made.append(RealContext(*args, **kwargs))
        monkeypatch.setattr(tf, "config", made[-1])
        return made[-1]

    yield make
    for config in made:
        config.context._context_handle = None


def test_growth_is_switched_on_for_every_gpu(make):
    config = make(3)
    status = enable_memory_growth()
    assert status.state == "on" and status.on and not status.refused
    assert status.devices == tuple(f"/physical_device:GPU:{i}" for i in range(3))
    assert set(config.growth.values()) == {True}
    assert enable_memory_growth().state == "already on"


def test_too_late_says_so_and_names_the_call_to_make_first(make):
    config = make(2, initialised=True)
    status = enable_memory_growth()
    assert status.state == "too late" and status.refused and not status.on
    assert "kerasmem.enable_memory_growth()" in status.message and TOO_LATE in status.message
    assert set(config.growth.values()) == {None}


def test_on_before_initialisation_stays_on_after(make):
    make(2, before=[True, True], initialised=True)
    assert enable_memory_growth().on


def test_a_limit_on_logical_devices_stands(make):
    config = make(2, limited=[1])
    status = enable_memory_growth()
    assert status.state == "set differently" and "GPU:1" in status.message
    assert set(config.growth.values()) == {None}, "GPUs that differ stop TensorFlow from starting"


def test_growth_that_the_program_refused_stays_off(make):
    config = make(2, before=[None, False])
    status = enable_memory_growth()
    assert status.state == "set differently" and "False" in status.message
    assert list(config.growth.values()) == [None, False]


@pytest.mark.parametrize(("value", "state"), [("true", "already on"), ("false", "set differently"), ("1", "too late")])
def test_the_environment_variable_overrides_the_program(make, monkeypatch, value, state):
    make(1, initialised=True)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", value)
    assert enable_memory_growth().state == state


def test_no_gpu_is_no_trouble(make):
    make(0)
    status = enable_memory_growth()
    assert status.state == "no gpu" and not status.refused
    assert status.to_dict() == {"state": "no gpu", "devices": [], "message": status.message}


def test_a_broken_driver_does_not_raise(make, monkeypatch):
    monkeypatch.setattr(RealContext, "get_visible_devices", lambda self, kind: 1 / 0)
    make(1)
    assert enable_memory_growth().state == "failed"


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_says_so(backend, monkeypatch):
    import keras

    monkeypatch.setattr(keras.config, "backend", lambda: backend)
    status = enable_memory_growth()
    assert status.state == "other backend" and backend in status.message
    assert ("PREALLOCATE" in status.message) == (backend == "jax")


def test_the_real_tensorflow_answers():
    assert enable_memory_growth().state in ("no gpu", "on", "already on", "too late", "set differently")
