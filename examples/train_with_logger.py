"""Train a small convolutional network and log its memory, batch by batch.

Runs offline in well under a minute:

    python examples/train_with_logger.py
"""

import os
import tempfile
from pathlib import Path

# Without a GPU, this makes TensorFlow use its GPU allocator (BFC) on the CPU, so that the figures are comparable.
# It must be set before TensorFlow is imported.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import kerasmem
from kerasmem.units import format_size

# Must come before the first model or tensor: TensorFlow otherwise takes the whole GPU at once.
growth = kerasmem.enable_memory_growth()
print(f"Memory growth: {growth.message}")

# Images of 28 × 28; the class is the brightest quarter.
rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 2000)
images = rng.random((2000, 28, 28, 1), dtype="float32")
for image, label in zip(images, labels, strict=True):
    row, column = divmod(int(label), 2)
    image[14 * row : 14 * row + 14, 14 * column : 14 * column + 14] += 0.3

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

folder = Path(tempfile.mkdtemp())
logger = kerasmem.MemoryLogger(folder / "memory.csv", verbose=1, epoch_logs="bytes")
history = model.fit(
    images,
    labels,
    batch_size=64,
    epochs=3,
    validation_split=0.2,
    verbose=0,
    callbacks=[logger, keras.callbacks.CSVLogger(folder / "training.csv")],  # the logger first
)

print(f"\nIn history.history and training.csv: {', '.join(history.history)}")

peak = logger.timeline.largest("peak_bytes", phase="train")
if peak is not None:  # None if TensorFlow has no allocator statistics
    print(
        f"Highest peak: {format_size(peak.peak_bytes)} on {peak.device}, in {peak.phase} batch {peak.batch} "
        f"of epoch {peak.epoch + 1}; {format_size(peak.in_use_bytes)} of it stayed in use afterwards"
    )
for note in logger.notes:
    print(f"Not known: {note}")
cost = logger.overhead.per_batch_seconds * 1e6
print(f"The logger took {cost:.0f} µs a batch. Its {len(logger.timeline)} rows are in {folder / 'memory.csv'}")
