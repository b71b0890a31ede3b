"""The host's memory in place of a card's: what is left where nothing else fits. Predicted, not estimated or measured.

Unified memory leaves the step as it is, and CUDA moves pages that the card has no room for to the host and back. How
much the host must hold is therefore what the step needs beyond the card. Offloading (JAX) copies what matrix products
put out to the host in the forward pass and back in the backward pass: at most the activations.
"""

from __future__ import annotations

import math

from kerasmem.devices.catalogue import DeviceTarget
from kerasmem.devices.host import host_memory
from kerasmem.devices.live import list_devices
from kerasmem.estimation.report import Bytes, Settings
from kerasmem.models.backend import runs_on_jax
from kerasmem.recovery.advice import Considered, LastResort
from kerasmem.recovery.changes import SAME
from kerasmem.units import format_size

UNIFIED, OFFLOAD = "unified memory", "activations on the host"
_FIRST_WITH_PAGING = (6, 0)  # Pascal: a GPU whose page faults CUDA can serve
_UNIFIED_COST = (
    "pages beyond the card move over PCIe or NVLink in every step: NVIDIA's micro-benchmark varies by up to 100 times "
    "with access pattern, platform and how far it is beyond the card"
)
_OFFLOAD_COST = (
    "each product's output goes to the host and back in every step; JAX's manual says to measure it, and a maintainer "
    "saw much slower steps on GPUs for weights and optimizer, less for activations"
)
_UNIFIED_SOURCES = (
    "https://developer.nvidia.com/blog/improving-gpu-memory-oversubscription-performance/",
    "https://github.com/tensorflow/tensorflow/issues/3678",
)
_OFFLOAD_SOURCES = (
    "https://docs.jax.dev/en/latest/201/memory-spaces.html",
    "https://github.com/jax-ml/jax/pull/28988",
)
_ON_TENSORFLOW = """\
import os

os.environ["TF_FORCE_UNIFIED_MEMORY"] = "1"   # before TensorFlow is imported; XLA reads it
import tensorflow as tf

options = tf.compat.v1.GPUOptions(per_process_gpu_memory_fraction={fraction})   # of the card's memory
tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(gpu_options=options))   # makes this process's allocator
# From here on your script as it is.
"""
_ON_JAX = """\
import os

os.environ["TF_FORCE_UNIFIED_MEMORY"] = "1"   # before JAX is imported
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "{fraction}"   # of the card; newer versions say XLA_CLIENT_MEM_FRACTION
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
# From here on your script as it is.
"""
OFFLOADED = '''\
import jax
import keras


class Offloaded(keras.layers.Layer):
    """Runs a layer; what its matrix products put out waits in the host's memory for the backward pass."""

    def __init__(self, layer, **options):
        super().__init__(**options)
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x, training=None):
        trained, fixed = self.layer.trainable_variables, self.layer.non_trainable_variables

        def run(trained, fixed, x):
            return self.layer.stateless_call(trained, fixed, x, training=training)

        policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        y, updated = jax.checkpoint(run, policy=policy)([v.value for v in trained], [v.value for v in fixed], x)
        for variable, value in zip(fixed, updated):
            variable.assign(value)
        return y


# Put it around the blocks of your model, one for each: x = Offloaded(block)(x)
'''


def last_resorts(
    need: Bytes, settings: Settings, target: DeviceTarget
) -> tuple[tuple[LastResort, ...], tuple[Considered, ...]]:
    """Return the ways to let the host's memory help a step that does not surely fit a card, and those that are no use.

    Args:
        need: of the step as it is.
        settings: of the step.
        target: the device; only a card of the catalogue is surely one of NVIDIA's.
    """
    if target.compute_capability is None:
        return (), ()
    on_jax = runs_on_jax()
    ways = [_unified(need, target, on_jax)]
    if on_jax and settings.mode == "train":
        ways.append(_offload(need, target))
    checked = [each if isinstance(each, Considered) else _with_room(each) for each in ways]
    offered = tuple(each for each in checked if isinstance(each, LastResort))
    return offered, tuple(each for each in checked if isinstance(each, Considered))


def _unified(need: Bytes, target: DeviceTarget, on_jax: bool) -> LastResort | Considered:
    assert target.compute_capability is not None
    if target.compute_capability < _FIRST_WITH_PAGING:
        return Considered(UNIFIED, "compute capability 6.0 is the first that pages memory to the host")
    most = need.total if need.high is None else need.high
    beyond = max(most - target.available_bytes, 0)
    fraction = max(math.ceil(10 * most / target.memory_bytes), 11) / 10
    code = (_ON_JAX if on_jax else _ON_TENSORFLOW).format(fraction=fraction)
    return LastResort(UNIFIED, beyond, SAME, _UNIFIED_COST, _UNIFIED_SOURCES, code)


def _offload(need: Bytes, target: DeviceTarget) -> LastResort | Considered:
    held = need.activations
    if held is not None and need.total - held > target.available_bytes:
        return Considered(OFFLOAD, f"without any activations the step takes {format_size(need.total - held)} still")
    return LastResort(OFFLOAD, held, SAME, _OFFLOAD_COST, _OFFLOAD_SOURCES, OFFLOADED)


def _with_room(way: LastResort) -> LastResort | Considered:
    """Return the way, or that this machine's host has too little memory, where the card is in this machine."""
    free = host_memory().available_bytes
    if way.host_bytes is None or not list_devices() or way.host_bytes <= free:
        return way
    return Considered(
        way.name, f"it takes {format_size(way.host_bytes)} of the host, which has {format_size(free)} free"
    )
