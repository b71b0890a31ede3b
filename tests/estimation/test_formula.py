"""The formula's figures; no TensorFlow is needed for any of it."""

from __future__ import annotations

import pytest

from kerasmem.devices.catalogue import resolve_device
from kerasmem.estimation.formula import formula, formula_bytes, share_out
from kerasmem.estimation.report import Bytes, LayerMemory, device_verdict, verdict


def row(name, elements, parameters=0, *, kind="layer", itemsize=4):
    return LayerMemory(
        name=name, class_name="X", output_shape=(None, elements), parameters=parameters,
        trainable_parameters=parameters, activation_elements=elements, activation_bytes=elements * itemsize,
        weight_bytes=4 * parameters, dtype="float32", uses=1, kind=kind,
    )  # fmt: skip


# The MNIST CNN of the source text, as it counts it.
MNIST = [
    row("image", 28 * 28, kind="input"),
    row("conv1", 24 * 24 * 32, 832),
    row("pool1", 12 * 12 * 32),
    row("conv2", 8 * 8 * 64, 51_264),
    row("pool2", 4 * 4 * 64),
    row("flatten", 0, kind="view"),
    row("dropout", 0, kind="view"),
    row("dense1", 1024, 1_049_600),
    row("dense2", 10, 10_250),
]


def test_categories_and_rows_add_up_to_the_total():
    for mode in ("train", "inference"):
        need = formula_bytes(MNIST, 32, mode)
        assert need.total == formula(MNIST, 32, mode).total_bytes
        assert need.total == need.weights + need.gradients + need.activations + need.inputs
        assert need.total == sum(each.bytes for each in share_out(MNIST, 32, mode))


def test_true_sizes_are_not_the_formulas():
    halves = [row("image", 100, kind="input", itemsize=1), row("dense", 50, 10, itemsize=2)]
    assert formula(halves, 3).total_bytes == 10 * 8 + 3 * 150 * 8
    assert formula_bytes(halves, 3).total == 10 * 8 + 3 * (100 * 1 + 50 * 2) * 2


def test_the_interval_has_the_total_and_the_optimizer_only_widens_it():
    plain, adam = formula_bytes(MNIST, 32), formula_bytes(MNIST, 32, optimizer_bytes=8_895_568)
    assert plain.low < plain.total < plain.high
    assert adam.high - plain.high == 8_895_568
    assert (adam.total, adam.low, adam.optimizer) == (plain.total, plain.low, None)


def test_inference_has_no_gradients_and_no_upper_end():
    need = formula_bytes(MNIST, 32, "inference")
    assert (2 * need.total, need.gradients) == (formula(MNIST, 32).total_bytes, 0)
    assert (need.low, need.high) == (need.weights, None)
    assert verdict(need, 10**12) == "too close to call"
    assert verdict(need, need.weights - 1) == "does not fit"


@pytest.mark.parametrize(
    ("low", "high", "available", "expected"),
    [
        (8, 12, 12, "fits"),
        (8, 12, 11, "too close to call"),
        (8, 12, 8, "too close to call"),
        (8, 12, 7, "does not fit"),
        (None, None, 10, "fits"),
        (None, None, 9, "does not fit"),
        (8, None, 99, "too close to call"),
        (8, None, 7, "does not fit"),
    ],
)
def test_verdict_at_each_border(low, high, available, expected):
    assert verdict(Bytes(10, low, high, *[None] * 7), available) == expected


def test_verdict_ignores_optional_workspace():
    need = Bytes(10, 8, 92, optional_workspace=80)
    assert (need.most_needed, verdict(need, 12), verdict(need, 11)) == (12, "fits", "too close to call")


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(5.70, "fits"), (5.73, "too close to call"), (6.40, "too close to call"), (6.50, "does not fit")],
)
def test_a_need_between_the_readings_of_a_card_is_too_close_to_call(needed, expected):
    exact = int(needed * 10**9)
    device = device_verdict(resolve_device("rtx3070"), Bytes(exact, exact, exact))
    assert device.verdict == expected
    assert (" to " in device.available) == (expected == "too close to call")
    assert device_verdict(device, Bytes(exact, exact, exact)) == device, "a saved verdict keeps its limits"
