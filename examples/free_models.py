"""Train and delete models, and print the memory that Keras's and kerasmem's clear_session leave in use.

    python examples/free_models.py

TensorFlow's GPU allocator runs on the CPU, because it counts every byte in use.
"""

import os

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # must be set before TensorFlow starts
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import kerasmem

for clear_session in (keras.utils.clear_session, kerasmem.clear_session):
    for number in range(1, 4):
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(10)])
        model.compile("adam", "mse")
        model.fit(np.ones((8, 512)), np.ones((8, 10)), verbose=0)
        del model
        clear_session()
        in_use = tf.config.experimental.get_memory_info("CPU:0")["current"]
        print(f"{clear_session.__module__.partition('.')[0]}: {in_use:>10,} bytes in use after model {number}")
