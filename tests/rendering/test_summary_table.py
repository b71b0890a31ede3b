"""`kerasmem.summary`: the familiar table, its options, and figures that agree with Keras's own."""

from __future__ import annotations

import re

import keras
import pytest

import kerasmem
from kerasmem.errors import UsageError

layers = keras.layers


def text_of(model, *arguments, **options):
    pages = []
    kerasmem.summary(model, *arguments, print_fn=pages.append, **options)
    assert len(pages) == 1
    return pages[0]


def siamese():
    image = keras.Input((8, 8, 1))
    inner = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3, name="conv")], name="inner")
    tower = keras.Model(image, layers.Flatten(name="flat")(inner(image)), name="tower")
    a, b = keras.Input((8, 8, 1), name="a"), keras.Input((8, 8, 1), name="b")
    out = layers.Dense(1, name="head")(layers.Concatenate(name="join")([tower(a), tower(b)]))
    return keras.Model([a, b], out, name="siamese")


def test_says_what_keras_says(mnist_cnn):
    keras_text = []
    mnist_cnn.summary(print_fn=keras_text.append, line_length=100)
    ours = text_of(mnist_cnn)
    for row in re.findall(r"│ (\w+ \(\w+\)) +│ (\(None.*?\)) +│ +([\d,]+) │", keras_text[0]):
        assert re.search(re.escape(row[0]) + r" +│ " + re.escape(row[1]) + r" +│ +" + re.escape(row[2]) + " ", ours), (
            row
        )
    assert "Total params: 1,111,946 (4.24 MiB)" in ours
    assert "Memory at batch 32: 15.8 MiB" in ours
    assert "Memory at batch 64" in text_of(mnist_cnn, 64)


def test_prints_to_stdout_without_print_fn(mnist_cnn, capsys):
    kerasmem.summary(mnist_cnn)
    assert "Total params: 1,111,946" in capsys.readouterr().out


def test_nested_models_are_one_row_or_expanded():
    model = siamese()
    closed, opened = text_of(model), text_of(model, expand_nested=True)
    assert "tower (Functional)" in closed
    assert "conv" not in closed
    assert re.search(r"└ inner\s", opened)
    assert re.search(r" {3}└ conv \(Conv2D\)", opened)
    row = next(line for line in closed.splitlines() if "tower (Functional)" in line)
    assert " 20 " in row  # parameters once
    assert " 144 " in row  # 2 uses × 6 × 6 × 2 elements, Flatten being a view


def test_connections_and_trainable():
    text = text_of(siamese(), show_trainable=True)
    assert "Connected to" in text
    assert re.search(r"join .*│ tower +│", text)
    assert re.search(r"tower .*│ a, b +│ Y", text)
    assert "Trainable" in text
    assert "Connected to" not in text_of(keras.Sequential([keras.Input((2,)), layers.Dense(1)]))


def test_line_length_positions_and_range(mnist_cnn):
    text = text_of(mnist_cnn, line_length=90)
    assert max(map(len, text.splitlines())) == 90
    text = text_of(mnist_cnn, positions=[0.4, 0.65, 0.75, 0.88, 1.0])
    assert "conv2d" in text
    only = text_of(mnist_cnn, layer_range=["max_pooling2d.*", "flatten.*"])
    assert "dense" not in only.lower().split("total params")[0]
    for options, message in [
        ({"positions": [0.5, 1.0]}, "5 columns"),
        ({"positions": [0.5, 0.4, 0.6, 0.8, 1.0]}, "must grow"),
        ({"layer_range": ["nope", "flatten"]}, "'nope'"),
        ({"layer_range": ["a"]}, "pair"),
        ({"layer_range": ["(", "flatten"]}, "regular expression"),
    ]:
        with pytest.raises(UsageError, match=message):
            text_of(mnist_cnn, **options)
