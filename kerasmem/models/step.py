"""Preparing and tracing the step of an opened model, without allocating its weights.

    with open_model("keras.applications:ResNet50") as opened:
        prepared = prepare_step(opened.model, opened.training, structure, inputs, batch_size=32)
        traced = trace_step(prepared)          # a TensorFlow graph without results

The step is the method that `fit`, `evaluate` or `predict` calls for each batch, including a custom `train_step`. The
batch is an argument, which the caller holds during the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from kerasmem.compat.gradients import forget_gradients
from kerasmem.compat.keras_layers import flatten_layers, functional_class, graph_of, symbolic_build, unwritten_tensor
from kerasmem.compat.keras_state import handle_only, is_watched, raw_value
from kerasmem.compat.keras_training import compute_loss, loss_and_metrics_built
from kerasmem.compat.tensorflow_runtime import functions_traced_anew, stacks_left_out
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason, runs_on_jax, symbolic_outputs
from kerasmem.models.compiling import TrainingSettings, compile_model, loss_name, sparse_losses
from kerasmem.models.data import Batch, Leaf
from kerasmem.models.inputs import ByKeyword, ModelInput, TargetSettings, WithNumbers, by_place, data_inputs
from kerasmem.models.op_names import record_scopes
from kerasmem.models.own_step import has_call, has_own_step, optimizers_of, variables_of
from kerasmem.models.user_code import is_of_a_library
from kerasmem.models.weightless import placeholders_for, with_stand_ins

_STEPS = {"train": "train_step", "evaluate": "test_step", "inference": "predict_step"}


class TargetsError(UsageError):
    """The user's targets do not match the model."""


@dataclass(frozen=True)
class PreparedStep:
    """A compiled model and the batch of its step.

    Attributes:
        model: the compiled Keras model, with a built optimizer.
        x: the inputs in the model's structure: Keras tensors with the batch in their shape, or numbers.
        y: the targets as Keras tensors, or None.
        mode: "train", "evaluate" or "inference".
        jit_compile: whether XLA compiles the step.
        assumptions: assumptions about optimizer and loss.
        sample_weight: the sample weights as Keras tensors, or None.
        element: argument of `train_step` with Keras tensors, if it is from the user's data; else None.
        leaves: the tensors of that argument, with the values of sparse and ragged ones.
    """

    model: Any
    x: Any
    y: Any
    mode: str
    jit_compile: bool
    assumptions: tuple[str, ...] = field(default=())
    sample_weight: Any = None
    element: Any = None
    leaves: tuple[Leaf, ...] = ()

    @property
    def data(self) -> Any:
        """Argument of `train_step`. Inputs without targets are in a tuple, so that none is mistaken for a target."""
        if self.element is not None:
            return self.element
        if self.sample_weight is not None:
            return (self.x, self.y, self.sample_weight)
        if self.y is not None:
            return (self.x, self.y)
        return (self.x,) if isinstance(self.x, (list, tuple)) else self.x


