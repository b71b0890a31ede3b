"""How long operations take beside each other: only ratios count, so only which of two ends first is asked."""

from __future__ import annotations

import math

import pytest

from kerasmem.devices.kernels import EIGEN
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import TABLES, seconds

RATES = TABLES[EIGEN].rates


def tensor(*shape):
    return Tensor(shape, "float32", 4 * math.prod(shape))


def took(type_name, inputs, output, rates=RATES, **attributes):
    node = Node("one", type_name, (), (), (output,), attributes)
    return seconds(node, inputs, rates)


def dense_gradients(rows, inner, outer):
    """The time of the gradients of a dense layer's input and of its weights."""
    result, weights, given = tensor(rows, outer), tensor(inner, outer), tensor(rows, inner)
    return (
        took("MatMul", (result, weights), given, transpose_b=True),
        took("MatMul", (given, result), weights, transpose_a=True),
    )


@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 4096, 4096), (512, 4096, 8192), (32, 2048, 1024)])
def test_eigen_gathers_weights_that_it_reads_across_rows(rows, inner, outer):
    of_input, of_weights = dense_gradients(rows, inner, outer)
    # A whole update of the weights fits in between.
    update = took("Square", (tensor(inner, outer),), tensor(inner, outer))
    assert of_input > of_weights + update


def test_gathering_is_slower_if_rows_share_cache_sets():
    apart, same = (dense_gradients(64, 4000, outer)[0] for outer in (4000, 4096))
    assert same > 2 * apart
