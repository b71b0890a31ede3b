"""The process in which the steps of `kerasmem.fit(isolated=True)` run, and may die. Started by `remote`."""

from __future__ import annotations

import traceback
from typing import Any

from kerasmem.processes.channel import serve_requests


def main() -> None:
    """Answer requests: the name of a method of `_Worker` with its arguments."""
    worker = _Worker()

    def answer(request: tuple[str, tuple[Any, ...]]) -> tuple[Any, bool]:
        from kerasmem.training.steps.engine import RanOut

        name, arguments = request
        try:
            return ("done", getattr(worker, name)(*arguments)), True
        except RanOut as failure:
            return ("ran out", (failure.diagnosis.to_dict(), failure.is_dead)), not failure.is_dead
        except Exception as error:
            traceback.print_exc()
            return ("failed", f"{type(error).__name__}: {error}"), True

    # What a failed XLA step left behind must not be touched, not even to free it: `serve_requests` sees to that.
    serve_requests(answer)


class _Worker:
    def make(self, packed: dict[str, Any], batch: Any, any_rows: bool) -> dict[str, Any]:
        """Make the model and all its variables; return what they are."""
        from kerasmem.training.steps.engine import LocalEngine
        from kerasmem.training.steps.packing import unpack
        from kerasmem.training.steps.state import describe, variables

        self.model = unpack(packed)
        self.model._symbolic_build(data_batch=_tensors(batch))
        self.engine = LocalEngine(self.model, any_rows=any_rows)
        return {group: describe(some) for group, some in variables(self.model).items() if group != "random"}

    def train(self, batch: Any, size: int) -> dict[str, Any]:
        return _plain(self.engine.train(_tensors(batch), size))

    def test(self, batch: Any, size: int) -> dict[str, Any]:
        return _plain(self.engine.test(_tensors(batch), size))

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def load(self, state: dict[str, Any]) -> None:
        self.engine.load(state)

    def reset_metrics(self) -> None:
        self.engine.reset_metrics()

    def set_rate(self, rate: float) -> None:
        self.engine.set_rate(rate)


def _tensors(batch: Any) -> Any:
    import keras
    import tensorflow as tf

    with tf.device("CPU:0"):
        return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)


def _plain(logs: dict[str, Any]) -> dict[str, Any]:
    import keras

    return keras.tree.map_structure(lambda value: keras.ops.convert_to_numpy(value), logs)


if __name__ == "__main__":
    main()
