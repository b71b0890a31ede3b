"""The child process that tries a batch size under a limit: training, evaluation, and the smaller last batch.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from kerasmem.estimation.probe.worker import Session, StepRanOutError
from kerasmem.models.request import ModelRequest
from kerasmem.processes.task import serve
from kerasmem.units import MIB


def work(data: dict[str, Any]) -> dict[str, Any]:
    """Run the steps.

    Args:
        data: `request` (a `ModelRequest`), `limit` (bytes for TensorFlow's allocator), `batch_size`, `last` (samples of
            the last batch; 0 for none), `steps`.

    Returns:
        `device`; `peak` (bytes, the largest of any step), None where memory ran out; `reason`, None where it did not.
    """
    limit = max(1, data["limit"] // MIB)
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    import tensorflow as tf

    cards = tf.config.list_physical_devices("GPU")
    if cards:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
        tf.config.set_logical_device_configuration(cards[0], [logical])
    else:
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
    device = "GPU:0" if cards else "CPU:0"
    try:
        peak = _try(data)
    except StepRanOutError as error:
        return {"device": device, "peak": None, "reason": str(error)}
    except tf.errors.ResourceExhaustedError as error:  # before the first step
        return {"device": device, "peak": None, "reason": str(error).splitlines()[0][:300]}
    return {"device": device, "peak": peak, "reason": None}


def _try(data: dict[str, Any]) -> int:
    request = ModelRequest.from_dict(data["request"])
    session = Session(request, False)
    modes = (request.mode, "evaluate") if request.mode == "train" else (request.mode,)
    peak = 0
    for mode in modes:
        session.request = replace(request, mode=mode)
        steps = data["steps"] if mode == request.mode else 1
        for size, count in ((data["batch_size"], steps), (data["last"], 1)):
            if size:
                run = session.run(size, count - 1, None)
                peak = max(peak, run["first"], *run["peaks"])
    return peak


if __name__ == "__main__":
    serve(work)
