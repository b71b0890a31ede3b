"""The step of an opened model, ready to be traced, compiled or run, without its weights being allocated.

    with open_model("keras.applications:ResNet50") as opened:
        prepared = prepare_step(opened.model, opened.training, structure, inputs, batch_size=32)
        traced = trace_step(prepared)          # a TensorFlow graph; nothing was computed

The step is what Keras's `fit` runs for one batch: `model.train_step` (the model's own if it has one, which need not
have a `call`), or `predict_step` for inference. The batch is an argument, held by the caller for as long as the step
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from kerasmem.compat.gradients import forget_gradients
from kerasmem.compat.keras_layers import flatten_layers, functional_class, graph_of, symbolic_build, untouched
from kerasmem.compat.keras_state import handle_only, raw_value
from kerasmem.compat.keras_training import compute_loss, loss_and_metrics_built
from kerasmem.compat.tensorflow_runtime import functions_traced_anew, stacks_left_out
from kerasmem.errors import KerasmemError, ModelError, UsageError
from kerasmem.models.backend import import_keras, keras_reason, runs_on_jax, symbolic_outputs
from kerasmem.models.inputs import ByKeyword, GivenTargets, ModelInput, WithNumbers, by_place
from kerasmem.models.op_names import scopes_noted
from kerasmem.models.own_step import has_call, has_own_step, optimizers_of, variables_of
from kerasmem.models.training import TrainingSettings, compile_model, sparse_losses
from kerasmem.models.weightless import placeholders_for, with_stand_ins

_STEPS = {"train": "train_step", "evaluate": "test_step", "inference": "predict_step"}


@dataclass(frozen=True)
class PreparedStep:
    """A compiled model and the batch that its step takes.

    Attributes:
        model: the Keras model, compiled, its optimizer built.
        x: the inputs as the model takes them, each a Keras tensor with the batch in its shape, or a number.
        y: the targets likewise; None if the step takes none.
        mode: "train", "evaluate" or "inference".
        jit_compile: whether XLA compiles the step.
        notes: assumptions.
        sample_weight: likewise; None if the step takes none.
    """

    model: Any
    x: Any
    y: Any
    mode: str
    jit_compile: bool
    notes: tuple[str, ...] = field(default=())
    sample_weight: Any = None

    @property
    def data(self) -> Any:
        """The batch as `train_step` takes it: several inputs alone are packed, so that none is taken for a target."""
        if self.sample_weight is not None:
            return (self.x, self.y, self.sample_weight)
        if self.y is not None:
            return (self.x, self.y)
        return (self.x,) if isinstance(self.x, (list, tuple)) else self.x


@dataclass(frozen=True, eq=False)
class PlainVariable:
    """A variable of TensorFlow without Keras, with the attributes of a Keras variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool


