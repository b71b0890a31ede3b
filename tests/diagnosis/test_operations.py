"""Names of operations, as they stand in logs, are read to layers and phases."""

from __future__ import annotations

import pytest

from kerasmem.diagnosis.operations import OperationName, parse_operation


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
        ("training/Adam/gradients/block2_bn/FusedBatchNorm_grad/FusedBatchNormGrad", "block2_bn", "backward"),
        ("training/Adam/mul_3", None, "optimizer"),
        ("replica_1/xception/block2_sepconv1_bn/FusedBatchNorm", "block2_sepconv1_bn", "forward"),
        ("false_conv_0/convolution/Conv2D", "false_conv_0", "forward"),
        ("model/dense/MatMul", "dense", "forward"),
        ("gradient_tape/model/conv2d_5/Conv2D/Conv2DBackpropFilter", "conv2d_5", "backward"),
        ("sequential/conv2d/Conv2D", "conv2d", "forward"),
        ("resnet50/separable_conv2d_3/separable_conv2d/depthwise", "separable_conv2d_3", "forward"),
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


def test_who_numbered_the_scopes_decides():
    assert parse_operation("sequential_1/dense_2/MatMul", keras=2).layer == "dense_2"
    assert parse_operation("sequential_1/dense_2/MatMul", keras=3).layer == "dense"
    assert parse_operation("net_1/Cast", keras=3).layer is None


def test_a_long_name_is_read():
    assert parse_operation("a_1/" * 100_000).phase == "forward"
