#!/usr/bin/env python3
"""Compute kerasmem/estimation/data/known_networks.json: the formula's figures for well-known networks at 224².

    python scripts/known_networks.py          # rewrite the file
    python scripts/known_networks.py --check  # fail if it would change

The networks of keras.applications are built from there, with their top, for 224 × 224 × 3; AlexNet (one tower) and
GoogLeNet (without the auxiliary outputs) are built here from their papers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TARGET = ROOT / "kerasmem" / "estimation" / "data" / "known_networks.json"
SIDE = 224


def alexnet() -> Any:
    """Krizhevsky, Sutskever, Hinton 2012, as one tower."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((SIDE, SIDE, 3))
    for filters, size, stride, pool in ((96, 11, 4, True), (256, 5, 1, True), (384, 3, 1, False), (384, 3, 1, False),
                                        (256, 3, 1, True)):  # fmt: skip
        x = layers.Conv2D(filters, size, stride, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(3, 2)(x) if pool else x
    x = layers.Flatten()(x)
    for units in (4096, 4096):
        x = layers.Dropout(0.5)(layers.Dense(units, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))


def googlenet() -> Any:
    """Szegedy and others 2014 (Inception v1), table 1."""
    import keras

    layers = keras.layers

    def conv(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", activation="relu")(x)

    def pool(x: Any) -> Any:
        return layers.MaxPooling2D(3, 2, padding="same")(x)

    def block(x: Any, one: int, to_three: int, three: int, to_five: int, five: int, pooled: int) -> Any:
        beside = layers.MaxPooling2D(3, 1, padding="same")(x)
        return layers.Concatenate()([
            conv(x, one, 1), conv(conv(x, to_three, 1), three, 3), conv(conv(x, to_five, 1), five, 5),
            conv(beside, pooled, 1),
        ])  # fmt: skip

    inputs = keras.Input((SIDE, SIDE, 3))
    x = pool(conv(inputs, 64, 7, 2))
    x = pool(conv(conv(x, 64, 1), 192, 3))
    x = pool(block(block(x, 64, 96, 128, 16, 32, 32), 128, 128, 192, 32, 96, 64))
    for sizes in ((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
                  (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128)):  # fmt: skip
        x = block(x, *sizes)
    x = block(block(pool(x), 256, 160, 320, 32, 128, 128), 384, 192, 384, 48, 128, 128)
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))


def application(name: str) -> Callable[[], Any]:
    """Return a factory of a network of keras.applications."""

    def build() -> Any:
        import keras

        return getattr(keras.applications, name)(weights=None, input_shape=(SIDE, SIDE, 3))

    return build


BUILDERS: dict[str, Callable[[], Any]] = {
    "AlexNet": alexnet,
    "GoogLeNet": googlenet,
    "VGG-16": application("VGG16"),
    "VGG-19": application("VGG19"),
    "Inception v3": application("InceptionV3"),
    "ResNet-50": application("ResNet50"),
    "ResNet-152": application("ResNet152"),
    "MobileNet": application("MobileNet"),
    "MobileNetV2": application("MobileNetV2"),
    "DenseNet-121": application("DenseNet121"),
    "Xception": application("Xception"),
    "EfficientNet-B0": application("EfficientNetB0"),
    "EfficientNet-B7": application("EfficientNetB7"),
    "ConvNeXt-T": application("ConvNeXtTiny"),
}


def figures(name: str) -> tuple[int, int]:
    """Return parameters and activation elements of one network."""
    import kerasmem

    report = kerasmem.estimate(BUILDERS[name], method="formula")
    return report.model.parameters, report.formula.activation_elements_per_sample


def table(names: list[str]) -> str:
    """Return the text of the file: a row for each network."""
    rows = [json.dumps([name, *figures(name)]) for name in names]
    return "[\n" + ",\n".join(f"  {row}" for row in rows) + "\n]\n"


if __name__ == "__main__":
    text = table(list(BUILDERS))
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.read_text() == text else f"{TARGET} is not what this script computes")
    TARGET.write_text(text)
