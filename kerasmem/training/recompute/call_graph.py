"""A model by subclassing as the graph of layers that its `call` makes, if the two are provably the same.

`call` is run on symbolic tensors, as often as there are answers to whether the model trains. What comes out is a graph
of the model's own layers. It stands for the model if nothing else is in what Keras runs: the class brings `call` and no
other method of Keras's, `call` makes the same graph each time whatever `training` is, hands `training` on or leaves
it away, and uses no weight, number drawn or state beside those of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any

import numpy as np

from kerasmem.compat.keras_layers import calls_of
from kerasmem.errors import UsageError
from kerasmem.models.backend import import_keras, keras_reason
from kerasmem.models.inputs import model_inputs, normalise_input_shapes

_OWN = frozenset(
    ("__init__", "call", "build", "get_config", "from_config", "compute_output_shape", "get_build_config",
     "build_from_config")
)  # fmt: skip
_DATA = frozenset(("__module__", "__doc__", "__qualname__", "__annotations__", "__dict__", "__weakref__"))
_TRACES = (None, True, False)


def graph_by_call(model: Any, input_shape: Any = None) -> Any:
    """Return the Functional model of a subclassed model's layers, which computes what the model does.

    Args:
        model: built; inputs are floating, or integers where only embeddings take them.
        input_shape: of the inputs without the batch, if the model does not know it; as for `kerasmem.estimate`.

    Raises:
        UsageError: If the two are not provably the same; the message says why.
    """
    keras = import_keras()
    _check_class(model)
    structure, flat = model_inputs(model, normalise_input_shapes(input_shape))
    graphs = []
    for training in _TRACES:
        tensors = [keras.Input(each.shape[1:], dtype=_dtype(model, each.dtype), name=each.name) for each in flat]
        graphs.append(_traced(model, structure, tensors, training))
    first = graphs[0]
    described = [list(_described(graph, training)) for graph, training in zip(graphs, _TRACES, strict=True)]
    if any(each != described[0] for each in described):
        raise UsageError("its call() does not make the same graph each time, or not whatever `training` is")
    if {id(each) for each in model.variables} != {id(each) for each in first.variables}:
        raise UsageError("it has weights or states that are not those of the layers which its call() calls")
    return first


def _check_class(model: Any) -> None:
    keras = import_keras()
    own = [each for each in type(model).__mro__ if issubclass(each, keras.Model) and each not in keras.Model.__mro__]
    for each in own:
        for name in vars(each):
            if hasattr(keras.Model, name) and name not in _OWN | _DATA:
                raise UsageError(f"its class {each.__name__} has a {name} of its own")
    if type(model).call is keras.Model.call or not model.built:
        raise UsageError("it has no call(), or is not built yet: call it on a batch first")
    parameters = list(signature(model.call).parameters.values())
    if any(each.default is Parameter.empty or each.name != "training" for each in parameters[1:]):
        raise UsageError("its call() takes other arguments than the inputs and `training`")


def _dtype(model: Any, dtype: str) -> str:
    """Return what a floating input is cast to before `call` sees it."""
    return model.input_dtype if dtype.startswith(("float", "bfloat")) else dtype


def _traced(model: Any, structure: Any, tensors: list[Any], training: bool | None) -> Any:
    keras = import_keras()
    inputs = keras.tree.pack_sequence_as(structure, tensors)
    options = {"training": training} if "training" in signature(model.call).parameters else {}
    try:
        made = keras.Model(inputs, model.call(inputs, **options), name=model.name)
    except Exception as error:  # whatever code of the user's raises
        raise UsageError(f"its call() does not work on symbolic tensors ({keras_reason(error)})") from error
    made.dtype_policy = model.dtype_policy
    return made


def _described(graph: Any, training: bool | None) -> Iterator[Any]:
    """Yield what each call does, so that two graphs are equal exactly if they compute the same.

    Raises:
        UsageError: If a call is one that a graph makes in another way.
    """
    keras = import_keras()
    places = {id(each): f"input {number}" for number, each in enumerate(graph.inputs)}
    for number, call in enumerate(calls_of(graph)):
        operation = call.operation
        is_layer = isinstance(operation, keras.Layer)
        given = {**call.arguments.kwargs}
        if given.pop("training", training) is not training:  # a graph overrides it in training
            raise UsageError(f"its call() decides itself whether {operation.name!r} trains")
        what = id(operation) if is_layer else (type(operation), repr(sorted(_settings(operation).items())))
        yield what, [_value(each, places) for each in keras.tree.flatten((call.arguments.args, given))], sorted(given)
        places.update((id(each), f"{number}.{place}") for place, each in enumerate(call.outputs))
    yield [places[id(each)] for each in graph.outputs]


def _settings(operation: Any) -> dict[str, Any]:
    return {name: each for name, each in vars(operation).items() if name != "name" and not name.startswith("_")}


def _value(value: Any, places: dict[int, str]) -> Any:
    keras = import_keras()
    if id(value) in places:
        return places[id(value)]
    if isinstance(value, keras.Variable):
        raise UsageError(f"its call() uses a weight of its own, {value.path}")
    if keras.ops.is_tensor(value) or isinstance(value, np.ndarray):
        array = np.asarray(value)
        return array.dtype.str, array.shape, array.tobytes()
    return repr(value)
