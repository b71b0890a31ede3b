"""Record three steps of a model in a process of its own: "recorded.py MODEL BATCH FOLDER"."""

from __future__ import annotations

import json
import sys

from kerasmem.devices.recording import start_recording
from kerasmem.estimation.real_steps import TensorFlowSession
from kerasmem.models.spec import StepSpec
from kerasmem.processes.fork_server import prepare_devices

MARK = "kerasmem-step"


class MarkedSession(TensorFlowSession):
    """Marks each step in the recording."""

    def step(self):
        import tensorflow as tf

        with tf.profiler.experimental.Trace(MARK):
            return super().step()


def main(model, batch_size, folder):
    prepare_devices(None)
    import tensorflow as tf

    start_recording(folder)
    run = MarkedSession(StepSpec(model)).run(int(batch_size), 2, "train")
    tf.profiler.experimental.stop()
    print(json.dumps([run.first, *run.peaks]))


if __name__ == "__main__":
    main(*sys.argv[1:])