@dataclass(frozen=True)
class TracedStep:
    """A step as a TensorFlow graph.

    Attributes:
        function: the concrete function; its captured inputs are the handles of the variables.
        flat: the batch, flat: the function's arguments in order.
        captures: the name of the placeholder in the graph → the Keras variable.
        variables: all variables of model, optimizer and metrics, in the order in which they were made.
        kinds: id of a variable → "weights", "optimizer" or "metrics".
        scopes: name scope → the layers whose calls opened it, the outermost first.
        optimizers: the names of the optimizers, one inside another included.
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
    """Compile the model and find the shapes of one batch, targets included.

    Args:
        model: a Keras model; without weights inside `open_model`.
        training: optimizer, loss and metrics.
        structure: how the model takes its inputs (from `model_inputs`).
        inputs: the inputs, without open dimensions but the batch.
        batch_size: samples.
        mode: "train", "evaluate" or "inference".
        jit_compile: whether XLA compiles the step.
        known: the model's step for another batch size, prepared with the same settings: it stays compiled.

    Raises:
        ModelError: If Keras cannot compile or build it.
    """
    keras = import_keras()
    flat = [keras.KerasTensor((batch_size, *each.shape[1:]), each.dtype) for each in inputs]
    x = pack_inputs(structure, flat)
    outputs = cache(partial(output_spec, model, structure, flat))
    try:
        if mode == "inference":
            if has_call(model):
                outputs()
            return PreparedStep(model, x, None, mode, jit_compile)
        notes = compile_model(model, training, outputs, jit_compile) if known is None else known.notes
        y = step_targets(model, training.targets, outputs, batch_size)
        prepared = PreparedStep(model, x, y, mode, jit_compile, notes)
        if known is None and not has_own_step(model):
            _build(prepared, outputs())
        elif known is None and runs_on_jax():  # else it makes what it needs when it is traced
            symbolic_build(model, data_batch=prepared.data)
    except KerasmemError:
        raise
    except Exception as error:
        raise ModelError(f"model {model.name!r} cannot be prepared for training: {keras_reason(error)}") from error
    return prepared


def trace_step(prepared: PreparedStep, keep_alive: list[Any] | None = None) -> TracedStep:
    """Trace the step into a TensorFlow graph, without computing or allocating weights.

    Args:
        prepared: from `prepare_step`.
        keep_alive: where given, variables get memory that is reserved and never touched, as XLA's compiler needs
            values, and stay in this list.

    Raises:
        ModelError: If the step cannot be traced.
    """
    import tensorflow as tf

    keras = import_keras()
    leaves = keras.tree.flatten(prepared.data)
    flat = tuple(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, keras.KerasTensor))
    stand_ins: dict[int, Any] = {}
    kept: list[Any] = [] if keep_alive is None else keep_alive

    def make(variable: Any) -> Any:
        stand_in = _untouched(variable) if keep_alive is not None else handle_only(variable)
        kept.append(stand_in)
        stand_ins[id(stand_in.handle)] = variable
        return stand_in

    run = getattr(prepared.model, _STEPS[prepared.mode])

    @tf.autograph.experimental.do_not_convert
    def step(*tensors: Any) -> Any:
        rest = iter(tensors)
        parts = [next(rest) if isinstance(leaf, keras.KerasTensor) else leaf for leaf in leaves]
        return run(keras.tree.pack_sequence_as(prepared.data, parts))

    with with_stand_ins(make), stacks_left_out(), functions_traced_anew(), scopes_noted() as noted:
        for variable, _ in variables_of(prepared.model, prepared.mode).values():
            if (value := raw_value(variable)) is not None:
                stand_ins.setdefault(id(value.handle), variable)
        try:
            # A batch dimension of its own for each argument: what the step computes from shapes becomes constant.
            function = tf.function(step, jit_compile=prepared.jit_compile or None).get_concrete_function(*flat)
        except Exception as error:
            reason = f"the step of model {prepared.model.name!r} cannot be traced: {keras_reason(error)}"
            if has_own_step(prepared.model):
                reason += f"; it was given {prepared.data}: see --input-shape and --target-shape"
            raise ModelError(reason) from error
    forget_gradients(function.graph)  # it is differentiated already; the entries would keep it for good
    for each in function.graph.variables:  # those that the user's code made without Keras
        plain = PlainVariable(each.name, tuple(each.shape), each.dtype.base_dtype.name, each.trainable)
        stand_ins.setdefault(id(each.handle), plain)
    captures = {
        placeholder.op.name: stand_ins[id(handle)]
        for handle, placeholder in function.graph.captures
        if id(handle) in stand_ins
    }
    variables = variables_of(prepared.model, prepared.mode)
    for variable in captures.values():  # states that Keras keeps out of a layer's weights, as a stateful RNN's are
        variables.setdefault(id(variable), (variable, "weights"))
    return TracedStep(
        function,
        flat,
        captures,
        variables=tuple(variable for variable, _ in variables.values()),
        kinds={key: kind for key, (_, kind) in variables.items()},
        scopes=noted.scopes,
        optimizers=tuple(str(each.name) for each in optimizers_of(prepared.model) if prepared.mode == "train"),
    )


def _build(prepared: PreparedStep, outputs: Any) -> None:
    """Build loss, metrics and optimizer slots, as the first step does."""
    model, x, y = prepared.model, prepared.x, prepared.y
    if y is not None and all(layer.built for layer in flatten_layers(model)):  # without the further call of the model
        loss_built, metrics_built = loss_and_metrics_built(model)
        if not metrics_built:
            symbolic_outputs(model.compute_metrics, x, y, outputs, sample_weight=None)
        if not loss_built:
            symbolic_outputs(partial(compute_loss, model), x, y, outputs, sample_weight=None, training=False)
    symbolic_build(model, data_batch=prepared.data)
    optimizer = getattr(model, "optimizer", None)
    if prepared.mode == "train" and optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _untouched(variable: Any) -> Any:
    """Return a variable with reserved memory that is never written, and so takes no pages."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/device:CPU:0"):
        initial = partial(untouched, tuple(variable.shape), tf.as_dtype(variable.dtype))
        return tf.Variable(initial, trainable=variable.trainable, name=variable.name, dtype=variable.dtype)


