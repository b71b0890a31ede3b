"""Begin and end of a profiled batch in a training that runs in this process."""

from __future__ import annotations

import bisect
import contextlib
import math
import re
import tempfile
from collections.abc import Iterable
from typing import Any

from kerasmem.devices.recording import ALLOCATE, AllocatorEvent, of_device, read_recording, start_recording
from kerasmem.errors import KerasmemError, first_line
from kerasmem.models.facts import ModelFacts
from kerasmem.models.op_names import Attribution, outside_scopes
from kerasmem.models.op_scopes import NotedScopes, is_container, own_variables, scopes_noted
from kerasmem.models.own_step import optimizers_of
from kerasmem.models.sizes import variable_bytes
from kerasmem.models.training import training_of_model
from kerasmem.profiling.assembling import assemble
from kerasmem.profiling.known_tensors import tensors_of_model, tensors_of_python
from kerasmem.profiling.naming import Namer
from kerasmem.profiling.replaying import KnownTensor, replay_step
from kerasmem.profiling.results import ProfiledLayer, ProfileSettings, StepProfile

_MARK = "kerasmem-profiled-batch"
_NOTHING = (
    "TensorFlow's profiler recorded no allocations of {device}: on a CPU set TF_CPU_ALLOCATOR_USE_BFC=true before "
    "Python starts; on a GPU unset TF_GPU_ALLOCATOR"
)


class ProfilingError(KerasmemError):
    """A batch could not be profiled. Training continues."""


