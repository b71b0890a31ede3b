"""What is borrowed of TensorFlow's runtime behaves as before."""

from __future__ import annotations

import tensorflow as tf

from kerasmem.compat.tensorflow_runtime import devices_are_started


def test_a_started_device_is_seen():
    tf.constant(1.0)
    assert devices_are_started()
