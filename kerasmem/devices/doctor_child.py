"""TensorFlow's report on itself, as fields of the doctor's `SelfReport`, from a process that may crash.

    python -m kerasmem.devices.doctor_child RESULT.json

The file is written again after each stage, so that a crash leaves the earlier fields.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from kerasmem.compat.borrowing import all_borrowed
from kerasmem.devices.kernels import onednn_is_left_off


def main(path: str) -> None:
    """Write the report to `path` as JSON."""
    found: dict[str, Any] = {"stage": "import tensorflow"}

    def reach(stage: str) -> None:
        found["stage"] = stage
        Path(path).write_text(json.dumps(found))

    reach("import tensorflow")
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    found |= {"tensorflow": str(tf.__version__), "folder": str(Path(tf.__file__).parent)}
    found |= {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
    found["built_with_cuda"] = bool(tf.test.is_built_with_cuda())
    reach("import keras")
    import keras

    found |= {"keras": str(keras.__version__), "backend": str(keras.config.backend())}
    reach("list the GPUs")
    gpus = tf.config.list_physical_devices("GPU")
    found["gpus"] = [
        {
            "name": gpu.name,
            "card": tf.config.experimental.get_device_details(gpu).get("device_name"),
            "growth": tf.config.experimental.get_memory_growth(gpu),
        }
        for gpu in gpus
    ]
    reach("start the devices")
    for gpu in gpus:  # a doctor must not take the memory of the patient
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.list_logical_devices()
    found["onednn_is_left_off"] = onednn_is_left_off()
    if found["backend"] == "tensorflow":
        reach("run a small training step")
        _step(tf, keras, found)
    reach("look at what kerasmem borrows")
    parts = [part for part in all_borrowed() if importlib.util.find_spec(part.package) is not None]
    lost = [(part, missing) for part in parts if (missing := part.missing()) is not None]
    found["borrowed"] = len(parts)
    found["lost"] = [{"package": part.package, "feature": part.feature, "missing": missing} for part, missing in lost]
    reach("done")


def _step(tf: Any, keras: Any, found: dict[str, Any]) -> None:
    import numpy as np

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    found["jit_compile"] = bool(model.jit_compile)  # as Keras resolves "auto" here
    model.train_on_batch(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"))


if __name__ == "__main__":
    main(sys.argv[1])