@dataclass(frozen=True, eq=False)
class PlainVariable:
    """Attributes of a `tf.Variable` that is not a Keras variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool


@dataclass(frozen=True)
class TracedStep:
    """A step as a TensorFlow graph.

    Attributes:
        function: the concrete function. Its captured inputs are the variables' handles.
        flat: arguments of the function: the flat batch.
        captures: name of a placeholder in the graph → Keras variable.
        variables: all variables of the model, the optimizers and the metrics, in order of creation.
        kinds: id of a variable → "weights", "optimizer" or "metrics".
        scopes: name scope → names of its enclosing models and layers, the outermost first, and of its layer.
        optimizers: names of the optimizers, including inner ones.
    """

    function: Any
    flat: tuple[Any, ...]
    captures: dict[str, Any]
    variables: tuple[Any, ...]
    kinds: dict[int, str]
    scopes: dict[str, tuple[str, ...]]
    optimizers: tuple[str, ...]


def prepare_step(
    model: Any,
    training: TrainingSettings,
    structure: Any,
    inputs: list[ModelInput],
    batch_size: int,
    mode: str = "train",
    jit_compile: bool = False,
    known: PreparedStep | None = None,
) -> PreparedStep:
    """Compile the model and infer the shapes of one batch, including its targets.

    Args:
        model: a Keras model.
        training: the user's replacements of arguments of `compile`.
        structure: structure of the model's inputs (from `model_inputs`).
        inputs: the inputs, with known dimensions except the batch.
        batch_size: samples in the batch.
        mode: "train", "evaluate" or "inference".
        jit_compile: whether XLA compiles the step.
        known: prepared step of the model with the same settings and another batch size. It stays compiled.

    Raises:
        ModelError: If Keras cannot compile or build the model.
        TargetsError: If the user's targets do not match the model.
    """
    keras = import_keras()
    batch = None if training.batch is None else training.batch.resized(batch_size)
    if batch is not None:
        inputs = data_inputs(model, batch)[1]
    flat = [model_input.tensor(batch_size) for model_input in inputs]
    x = pack_inputs(structure, flat)
    outputs = cache(partial(output_spec, model, structure, flat))
    try:
        if mode == "inference":
            if has_call(model):
                outputs()
            leaves = [model_input.leaf for model_input in inputs if model_input.leaf is not None]
            return PreparedStep(model, x, None, mode, jit_compile, leaves=tuple(leaves))
        assumptions = compile_model(model, training, outputs) if known is None else known.assumptions
        model.jit_compile = jit_compile
        if batch is None:
            y = step_targets(model, training.targets, outputs, batch_size)
            weights = training.targets.sample_weight
            sample_weight = None if weights is None else keras.KerasTensor((batch_size, *weights), "float32")
            prepared = PreparedStep(model, x, y, mode, jit_compile, assumptions, sample_weight)
        else:
            prepared = _prepare_batch(model, batch, mode, jit_compile, assumptions)
        _check_targets(prepared, "data" if batch is not None else "target_shape (--target-shape)")
        if known is None and not (has_own_step(model) or (batch is not None and batch.is_irregular)):
            _build(prepared, outputs())
        elif known is None and runs_on_jax():  # TensorFlow builds it during the trace
            symbolic_build(model, data_batch=prepared.data)
    except KerasmemError:
        raise
    except Exception as error:
        if training.targets != TargetSettings():
            raise TargetsError(
                f"--target-shape and --target-dtype must match the outputs and the loss of model {model.name!r}: "
                f"{keras_reason(error)}"
            ) from error
        raise ModelError(f"model {model.name!r} cannot be prepared for training: {keras_reason(error)}") from error
    return prepared


def trace_step(prepared: PreparedStep, keep_alive: list[Any] | None = None, has_open_batch: bool = False) -> TracedStep:
    """Trace the step into a TensorFlow graph, without computing it or allocating weights.

    Args:
        prepared: result of `prepare_step`.
        keep_alive: list that receives the variables' stand-ins. If it is not None, they have reserved memory that is
            never touched, because XLA's compiler needs values.
        has_open_batch: whether the graph is that of `fit`, which knows no batch size when it traces a step. Else
            results that depend on shapes become constants. Defaults to False.

    Raises:
        ModelError: If the step cannot be traced.
    """
    import tensorflow as tf

    keras = import_keras()
    leaves = keras.tree.flatten(prepared.data)
    batch = batch_leaves(prepared)
    flat = tuple(tf.TensorSpec(shape, dtype) for leaf in batch for shape, dtype in leaf.parts())
    open_flat = [tf.TensorSpec(shape, dtype) for leaf in batch for shape, dtype in leaf.open_parts()]
    stand_ins: dict[int, Any] = {}
    references: list[Any] = [] if keep_alive is None else keep_alive

    def make(variable: Any) -> Any:
        stand_in = _unwritten_variable(variable) if keep_alive is not None else handle_only(variable)
        references.append(stand_in)
        stand_ins[id(stand_in.handle)] = variable
        return stand_in

    run = getattr(prepared.model, _STEPS[prepared.mode])
    variables = [variable for variable, _ in variables_of(prepared.model, prepared.mode).values()]
    # XLA's compiler reads the variables, which may be on another device.
    others = [] if keep_alive is None else [variable for variable in variables if raw_value(variable) is not None]

    @tf.autograph.experimental.do_not_convert
    def step(*tensors: Any) -> Any:
        rest = iter(tensors)
        own = iter(batch)
        parts = [next(own).joined(rest) if isinstance(leaf, keras.KerasTensor) else leaf for leaf in leaves]
        return run(keras.tree.pack_sequence_as(prepared.data, parts))

    with with_stand_ins(make, others), stacks_left_out(), functions_traced_anew(), record_scopes() as recorded:
        for variable in variables:
            if (value := raw_value(variable)) is not None:
                stand_ins.setdefault(id(value.handle), variable)
        try:
            traced = tf.function(step, jit_compile=prepared.jit_compile or None)
            function = traced.get_concrete_function(*(open_flat if has_open_batch else flat))
        except Exception as error:
            reason = f"the step of model {prepared.model.name!r} cannot be traced: {keras_reason(error)}"
            if has_own_step(prepared.model):
                values = {"x": prepared.x, "y": prepared.y, "sample_weight": prepared.sample_weight}
                known = ", ".join(name for name, value in values.items() if value is not None)
                reason = (
                    f"the step of model {prepared.model.name!r} cannot be traced on ({known}); pass data=(x, y) or "
                    f"data=(x, y, sample_weight), or see --input-shape and --target-shape: {keras_reason(error)}; its "
                    f"argument was {prepared.data}"
                )
            raise ModelError(reason) from error
    forget_gradients(function.graph)  # it has its gradients, and the entries would keep it alive
    for variable in function.graph.variables:  # those of the user's code without Keras
        plain = PlainVariable(variable.name, tuple(variable.shape), variable.dtype.base_dtype.name, variable.trainable)
        stand_ins.setdefault(id(variable.handle), plain)
    captures = {
        placeholder.op.name: stand_ins[id(handle)]
        for handle, placeholder in function.graph.captures
        if id(handle) in stand_ins
    }
    by_id = variables_of(prepared.model, prepared.mode)
    for variable in captures.values():  # with states that Keras does not count as weights (stateful RNN)
        by_id.setdefault(id(variable), (variable, "weights"))
    return TracedStep(
        function,
        flat,
        captures,
        variables=tuple(variable for variable, _ in by_id.values()),
        kinds={key: kind for key, (_, kind) in by_id.items()},
        scopes=recorded.scopes,
        optimizers=tuple(str(item.name) for item in optimizers_of(prepared.model) if prepared.mode == "train"),
    )


def _check_targets(prepared: PreparedStep, argument: str) -> None:
    """Refuse a batch without the targets that Keras's own step needs.

    Raises:
        TargetsError: If the model has a loss, and the batch has no targets.
    """
    model = prepared.model
    if prepared.y is not None or not model.loss:
        return
    methods = (getattr(type(model), name) for name in (_STEPS[prepared.mode], "compute_loss"))
    if all(map(is_of_a_library, methods)):
        raise TargetsError(
            f"{argument} must give the targets (y) of the loss {loss_name(model)!r} of model {model.name!r}; got none. "
            "Pass data=(x, y), or their shape"
        )


def _prepare_batch(
    model: Any, batch: Batch, mode: str, jit_compile: bool, assumptions: tuple[str, ...]
) -> PreparedStep:
    """Return the step on a batch of the user's data."""

    def to_tensor(leaf: Leaf | None) -> Any:
        return None if leaf is None else leaf.tensor()

    element = import_keras().tree.map_structure(to_tensor, batch.element)
    x, y, sample_weight = replace(batch, element=element).parts()
    return PreparedStep(
        model, x, y, mode, jit_compile, assumptions, sample_weight, element=element, leaves=tuple(batch.leaves)
    )


