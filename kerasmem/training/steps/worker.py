"""The process of the steps of `kerasmem.fit(isolated=True)`. Started by `remote`."""

from __future__ import annotations

import traceback
from typing import Any

from kerasmem.processes.channel import serve_requests


def main() -> None:
    """Answer requests: the name of a method of `_Worker`, or of its engine, with arguments."""
    worker = _Worker()

    def answer(request: tuple[str, tuple[Any, ...], dict[str, Any]]) -> tuple[Any, bool]:
        from kerasmem.training.steps.engine import RanOut

        name, arguments, named = request
        try:
            method = getattr(worker if name in ("make", "step") else worker.engine, name)
            return ("done", method(*arguments, **named)), True
        except RanOut as failure:
            return ("ran out", (failure.diagnosis.to_dict(), failure.is_dead, failure.is_update)), not failure.is_dead
        except Exception as error:
            traceback.print_exc()
            return ("failed", f"{type(error).__name__}: {error}"), True

    # What a failed XLA step left behind must not be touched, not even to free it: `serve_requests` sees to that.
    serve_requests(answer)


class _Worker:
    def __init__(self) -> None:
        self.engine: Any = None

    def make(self, packed: dict[str, Any], batch: Any, loss_reduction: str | None, any_rows: bool) -> dict[str, Any]:
        """Make the model with all its variables, and return their description."""
        from kerasmem.training.model_state import describe, variables
        from kerasmem.training.steps.engine import LocalEngine, build_step
        from kerasmem.training.steps.packing import unpack

        model = unpack(packed)
        build_step(model, _tensors(batch))
        self.engine = LocalEngine(model, loss_reduction, any_rows=any_rows)
        return {group: describe(some) for group, some in variables(model).items() if group != "random"}

    def step(self, kind: str, batch: Any, size: int) -> dict[str, Any]:
        """Take a step and return its logs as arrays."""
        import keras

        return keras.tree.map_structure(keras.ops.convert_to_numpy, self.engine.step(kind, _tensors(batch), size))


def _tensors(batch: Any) -> Any:
    import tensorflow as tf

    from kerasmem.training.steps.batches import map_arrays

    with tf.device("CPU:0"):
        return map_arrays(tf.convert_to_tensor, batch)


if __name__ == "__main__":
    main()
