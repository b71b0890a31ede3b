"""The allocator's limit as one region: what was handed out in small pieces must be there again as a large one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("loaded_python")
PROGRAM = """
import tensorflow as tf
from kerasmem.devices.room import in_use_reader, reserve_in_one_piece

reserve_in_one_piece()
assert tf.config.experimental.get_memory_info("CPU:0")["peak"] < 2**20
in_use = in_use_reader()
pieces = [tf.raw_ops.Empty(shape=[int(size * 2**18)], dtype=tf.float32) for size in (1.5, 3, 6)]  # MiB
assert in_use() > 10 * 2**20
del pieces
tf.raw_ops.Empty(shape=[18 * 2**18], dtype=tf.float32)
print("it fits")
"""
LIMITED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "24", "CUDA_VISIBLE_DEVICES": "-1"}


def test_what_small_pieces_took_serves_a_large_one(program):
    done = program("-c", PROGRAM, env=LIMITED)
    assert done.out.splitlines()[-1:] == ["it fits"], done.err[-2000:]
