"""Train with a batch that does not fit: the step that runs out of memory is repeated in micro-batches.

    python examples/recover_from_oom.py [MB]

TensorFlow's GPU allocator runs on the CPU with a limit of 96 MB, so memory really runs out, without a GPU. With a limit
of 4000, no step runs out, and the weights are the same up to rounding.
"""

import os
import sys
import warnings

if os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") is None:  # must be set before TensorFlow starts
    limit = sys.argv[1] if len(sys.argv) > 1 else "96"
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = limit
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # oneDNN ends the process instead of raising an error

import keras
import numpy as np

import kerasmem

keras.utils.set_random_seed(0)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
images = np.random.default_rng(0).random((1200, 32, 32, 3), "float32")
labels = (images.mean((1, 2, 3)) * 1e4).astype("int32") % 10

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    history = kerasmem.fit(model, images, labels, batch_size=512, epochs=2, verbose=0)
for warning in caught:
    if warning.category is RuntimeWarning:
        print(warning.message)
for step in history.recoveries:
    print(f"step {step.step}: {step.rows} rows, then {step.micro_batch_rows} at a time")
print(f"loss of each epoch: {[round(loss, 6) for loss in history.history['loss']]}")
checksum = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
print(f"sum of the weights' absolute values: {checksum:.3f}")
