"""Search a grid of models, each in a subprocess. One of them is too large, and the search continues.

Runs offline in about a minute:

    python examples/grid_search.py
"""

import argparse
import itertools
from typing import Any

import numpy as np

import kerasmem
from kerasmem.units import format_size

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--limit", default="128MB", help="memory of the device for TensorFlow (default: %(default)s)")
options = parser.parse_args()

# Two moons: 2,000 points of two classes that a straight line cannot separate.
rng = np.random.default_rng(0)
angle, label = rng.uniform(0, np.pi, 2000), rng.integers(0, 2, 2000)
points = np.stack([np.cos(angle) + label, np.sin(angle) * (1 - 2 * label) + 0.3 * label], axis=1)
points = (points + rng.normal(0, 0.1, points.shape)).astype("float32")


def build(units: int, rate: float) -> Any:
    """Return a compiled model."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(units, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy"])
    return model


def trial(units: int, rate: float) -> tuple[float, list[np.ndarray]]:
    """Train one model. Its memory is freed when its subprocess ends."""
    model = build(units, rate)
    history = model.fit(points, label, validation_split=0.2, epochs=5, batch_size=64, verbose=0).history
    return history["val_accuracy"][-1], model.get_weights()


best_accuracy, best_setting, best_weights = 0.0, None, None  # keep the weights of one model only
print(f"{'units':>6} {'rate':>6} {'accuracy':>9} {'peak':>9}")
for units, rate in itertools.product((8, 64, 4096), (0.001, 0.01)):
    run = kerasmem.run_isolated(trial, units, rate, device_memory_limit=options.limit, output=False)
    if run.out_of_memory:
        print(f"{units:6} {rate:6} {run.reason}")
        continue
    accuracy, weights = run.get()
    if accuracy > best_accuracy:
        best_accuracy, best_setting, best_weights = accuracy, (units, rate), weights
    print(f"{units:6} {rate:6} {accuracy:9.3f} {format_size(run.peak_bytes or 0):>9}")

if best_setting is not None:
    model = build(*best_setting)
    model.set_weights(best_weights)
    units, rate = best_setting
    print(f"\nBest: {units} units, rate {rate}, accuracy {best_accuracy:.3f}, {model.count_params():,} parameters")
