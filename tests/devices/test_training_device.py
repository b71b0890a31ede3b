"""The limit of the allocator that this process trains with, and its memory in one piece."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf
from recorded_nvml import RecordedNvml

from kerasmem.devices.kernels import CpuKernels
from kerasmem.devices.training_devices import allocator_limit, training_kernels, training_memory
from kerasmem.units import MIB

PROGRAM = """
import tensorflow as tf
from kerasmem.devices.training_devices import reserve_in_one_piece

reserve_in_one_piece()
assert tf.config.experimental.get_memory_info("CPU:0")["peak"] < 2**20
pieces = [tf.raw_ops.Empty(shape=[int(size * 2**18)], dtype=tf.float32) for size in (1.5, 3, 6)]  # MiB
assert tf.config.experimental.get_memory_info("CPU:0")["current"] > 10 * 2**20
del pieces
tf.raw_ops.Empty(shape=[18 * 2**18], dtype=tf.float32)
print("it fits")
"""
LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "24", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.usefixtures("loaded_python")
def test_what_small_pieces_took_serves_a_large_one(program):
    done = program("-c", PROGRAM, env=LIMITED)
    assert done.out.splitlines()[-1:] == ["it fits"], done.err[-2000:]


@pytest.fixture
def two_cards(monkeypatch):
    """Let TensorFlow list a T4 and a V100, and return a function that makes some of them visible."""
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in range(2)]
    names = dict(zip([gpu.name for gpu in gpus], ["Tesla T4", "Tesla V100-SXM2-16GB"], strict=True))
    visible = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details",
        lambda gpu: {"device_name": names[gpu.name], "compute_capability": (7, 0 if "V100" in names[gpu.name] else 5)},
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml("mixed"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", raising=False)
    return lambda *numbers: visible.extend(gpus[number] for number in numbers)


@pytest.mark.parametrize(
    ("number", "total", "context", "capability"), [(0, 16106127360, 220, (7, 5)), (1, 16944988160, 317, (7, 0))]
)
def test_the_limit_is_that_of_the_visible_card_less_its_context(two_cards, number, total, context, capability):
    two_cards(number)
    assert allocator_limit() == training_memory() == total - context * MIB - 1050 * MIB
    assert training_kernels().capability == capability


def test_a_limit_set_for_the_visible_card_counts(two_cards, monkeypatch):
    two_cards(1)
    limits = {"/physical_device:GPU:1": [SimpleNamespace(memory_limit=4096)]}
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: limits.get(gpu.name))
    assert allocator_limit() == 4096 * MIB


def test_without_a_visible_card_training_is_on_the_cpu(two_cards):
    assert allocator_limit() is None
    assert training_memory() > 0 and isinstance(training_kernels(), CpuKernels)
