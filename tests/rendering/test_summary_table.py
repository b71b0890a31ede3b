"""`kerasmem.summary`: the familiar table, its options, and figures that agree with Keras's own."""

from __future__ import annotations

import re

import keras

import kerasmem

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


def test_layers_of_nested_models_are_named_with_it():
    text = text_of(siamese(), show_trainable=True)
    (row,) = [line for line in text.splitlines() if line.startswith("│ tower/inner/conv")]
    assert " 20 " in row  # parameters once
    assert " 144 " in row  # 2 uses × 6 × 6 × 2 elements
    assert re.search(r"│ a, b +│ Y +│", row)


def test_connections():
    assert re.search(r"join .*│ tower/flat +│", text_of(siamese()))
    assert "Connected to" not in text_of(keras.Sequential([keras.Input((2,)), layers.Dense(1)]))


def test_a_line_has_the_length_asked_for(mnist_cnn):
    assert max(map(len, text_of(mnist_cnn, line_length=90).splitlines())) == 90
