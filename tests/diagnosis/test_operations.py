"""Names of operations, as they stand in logs, are read to layers and phases."""

from __future__ import annotations

import pytest

from kerasmem.diagnosis.causes import OperationName, parse_operation


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [
        ("gradient_tape/vgg16_1/block4_conv2_1/Conv2D/Conv2DBackpropInput", "block4_conv2", "backward"),
        ("StatefulPartitionedCall/net_1/wide_1/Relu", "wide", "forward"),
        ("net_1/conv2d_1_1/convolution", "conv2d_1", "forward"),
        ("outer_1/encoder_3/bn_1/batchnorm/mul_2", "encoder/bn", "forward"),
        ("gradient_tape/outer_1/ln_1/mul_1/Sum", "ln", "backward"),
        ("adam_w/AssignAddVariableOp_3", None, "optimizer"),
        ("StatefulPartitionedCall/adam/Mul", None, "optimizer"),
        ("compile_loss/mse/Square", None, "forward"),
        ("gradient_tape/compile_loss/mse/Mul", None, "backward"),
        ("training/Adam/mul_3", None, "optimizer"),
        ("model/dense/MatMul", None, "forward"),  # of Keras 2
        ("AddN_7", None, "backward"),
        ("StatefulPartitionedCall", None, None),
        ("jit(step)/jit(main)/transpose(jvp(Net))/dot_general", None, "backward"),
        ("jit(step)/jvp(Net)/Dense_0/dot_general", None, "forward"),
        ("", None, None),
        ("////", None, None),
        ("(((", None, None),
    ],
)
def test_names(name, layer, phase):
    assert parse_operation(name) == OperationName(layer, phase)


def test_a_long_name_is_read():
    assert parse_operation("a_1/" * 100_000).phase == "forward"
