"""An optimizer's updates of like variables: traced for the first two, and played back into the graph for the others.

Keras's optimizers go through the variables one by one, and most of the operations of a training step are theirs. What
an update puts into the graph is the same for every variable of a rank, but for the gradient and the variables it works
on: the same operations of the same attributes, under names that count on. Playing it back asks the graph for the same
names and operations in the same order, and leaves out what Keras and TensorFlow do above that for each of them.

Nothing is taken on trust: an update is played back only where two that were traced, of variables of two shapes or of
the very shape, were the same.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.graphs import could_record
from kerasmem.compat.keras_optimizers import ELEMENTWISE, is_one_of, slots_of

_FEATURE = "quick estimates of models with many weights"
_GRAPH = "tensorflow.python.framework.func_graph"
UPDATE = Borrowed(
    "keras.src.backend.tensorflow.optimizer", "TFOptimizer._distributed_tf_update_step", feature=_FEATURE,
    parameters=("distribution", "grads_and_vars", "learning_rate"),
)  # fmt: skip
_OPTIMIZER = Borrowed("keras.src.backend.tensorflow.optimizer", "TFOptimizer", feature=_FEATURE)
_INDEX = Borrowed("keras", "Optimizer._get_variable_index", feature=_FEATURE, parameters=("variable",))
_CREATE = Borrowed(
    _GRAPH, "FuncGraph._create_op_internal", feature=_FEATURE,
    parameters=("op_type", "inputs", "dtypes", "input_types", "name", "attrs", "op_def", "compute_device"),
)  # fmt: skip
_UNIQUE_NAME = Borrowed(_GRAPH, "FuncGraph.unique_name", feature=_FEATURE, parameters=("name", "mark_as_used"))
_CAPTURE = Borrowed(_GRAPH, "FuncGraph.capture", feature=_FEATURE, parameters=("tensor", "name"))
_WATCH = Borrowed(_GRAPH, "FuncGraph.watch_variable", feature=_FEATURE, parameters=("v",))

# Their update asks a variable for its rank at most; Muon's asks for its shape.
_UNIFORM = ELEMENTWISE | {"Lamb", "Adafactor"}

_Roles = dict[int, str]  # id of a tensor or variable that an update works on → what it is there


class _Name(NamedTuple):
    """A name that the graph was asked for, in one of the scopes so far (0 is the optimizer's); it is the next one."""

    scope: int
    asked: str
    is_taken: bool


class _Watch(NamedTuple):
    """A variable that the graph notes as one that it touches: its role, or its id."""

    variable: str | int


class _Capture(NamedTuple):
    """A tensor from outside that the graph was asked for a placeholder of; it counts as the output of an operation."""

    scope: int
    tensor: str | int
    name: str | None


class _Operation(NamedTuple):
    """An operation that the graph was asked for.

    Attributes:
        scope: it is made in one of the scopes so far.
        type: "Mul", "ReadVariableOp", …
        name: the number of the scope that it is called by, or the name to make a new one from.
        inputs: each the number of an operation and of its output; the role of a tensor; or a tensor's id.
        positional: what else it was asked with.
        keywords: likewise.
    """

    scope: int
    type: str
    name: int | str
    inputs: tuple[tuple[int, int] | str | int, ...]
    positional: tuple[Any, ...]
    keywords: dict[str, Any]


_Event = _Name | _Watch | _Capture | _Operation


@dataclass
class _Kind:
    """Updates of one kind of variable.

    Attributes:
        events: what they do; None before the first one was traced.
        others: what they work on beside the gradient and the variables with a role, by id.
        shapes: of the variables whose updates were traced, each as often as one was.
        is_uniform: all of those were the same.
    """

    events: list[_Event] | None = None
    others: dict[int, Any] = field(default_factory=dict)
    shapes: list[Any] = field(default_factory=list)
    is_uniform: bool = True

    def serves(self, shape: Any) -> bool:
        """Return whether the update of a variable of this shape is known."""
        return self.is_uniform and (len(set(self.shapes)) > 1 or self.shapes.count(shape) > 1)

    def add(self, shape: Any, heard: _Listener) -> None:
        """Compare an update that was traced with those before it."""
        self.shapes.append(shape)
        if heard.is_lost or (self.events is not None and heard.events != self.events):
            self.is_uniform = False
        elif self.events is None:
            self.events, self.others = heard.events, heard.others


class _UnknownError(Exception):
    """What was traced is more than can be played back."""


@contextlib.contextmanager
def updates_played_back() -> Iterator[None]:
    """Have optimizers of Keras trace in this thread one update for each kind of variable, and play it back for others.

    The graph that is traced is the same as without. Where Keras or TensorFlow do not have what this takes, all updates
    are traced.
    """
    try:
        update = UPDATE.get()
        for each in (_OPTIMIZER, _INDEX, _CREATE, _UNIQUE_NAME, _CAPTURE, _WATCH):
            each.get()
    except NotAvailableError:
        yield
        return
    owner, kinds = threading.get_ident(), dict[Any, _Kind]()

    def update_all(optimizer: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        if threading.get_ident() != owner or not _is_uniform(optimizer):
            return update(optimizer, distribution, grads_and_vars, learning_rate)
        for pair in grads_and_vars:
            _update(optimizer, pair, kinds, functools.partial(update, optimizer, distribution, [pair], learning_rate))
        return None

    with mock.patch.object(_OPTIMIZER.get(), "_distributed_tf_update_step", update_all):
        yield


def _is_uniform(optimizer: Any) -> bool:
    import tensorflow as tf

    is_own = is_one_of(optimizer, _UNIFORM)
    return is_own and not tf.executing_eagerly() and not tf.distribute.has_strategy() and not could_record()


def _update(optimizer: Any, pair: tuple[Any, Any], kinds: dict[Any, _Kind], trace: Callable[[], None]) -> None:
    """Update a variable: by what is known of others of its kind, or as Keras does."""
    import tensorflow as tf

    gradient, variable = pair
    if not tf.is_symbolic_tensor(gradient) or not hasattr(variable, "handle"):
        trace()
        return
    graph = tf.compat.v1.get_default_graph()
    index = optimizer._get_variable_index(variable)
    tensors, slots = _works_on(optimizer, gradient, variable, index)
    is_alike = gradient.shape.rank is not None and gradient.shape.is_compatible_with(variable.shape)
    key = (
        id(optimizer), id(graph), graph._name_stack, variable.dtype, variable.shape.rank, gradient.dtype, is_alike,
        frozenset(slots),
    )  # fmt: skip
    kind, shape = kinds.setdefault(key, _Kind()), tuple(variable.shape)
    if kind.serves(shape):
        _play(kind, tensors, graph)
    elif not kind.is_uniform:
        trace()
    else:
        listener = _Listener(graph, {id(each): role for role, each in tensors.items()})
        with listener.listening():
            trace()
        kind.add(shape, listener)


def _works_on(optimizer: Any, gradient: Any, variable: Any, index: int) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors and variables of one update by what they are there, and the names of the slots."""
    found: dict[str, Any] = {}
    slots = slots_of(optimizer, index)
    for name, each in slots.items():
        found[name], found[f"{name}.handle"] = each.value, each.value.handle
    found |= {"variable": variable, "variable.handle": variable.handle, "gradient": gradient}
    return found, list(slots)


class _Listener:
    """Notes what a graph is asked for.

    Args:
        graph: what is traced into.
        roles: the tensors and variables that stand for others in the next update.

    Attributes:
        events: what it was asked for.
        others: tensors and variables without a role, by id.
        is_lost: it was asked for more than can be played back.
    """

    def __init__(self, graph: Any, roles: _Roles) -> None:
        self._graph, self._roles = graph, roles
        self._scopes, self._names = {graph._name_stack: 0}, 0
        self._made: dict[int, tuple[int, int]] = {}  # tensors by id, which live as long as their operations
        self._operations: list[Any] = []
        self._depth = 0
        self.events: list[_Event] = []
        self.others: dict[int, Any] = {}
        self.is_lost = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        graph = self._graph
        with (
            mock.patch.object(graph, "_create_op_internal", self._heard(graph._create_op_internal, self._operation)),
            mock.patch.object(graph, "capture", self._heard(graph.capture, self._capture)),
            mock.patch.object(graph, "unique_name", self._heard(graph.unique_name, self._name)),
            mock.patch.object(graph, "watch_variable", self._heard(graph.watch_variable, self._watch)),
        ):
            yield

    def _heard(self, function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            stack = self._graph._name_stack
            self._depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth and not self.is_lost:  # what is asked for inside comes again with what is played back
                try:
                    note(result, stack, *args, **kwargs)
                except (_UnknownError, KeyError):
                    self.is_lost = True
            return result

        return heard

    def _name(self, given: str, stack: str, name: str, mark_as_used: bool = True) -> None:
        self.events.append(_Name(self._scopes[stack], name, mark_as_used))
        self._names += 1
        self._scopes[given] = self._names

    def _watch(self, _: None, stack: str, variable: Any) -> None:
        self.events.append(_Watch(self._one_of(variable)))

    def _capture(self, captured: Any, stack: str, tensor: Any, name: str | None = None) -> None:
        if captured is not tensor:
            self.events.append(_Capture(self._scopes[stack], self._one_of(tensor), name))
            self._made[id(captured)] = (len(self._operations), 0)
            self._operations.append(captured.op)

    def _operation(self, made: Any, stack: str, kind: str, inputs: Any, *positional: Any, **keywords: Any) -> None:
        name = keywords.pop("name", None) or kind
        if _has_more(made):
            raise _UnknownError
        sources = tuple(self._made.get(id(each)) or self._one_of(each) for each in inputs)
        called = self._scopes[name[:-1]] if name.endswith("/") else name
        self.events.append(_Operation(self._scopes[stack], kind, called, sources, positional, keywords))
        for place, tensor in enumerate(made.outputs):
            self._made[id(tensor)] = (len(self._operations), place)
        self._operations.append(made)

    def _one_of(self, tensor: Any) -> str | int:
        role = self._roles.get(id(tensor))
        if role is not None:
            return role
        self.others[id(tensor)] = tensor
        return id(tensor)


def _has_more(operation: Any) -> bool:
    """Return whether an operation is more than its type, its inputs and plain attributes."""
    definition = operation.node_def
    return bool(
        operation.control_inputs
        or operation.device
        or any(key.startswith("_") or value.HasField("func") for key, value in definition.attr.items())
        or any(tensor.dtype.name in ("resource", "variant") for tensor in operation.outputs)
    )


def _play(kind: _Kind, tensors: dict[str, Any], graph: Any) -> None:
    """Ask the graph for what an update asks for, on other tensors."""
    outer = graph._name_stack
    scopes, made = [outer], list[Any]()

    def found(source: Any) -> Any:
        if isinstance(source, tuple):
            return made[source[0]].outputs[source[1]]
        return tensors[source] if isinstance(source, str) else kind.others[source]

    try:
        for event in kind.events or ():
            if isinstance(event, _Watch):
                graph.watch_variable(found(event.variable))
                continue
            graph._name_stack = scopes[event.scope]
            if isinstance(event, _Name):
                scopes.append(graph.unique_name(event.asked, event.is_taken))
            elif isinstance(event, _Capture):
                made.append(graph.capture(found(event.tensor), event.name).op)
            else:
                name = event.name if isinstance(event.name, str) else f"{scopes[event.name]}/"
                inputs = [found(each) for each in event.inputs]
                made.append(
                    graph._create_op_internal(event.type, inputs, *event.positional, name=name, **event.keywords)
                )
    finally:
        graph._name_stack = outer
