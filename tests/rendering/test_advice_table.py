"""Advice on terminals of any width: nothing is cut, no line is too long, and what a file contains steers nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kerasmem.estimation.report import Bytes, DeviceVerdict, ModelFacts, Settings
from kerasmem.recovery.advice import Advice, Considered, Remedy
from kerasmem.rendering.formatting import plain_text
from kerasmem.rendering.remedy_texts import advice_table

MIB = 2**20
CODE = "kerasmem.fit(model, x, y, batch_size=64, micro_batches=4)\n"


def a_remedy(name, total, verdict, result="same training trajectory"):
    return Remedy(
        name, ({"kind": "micro_batches", "value": 4},), result, "same arithmetic in smaller pieces", 1.0,
        total * MIB, total * MIB - 1000, total * MIB + 5000, 100 * MIB, verdict, "graph", CODE,
    )  # fmt: skip


def some_advice(verdict="does not fit", name="mnist_cnn"):
    remedies = (
        a_remedy("4 micro-batches of 16", 30, "fits"),
        a_remedy("half precision (mixed_float16)", 60, "too close to call", "same network, other rounding"),
    )
    return Advice(
        ModelFacts(name, "model.keras", 8, 1_111_946, 1_111_946),
        Settings(64, "adam", "mse", "float32", "train", "graph", "graph", "50MiB"),
        Bytes(100 * MIB, 95 * MIB, 110 * MIB, *[None] * 7),
        DeviceVerdict("50MiB", 50 * MIB, 50 * MIB, verdict),
        remedies,
        remedies[:1] if verdict != "fits" else (),
        (Considered("LoRA", "no kernel is larger than its factors"),),
        ("something to know",),
    )


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut(width):
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=True, color_system=None).print(advice_table(some_advice(), width))
    text = buffer.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    joined = " ".join(text.split())
    for word in ("micro-batches", "precision", "70.0 MiB", "fits", "Not offered", "something to know"):
        assert word in joined, word


def test_nothing_saves():
    bare = some_advice()
    text = plain_text(advice_table(Advice(bare.model, bare.settings, bare.need, bare.device)))
    assert "No remedy was found that saves memory." in text


def test_a_hostile_name():
    assert "\x1b" not in plain_text(advice_table(some_advice(name="\x1b[31mred")))
