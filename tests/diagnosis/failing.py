"""A program that runs out of memory: a small model under the limit of TensorFlow's real allocator, or the host's."""

from __future__ import annotations

import json
import os
import resource
import sys


def model(where):
    import keras

    layers = keras.layers
    if where == "optimizer":  # weights and gradients fit, Adam's update of them does not
        parts = [keras.Input((1024,)), layers.Dense(2048, name="big"), layers.Dense(1024, name="big2")]
        return keras.Sequential([*parts, layers.Dense(10, name="head")], name="net"), 8
    conv = [layers.Conv2D(16, 3, padding="same", activation="tanh", name=f"conv_{n}") for n in range(3)]
    parts = [keras.Input((64, 64, 3)), *conv, layers.GlobalAveragePooling2D(name="pool"), layers.Dense(10, name="head")]
    return keras.Sequential(parts, name="net"), {"forward": 100, "backward": 44}[where]


def fit(where, compiled):
    import numpy as np

    import kerasmem

    net, batch = model(where)
    net.compile("adam", "mse", jit_compile=compiled)
    x, y = np.zeros((batch, *net.input_shape[1:]), "float32"), np.zeros((batch, 10), "float32")
    try:
        net.fit(x, y, batch_size=batch, verbose=0)
        print(json.dumps(None))
    except Exception as error:
        print(error, file=sys.stderr)
        print(json.dumps(kerasmem.explain_oom(error).to_dict()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # TensorFlow's own end may crash after a failure


def host():
    import numpy as np

    import kerasmem

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    try:
        np.zeros((3000, 224, 224, 3))
    except MemoryError as error:
        print(json.dumps(kerasmem.explain_oom(error).to_dict()))
    bytearray(10 << 30)  # the traceback is the log


if __name__ == "__main__":
    if sys.argv[1] == "host":
        host()
    else:
        fit(sys.argv[1], sys.argv[2] == "xla")
