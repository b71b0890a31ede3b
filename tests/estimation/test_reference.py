"""Known networks: their figures are what the formula gives today, and a model is placed among them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import keras
import pytest

from kerasmem.estimation.estimating import estimate
from kerasmem.estimation.formula import known_networks, networks_beside


@pytest.mark.parametrize(
    ("name", "build"), [("VGG-16", keras.applications.VGG16), ("MobileNet", keras.applications.MobileNet)]
)
def test_known_networks_have_the_formulas_figures(name, build):
    report = estimate(lambda: build(weights=None), method="formula")
    figures = report.model.parameters, report.formula.activation_elements_per_sample
    assert (name, *figures) in known_networks()


def test_published_counts_of_parameters():
    """62.4 M (AlexNet as one tower), 138.4 M and 143.7 M (VGG), 25.6 M (ResNet-50)."""
    millions = {name: round(parameters / 1e6, 1) for name, parameters, _ in known_networks()}
    assert (millions["AlexNet"], millions["VGG-16"], millions["VGG-19"]) == (62.4, 138.4, 143.7)
    assert (millions["ResNet-50"], millions["MobileNet"], millions["GoogLeNet"]) == (25.6, 4.3, 7.0)


def test_the_known_networks_beside_a_model():
    report = estimate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), method="formula", batch_size=32)

    def at(total, copies=2):
        formula = replace(report.formula, total_bytes=total, copies=copies)
        return networks_beside(replace(report, formula=formula))

    figures = sorted((8 * (p + 32 * e), name) for name, p, e in known_networks())
    assert at(1) == (None, figures[0])
    assert at(10**15) == (figures[-1], None)
    for first, second in itertools.pairwise(figures):
        assert at((first[0] + second[0]) // 2) == at(first[0]) == (first, second)
    assert at(10**15, copies=1)[0][0] * 2 == figures[-1][0]