class StepRecorder:
    """Profiles one batch of a model's training: `watch` before the first batch, `begin` and `end` around the one.

    What `record` begins earlier tells of chunks that are live when the batch begins, such as batches that are ready.

    Examples:
        >>> recorder = StepRecorder(model)  # doctest: +SKIP
        >>> recorder.watch()  # doctest: +SKIP
        >>> model.train_on_batch(x, y)  # doctest: +SKIP
        >>> recorder.begin(); model.train_on_batch(x, y); recorder.end().bytes.total  # doctest: +SKIP
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._noted = NotedScopes()
        self._watching = contextlib.ExitStack()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._before: list[KnownTensor] = []
        self._mark: Any = None

    def watch(self) -> None:
        """Note the layers' name scopes from now on. The step must be traced after this."""
        self._watching.close()
        self._noted = self._watching.enter_context(scopes_noted())

    def record(self) -> None:
        """Begin to record.

        Raises:
            ProfilingError: If TensorFlow's profiler cannot be started, as another one runs.
        """
        if self._folder is not None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kerasmem-profile-")
        try:
            start_recording(self._folder.name)
        except Exception as error:
            self._forget()
            message = f"TensorFlow's profiler cannot be started ({first_line(error)}); is another one running?"
            raise ProfilingError(message) from None

    def begin(self) -> None:
        """Begin the batch, and to record if that was not begun before.

        Raises:
            ProfilingError: as `record`.
        """
        import tensorflow as tf

        self._watching.close()
        self.record()
        self._before = self._known_tensors()
        self._mark = tf.profiler.experimental.Trace(_MARK, step_num=1)
        self._mark.__enter__()

    def end(self) -> StepProfile:
        """End the recording, and return the profile.

        Raises:
            ProfilingError: If nothing was recorded, or the recording is not readable.
        """
        import tensorflow as tf

        if self._folder is None or self._mark is None:
            raise ProfilingError("no batch is being recorded")
        with contextlib.suppress(Exception):  # a device may run behind what Python has asked for
            tf.test.experimental.sync_devices()
        try:
            self._mark.__exit__(None, None, None)
            tf.profiler.experimental.stop()
            events, marks = read_recording(self._folder.name, _MARK)
        except Exception as error:
            raise ProfilingError(f"the recording cannot be read: {error}") from error
        finally:
            self._forget()
        device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
        own = of_device(events, device)
        if not own:
            raise ProfilingError(_NOTHING.format(device=device))
        begin = bisect.bisect_left(own, marks[0].time, key=lambda event: event.time) if marks else 0
        return self._profile(own[begin:], own[:begin], device, self._known_tensors())

    def cancel(self) -> None:
        """Drop the recording and the model."""
        import tensorflow as tf

        self._watching.close()
        if self._folder is not None:
            with contextlib.suppress(Exception):
                tf.profiler.experimental.stop(save=False)
            self._forget()

    def _forget(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._mark = None

    def _known_tensors(self) -> list[KnownTensor]:
        # The model's variables last: a tensor in Python that shares a variable's memory is that variable.
        return [*tensors_of_python("kept"), *tensors_of_model(self._model, self._noted.owners())]

    def _profile(
        self,
        events: tuple[AllocatorEvent, ...],
        earlier: tuple[AllocatorEvent, ...],
        device: str,
        after: list[KnownTensor],
    ) -> StepProfile:
        model = self._model
        rows = self._noted.rows(model)
        attribution = Attribution(self._noted.scopes, rows, tuple(each.name for each in optimizers_of(model)))
        pipeline = _pipeline_steps((*earlier, *events), attribution)
        outside = outside_scopes(self._noted.operations(), attribution)
        is_xla = bool(getattr(model, "jit_compile", False))
        unmodelled = []
        if is_xla:
            why = "XLA keeps the step in one buffer, whose plan `kerasmem profile --jit-compile` reads"
            unmodelled.append({"what": "layers inside XLA's buffer", "why": why, "bytes": None})
        if not rows:
            why = "their calls were not seen: the step was traced before the profiler watched, or runs eagerly"
            unmodelled.append({"what": "layers", "why": why, "bytes": None})
        training = training_of_model(model)
        execution = "none" if getattr(model, "run_eagerly", False) else "xla" if is_xla else "graph"
        return assemble(
            replay_step(events, earlier, self._before, after),
            Namer(attribution, outside=outside, pipeline_steps=pipeline, is_xla=is_xla),
            ModelFacts(
                model.name, "", len(rows), _elements(model.weights), _elements(model.trainable_weights)
            ),
            ProfileSettings(
                _batch_size((*earlier, *events), pipeline), training.optimizer, training.loss,
                model.dtype_policy.name, "train", execution, None,
            ),
            [_row(name, layer) for name, layer in rows.items()],
            notes=[f"one batch of a running training on {device}, recorded by TensorFlow's profiler"],
            unmodelled=unmodelled,
        )  # fmt: skip


def _pipeline_steps(events: tuple[AllocatorEvent, ...], attribution: Attribution) -> frozenset[int]:
    """Return the numbers of the data pipeline's steps, without operations of the model."""
    of_model, all_of_them = set(), set()
    for event in events:
        if event.kind == ALLOCATE and event.op and event.step:
            all_of_them.add(event.step)
            if attribution.path(event.op) or attribution.origin(event.op).phase != "forward":
                of_model.add(event.step)
    return frozenset(all_of_them - of_model) if of_model else frozenset()


def _batch_size(events: tuple[AllocatorEvent, ...], pipeline: frozenset[int]) -> int | None:
    """Return the first dimension of the largest tensor that the data pipeline made."""
    made = [event for event in events if event.step in pipeline and event.shape]
    largest = max(made, key=lambda event: event.requested, default=None)
    first = None if largest is None else re.match(r"\[(\d+)", largest.shape)
    return None if first is None else int(first.group(1))


def _row(name: str, layer: Any) -> ProfiledLayer:
    weights = own_variables(layer) if is_container(layer) else layer.variables
    shape = None
    with contextlib.suppress(Exception):  # of a layer that is called in several places, or is no functional one
        shape = tuple(layer.output.shape)
    return ProfiledLayer(
        name=name,
        class_name=type(layer).__name__,
        output_shape=shape,
        parameters=_elements(weights),
        trainable_parameters=_elements(each for each in weights if each.trainable),
        weight_bytes=sum(variable_bytes(each) for each in weights),
        dtype=str(layer.compute_dtype),
    )


def _elements(variables: Iterable[Any]) -> int:
    return sum(math.prod(each.shape) for each in variables)