def pack_inputs(structure: Any, flat: list[Any]) -> Any:
    """Pack flat inputs into the model's structure (from `model_inputs`)."""
    if isinstance(structure, WithNumbers):
        return (pack_inputs(structure.structure, flat), dict(structure.numbers))
    if isinstance(structure, ByKeyword):
        return dict(zip(structure, flat, strict=True))
    nested = isinstance(structure, (list, tuple, dict))
    return import_keras().tree.pack_sequence_as(structure, flat) if nested else flat[0]


def output_spec(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the model's outputs for inputs of these shapes (Keras tensors), by a call unless it declares them."""
    keras = import_keras()
    graph = graph_of(model)
    if type(model).call not in (keras.Sequential.call, functional_class().call) or graph is None:
        return called_on(model, structure, flat)
    declared = [tuple(tensor.shape[1:]) for tensor in graph.inputs]
    outputs = keras.tree.flatten(graph.output)
    is_open = any(None in tensor.shape[1:] or tensor.shape[:1] != (None,) for tensor in outputs)
    if is_open or declared != [tuple(tensor.shape[1:]) for tensor in flat]:
        return called_on(model, structure, flat)
    batch = flat[0].shape[0]
    return keras.tree.map_structure(lambda each: keras.KerasTensor((batch, *each.shape[1:]), each.dtype), graph.output)


def called_on(model: Any, structure: Any, flat: list[Any]) -> Any:
    """Infer the model's outputs by calling it, and every layer inside, on shapes."""

    def call(*tensors: Any) -> Any:
        packed = pack_inputs(structure, list(tensors))
        with placeholders_for(model.variables):
            return model(**packed) if isinstance(structure, ByKeyword) else model(packed)

    return symbolic_outputs(call, *flat)


def step_targets(model: Any, given: GivenTargets, outputs: Callable[[], Any], batch_size: int) -> Any:
    """Return the targets of a compiled model's step as Keras tensors, or None.

    Args:
        model: compiled.
        given: the user's settings of them.
        outputs: returns the model's outputs; only called if the loss decides.
        batch_size: samples.

    Raises:
        UsageError: If a dtype is given for targets whose shape is not known.
    """
    keras = import_keras()
    if given.are_none:
        return None
    if given.shapes:
        usual = "int32" if any(sparse_losses(model.loss, None)) else "float32"
        targets = {
            name: keras.KerasTensor((batch_size, *shape.sizes), shape.dtype or given.dtype or usual)
            for name, shape in given.shapes.items()
        }
        if list(targets) == [""]:
            return targets[""]
        return tuple(targets.values()) if by_place(targets) else targets
    if has_own_step(model) and (model.loss is None or not has_call(model)):
        if given.dtype is not None:
            raise UsageError("--target-dtype: what shape the targets have is not known; give --target-shape, too")
        return None
    try:
        inferred = outputs()
    except Exception:
        if has_own_step(model):  # its `call` does not take what its `train_step` does
            return None
        raise
    labels = target_spec(model.loss, inferred, batch_size)
    return keras.tree.map_structure(lambda each: keras.KerasTensor(each.shape, given.dtype or each.dtype), labels)


def target_spec(loss: Any, outputs: Any, batch_size: int) -> Any:
    """Return the labels (Keras tensors): class numbers for sparse losses, else one value for each output."""
    keras = import_keras()
    flat = keras.tree.flatten(outputs)
    labels = []
    for tensor, is_sparse in zip(flat, sparse_losses(loss, outputs), strict=True):
        shape = tuple(batch_size if number == 0 and size is None else size for number, size in enumerate(tensor.shape))
        is_float = tensor.dtype.startswith(("float", "bfloat"))
        dtype = "int32" if is_sparse else "float32" if is_float else tensor.dtype
        labels.append(keras.KerasTensor(shape[:-1] if is_sparse else shape, dtype))
    return keras.tree.pack_sequence_as(outputs, labels)
