"""`kerasmem.estimate`: one call for every method and every kind of model.

`estimate` builds a `StepSpec`, an `EstimateSession` opens the model and calls it on shapes (`ShapedStep`), a method of
`METHODS` estimates that step (`Outcome`), and the session makes the report (`MemoryReport`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from typing_extensions import Unpack

from kerasmem.devices.host import default_memory_limit
from kerasmem.errors import ModelError, UsageError
from kerasmem.estimation.report import MemoryReport
from kerasmem.estimation.session import EstimateSession
from kerasmem.models.spec import EstimateSettings, StepSpec, shows_settings
from kerasmem.processes.children import ChildFailure, Limits
from kerasmem.processes.forking import run_child

LONGEST = 1800.0  # seconds of an isolated estimate, as many as `kerasmem estimate` has


@shows_settings()
def estimate(model: Any, *, isolated: bool = False, **settings: Unpack[EstimateSettings]) -> MemoryReport:
    """Return how much memory training a model will take, without allocating its weights.

    Args:
        model: a path (`.h5`, `.keras`, architecture `.json`), "package.module:function", a function that returns
            a model or the step function of a training loop, or a Keras model.
        batch_size: samples in a batch. Ignored if the model fixes its own. Defaults to 32.
        method: "graph" (simulates TensorFlow's executor and allocator; on the card of `device`, if it names one),
            "xla" (XLA's plan for this machine), "gpu-target" (XLA's plan for a card that is not here), "probe" (runs
            real steps at small batches), "formula" (shape inference, see `kerasmem.estimation.formula`), or "auto":
            the method that matches how Keras would train. Defaults to "auto".
        optimizer: name of a Keras optimizer. Defaults to the one that the model was compiled with.
        loss: name of a loss, for the record. Defaults to the model's.
        dtype_policy: a Keras dtype policy such as "mixed_float16". Defaults to the model's.
        device: a card of the catalogue ("t4") or a size ("16GB", or bytes). Adds a verdict to the report.
        jit_compile: whether XLA compiles the step, for method "auto". Defaults to "auto", as Keras decides.
        mode: "train", "evaluate" (a forward pass with loss and metrics) or "inference". Defaults to "train".
        replicas: devices that train together under `tf.distribute`, each with the whole model and its share of the
            batch. The report is of one of them. Defaults to 1.
        input_shape: open dimensions of the inputs, without the batch: a shape, or name to shape. Of a model with a
            `train_step` and no `call()` what `fit` gives it as `x`; {"0": …, "1": …} for a tuple. Of a step function
            what it takes, by name.
        target_shape: shape of the targets without the batch, if it does not follow from the loss: a shape, a mapping
            of names to shapes, or "none".
        target_dtype: dtype of the targets, if it does not follow from the loss.
        factory: "package.module:function" that builds the model a weights-only file belongs to.
        factory_args: keyword arguments for the function that builds the model.
        custom_objects: classes and functions of the file that are not Keras's, by name.
        trust: allow serialised Python in the file to run. Defaults to False.
        isolated: open a file of unknown origin in a subprocess, limited to half an hour and to 80 % of the memory that
            this job may have. The first call takes seconds, others 0.1 s more. Defaults to False.

    Returns:
        A `MemoryReport`; all sizes in bytes.

    Raises:
        UsageError: If an argument is wrong.
        ModelFileError: If the file cannot be opened. Its subclass and message give the reason and the fix.
        ModelError: If the model cannot be built or called.

    Examples:
        >>> import keras, kerasmem
        >>> model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        >>> kerasmem.estimate(model, batch_size=32).formula.total_bytes
        266064
    """
    spec = StepSpec(model, **settings)
    if not isolated:
        return estimate_spec(spec)
    if not isinstance(spec.model, (str, os.PathLike)):
        raise UsageError("isolated: only a file, or module:function, is opened in a process of its own")
    return forked_report(spec.label, Limits(LONGEST, default_memory_limit()), lambda: estimate_spec(spec))


def estimate_spec(spec: StepSpec) -> MemoryReport:
    """Estimate the step that a spec describes."""
    with EstimateSession(spec) as session:
        return session.estimate()


def forked_report(where: str, limits: Limits, ask: Callable[[], MemoryReport]) -> MemoryReport:
    """Make a report in a forked process that has already loaded TensorFlow, from the second call on.

    Args:
        where: the model, for messages.
        limits: of that process.
        ask: makes the report.

    Raises:
        KerasmemError: as `ask`; whatever else goes wrong, a crash or a limit included, is a `ModelError`.
    """
    try:
        return MemoryReport.from_dict(run_child(lambda: ask().to_dict(), limits=limits))
    except ChildFailure as failure:
        raise ModelError(f"{where}: {failure.reason}") from failure