def batch_leaves(prepared: PreparedStep) -> list[Leaf]:
    """Return the tensors of a step's batch."""
    if prepared.leaves:
        return list(prepared.leaves)
    keras = import_keras()
    tensors = (leaf for leaf in keras.tree.flatten(prepared.data) if isinstance(leaf, keras.KerasTensor))
    return [Leaf(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


def _build(prepared: PreparedStep, outputs: Any) -> None:
    """Build the loss, the metrics and the optimizer's slots, as the first step does."""
    model, x, y = prepared.model, prepared.x, prepared.y
    if y is not None and all(layer.built for layer in flatten_layers(model)):  # saves a call of the model
        loss_built, metrics_built = loss_and_metrics_built(model)
        if not metrics_built:
            symbolic_outputs(model.compute_metrics, x, y, outputs, sample_weight=prepared.sample_weight)
        if not loss_built:
            symbolic_outputs(
                partial(compute_loss, model), x, y, outputs, sample_weight=prepared.sample_weight, training=False
            )
    symbolic_build(model, data_batch=prepared.data)
    optimizer = getattr(model, "optimizer", None)
    if prepared.mode == "train" and optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _unwritten_variable(variable: Any) -> Any:
    """Create a variable in reserved memory that is never written, and so occupies no pages."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/device:CPU:0"):
        initial = partial(unwritten_tensor, tuple(variable.shape), tf.as_dtype(variable.dtype))
        return tf.Variable(initial, trainable=is_watched(variable), name=variable.name, dtype=variable.dtype)


def pack_inputs(structure: Any, flat: list[Any]) -> Any:
    """Pack flat inputs into a structure of `model_inputs`."""
    if isinstance(structure, WithNumbers):
        return (pack_inputs(structure.structure, flat), dict(structure.numbers))
    if isinstance(structure, ByKeyword):
        return dict(zip(structure, flat, strict=True))
    nested = isinstance(structure, (list, tuple, dict))
    return import_keras().tree.pack_sequence_as(structure, flat) if nested else flat[0]


def output_spec(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the outputs of a model for inputs (Keras tensors), by a call if it does not declare them."""
    keras = import_keras()
    graph = graph_of(model)
    if type(model).call not in (keras.Sequential.call, functional_class().call) or graph is None:
        return infer_by_call(model, structure, flat)
    declared = [tuple(tensor.shape[1:]) for tensor in graph.inputs]
    outputs = keras.tree.flatten(graph.output)
    is_open = any(None in tensor.shape[1:] or tensor.shape[:1] != (None,) for tensor in outputs)
    if is_open or declared != [tuple(tensor.shape[1:]) for tensor in flat]:
        return infer_by_call(model, structure, flat)
    batch = flat[0].shape[0]
    return keras.tree.map_structure(lambda leaf: keras.KerasTensor((batch, *leaf.shape[1:]), leaf.dtype), graph.output)


def infer_by_call(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the outputs of a model by calling it and all its layers on shapes."""

    def call(*tensors: Any) -> Any:
        packed = pack_inputs(structure, list(tensors))
        with placeholders_for(model.variables):
            return model(**packed) if isinstance(structure, ByKeyword) else model(packed)

    return symbolic_outputs(call, *flat)


def step_targets(model: Any, settings: TargetSettings, outputs: Callable[[], Any], batch_size: int) -> Any:
    """Return the targets of a model's step as Keras tensors, or None if there are none.

    Args:
        model: a compiled model.
        settings: the user's settings of the targets.
        outputs: function that returns the model's outputs. It is called only if the loss decides the targets.
        batch_size: samples in the batch.

    Raises:
        UsageError: If the user sets a dtype, and the shape is unknown.
    """
    keras = import_keras()
    if settings.are_none:
        return None
    if settings.shapes:
        default = "int32" if any(sparse_losses(model.loss, None)) else "float32"
        targets = {
            name: keras.KerasTensor((batch_size, *shape.sizes), shape.dtype or settings.dtype or default)
            for name, shape in settings.shapes.items()
        }
        if list(targets) == [""]:
            return targets[""]
        return tuple(targets.values()) if by_place(targets) else targets
    if has_own_step(model) and (model.loss is None or not has_call(model)):
        if settings.dtype is not None:
            raise UsageError("--target-dtype needs --target-shape, because the shape of the targets is unknown")
        return None
    try:
        inferred = outputs()
    except Exception:
        if has_own_step(model):  # its `call` may take other arguments than its `train_step`
            return None
        raise
    labels = target_spec(model.loss, inferred, batch_size, getattr(model, "output_names", None))
    return keras.tree.map_structure(lambda label: keras.KerasTensor(label.shape, settings.dtype or label.dtype), labels)


def target_spec(loss: Any, outputs: Any, batch_size: int, names: Sequence[str] | None = None) -> Any:
    """Return the targets (Keras tensors): class numbers for sparse losses, else one value for each output value.

    Args:
        loss: loss of `compile`, or one for each output.
        outputs: outputs (tensors or Keras tensors).
        batch_size: samples, where the outputs do not say.
        names: names of the outputs, for a dictionary of losses and a list of outputs.
    """
    keras = import_keras()
    flat = keras.tree.flatten(outputs)
    labels = []
    for tensor, is_sparse in zip(flat, sparse_losses(loss, outputs, names), strict=True):
        shape = tuple(batch_size if number == 0 and size is None else size for number, size in enumerate(tensor.shape))
        is_float = tensor.dtype.startswith(("float", "bfloat"))
        dtype = "int32" if is_sparse else "float32" if is_float else tensor.dtype
        labels.append(keras.KerasTensor(shape[:-1] if is_sparse else shape, dtype))
    return keras.tree.pack_sequence_as(outputs, labels)
