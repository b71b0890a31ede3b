"""The child process of `measure` and `probe`: opens the model with real weights and runs real steps.

Run by `kerasmem.processes.task.run_child`, never imported by the parent's process for its side effects.
"""

from __future__ import annotations

from typing import Any

from kerasmem.estimation.probe.session import Session
from kerasmem.models.backend import runs_on_jax
from kerasmem.models.spec import StepSpec
from kerasmem.processes.fork_server import prepare_devices
from kerasmem.processes.task import serve


def work(data: dict[str, Any]) -> dict[str, Any]:
    """Run the requested steps.

    Args:
        data: `request` (a `StepSpec`); `runs`, a list of {"batch_size", "steps"} with "mode" if it is not the
            request's; `seconds`, after which no further step of a run begins once two are done; `limit`, bytes for
            TensorFlow's allocator.

    Returns:
        Fields of `MeasuredSteps`. If memory ran out within a `limit`, only `ran_out`: the reason.
    """
    request = StepSpec.from_dict(data["request"])
    if runs_on_jax():
        from kerasmem.estimation.probe.on_jax import JaxSession

        return _run(JaxSession(request), data)
    from kerasmem.estimation.probe.on_tensorflow import StepRanOutError, TensorFlowSession, out_of_memory_line

    limit = data.get("limit")
    prepare_devices(limit)
    import tensorflow as tf

    try:
        return _run(TensorFlowSession(request), data)
    except (StepRanOutError, tf.errors.ResourceExhaustedError) as error:
        if limit is None:
            raise
        return {"ran_out": str(error) if isinstance(error, StepRanOutError) else out_of_memory_line(error)}


def _run(session: Session, data: dict[str, Any]) -> dict[str, Any]:
    seconds = data.get("seconds")
    runs = [session.run(run["batch_size"], run["steps"], seconds, run.get("mode")) for run in data["runs"]]
    return {**session.facts(), "runs": runs}


if __name__ == "__main__":
    serve(work)
