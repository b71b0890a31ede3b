"""Free deleted graphs in TensorFlow's registry of gradients.

Each traced `tf.custom_gradient` adds an entry "CustomGradient-N" to a registry of the process. One operation of its
graph has the entry's name, by which the graph is differentiated, copied or exported. The entry's function references
tensors of the graph, and so the graph with all its captures. TensorFlow never removes entries (tensorflow#97697,
tensorflow#80895).

This module makes the references weak during one garbage collection: each graph owns the functions that its operations
name, and the registry has weak references. The collection frees the functions whose graphs are all garbage. Then the
remaining functions return to the registry.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError
from kerasmem.compat.living import living_objects

_FEATURE = "freeing trained models (kerasmem.clear_session)"
_CONTEXT_MODULE = "tensorflow.python.eager.context"
_REGISTRY = Borrowed("tensorflow.python.framework.ops:gradient_registry._registry", feature=_FEATURE)
_FUNCTION = Borrowed("tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction", feature=_FEATURE)
_CONTEXT = Borrowed(f"{_CONTEXT_MODULE}:context", feature=_FEATURE)
_FUNCTION_NAMES = Borrowed(f"{_CONTEXT_MODULE}:Context.list_function_names", feature=_FEATURE)
_DEFINITION = Borrowed(f"{_CONTEXT_MODULE}:Context.get_function_def", feature=_FEATURE)

_NAME = re.compile(r"CustomGradient-\d+")
_MAKERS = ("tensorflow.python.ops.custom_gradient", "tensorflow.python.saved_model.function_deserialization")
_OPERATION, _ATTRIBUTE, _KIND = "IdentityN", "_gradient_op_type", "type"
_OWNED = "_kerasmem_owned_gradients"
_LOCK = threading.Lock()
_UNNAMED: set[str] = set()  # entries that no graph named in the previous call


def custom_gradients() -> dict[str, Callable[..., Any]]:
    """Return the gradient functions of `tf.custom_gradient` by name.

    Raises:
        NotAvailableError: If this TensorFlow lacks the registry.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for name, entry in list(_REGISTRY.get().items()):
        function = entry.get(_KIND) if isinstance(entry, dict) else None
        if callable(function) and _NAME.fullmatch(name) and getattr(function, "__module__", None) in _MAKERS:
            functions[name] = function
    return functions


def free_unneeded_gradients() -> tuple[int, int, int]:
    """Collect garbage, including custom gradients that no living graph or function of the runtime names.

    A gradient that no graph names may belong to a graph that another thread is building. It is freed by the next call.

    Returns:
        The number of removed entries, the number of freed variables that graphs had captured (weights, optimizer slots,
        metrics), and their bytes.

    Raises:
        NotAvailableError: If this TensorFlow lacks the registry. Nothing is freed.
    """
    with _LOCK:
        if not custom_gradients():
            gc.collect()
            return 0, 0, 0
        functions, owners, variables = _weaken()
        try:
            gc.collect()
        finally:
            freed = _restore(functions, owners)
        freed_bytes = [size for reference, size in variables if reference() is None]
        return freed, len(freed_bytes), sum(freed_bytes)


def forget_gradients(graph: Any) -> None:
    """Remove the entries that the operations of a graph name, if the graph is not differentiated again.

    Entries of graphs that it calls stay. If TensorFlow lacks the registry, nothing is removed.
    """
    with contextlib.suppress(NotAvailableError):
        registry = _REGISTRY.get()
        for name in custom_gradients().keys() & set(_gradients_in(graph)):
            registry.pop(name, None)


def kept_variables() -> list[int]:
    """Return the bytes of each variable that only a graph still references.

    They are the weights, optimizer slots and metrics of deleted models. Uncollected garbage does not count.

    Raises:
        NotAvailableError: If this TensorFlow lacks the registry.
    """
    if not custom_gradients():
        return []
    import tensorflow as tf

    graphs, known = _list_instances(tf.Graph, tf.Variable)
    known += [reference() for graph in graphs for reference in getattr(graph, "_weak_variables", ())]
    living = {id(variable.handle) for variable in known if hasattr(variable, "handle")}
    return [_bytes_behind(handle) for handle in _captured_variables(graphs) if id(handle) not in living]


def _weaken() -> tuple[dict[str, weakref.ref[Any]], list[weakref.ref[Any]], list[tuple[weakref.ref[Any], int]]]:
    """Move the gradient functions to the graphs that name them, and put weak references in the registry.

    Returns:
        References to the functions by name, to the graphs that own them, and to captured variables with their bytes.
    """
    import tensorflow as tf

    registry, entries = _REGISTRY.get(), custom_gradients()
    graphs, runtime_functions = _list_instances(tf.Graph, _FUNCTION.get())
    named = {id(graph): set(_gradients_in(graph)) & entries.keys() for graph in graphs}
    with_operations = {id(graph) for graph in graphs if graph.get_operations()}
    elsewhere = set(_gradients_outside(runtime_functions, with_operations))
    waiting = entries.keys() - elsewhere.union(*named.values()) - _UNNAMED
    _UNNAMED.clear()
    _UNNAMED.update(waiting)
    variables = [(weakref.ref(handle), _bytes_behind(handle)) for handle in _captured_variables(graphs)]
    owners = [graph for graph in graphs if named[id(graph)]]
    for graph in owners:
        setattr(graph, _OWNED, tuple(entries[name] for name in named[id(graph)]))
    functions: dict[str, weakref.ref[Any]] = {}
    for name in entries.keys() - elsewhere - waiting:
        functions[name] = weakref.ref(entries[name])
        registry[name][_KIND] = functools.partial(_call_held, functions[name])
    return functions, [weakref.ref(graph) for graph in owners], variables


def _restore(functions: dict[str, weakref.ref[Any]], owners: list[weakref.ref[Any]]) -> int:
    """Put living functions back into the registry, and return the number of the others."""
    registry, freed = _REGISTRY.get(), 0
    for name, reference in functions.items():
        function = reference()
        if function is None:
            del registry[name]
            freed += 1
        else:
            registry[name][_KIND] = function
    for owner in owners:
        graph = owner()
        if graph is not None:
            delattr(graph, _OWNED)
    return freed


def _call_held(reference: Callable[[], Any], *arguments: Any) -> Any:
    """Call a function that its graph owns."""
    return reference()(*arguments)


def _list_instances(*classes: type) -> tuple[list[Any], ...]:
    """List the living instances of each class, except those hidden by `gc.freeze`."""
    is_instance: Any = functools.cache(lambda kind: issubclass(kind, classes))
    objects = [instance for instance in living_objects() if is_instance(type(instance))]
    return tuple([instance for instance in objects if isinstance(instance, kind)] for kind in classes)


def _gradients_in(graph: Any) -> Iterator[str]:
    """Yield the gradients that the operations of a graph name."""
    for operation in graph.get_operations():
        if operation.type == _OPERATION:
            try:
                yield operation.get_attr(_ATTRIBUTE).decode()
            except ValueError:  # its gradient is TensorFlow's
                continue


def _gradients_outside(functions: Iterable[Any], graphs: set[int]) -> Iterator[str]:
    """Yield the gradients that the runtime's functions name, except functions of `graphs`.

    They are functions without a graph yet, and functions that `gc.freeze` hides.
    """
    context = _CONTEXT()
    with_graph = {function.name.decode() for function in functions if id(function._cached_graph) in graphs}
    for name in _FUNCTION_NAMES(context) - with_graph:
        for node in _DEFINITION(context, name).node_def:
            if node.op == _OPERATION and _ATTRIBUTE in node.attr:
                yield node.attr[_ATTRIBUTE].s.decode()


def _captured_variables(graphs: Iterable[Any]) -> list[Any]:
    """Return the unique handles of the variables that graphs have captured."""
    import tensorflow as tf

    captured = {}
    for graph in graphs:
        for outer, _ in getattr(graph, "captures", ()):
            if outer.dtype == tf.resource and not tf.is_symbolic_tensor(outer):
                captured[id(outer)] = outer
    return list(captured.values())


def _bytes_behind(handle: Any) -> int:
    """Return the size of a variable, or 0 if its shape is unknown."""
    import tensorflow as tf

    parts = getattr(getattr(handle, "_handle_data", None), "shape_and_type", ())
    return sum((tf.TensorShape(part.shape).num_elements() or 0) * tf.as_dtype(part.dtype).size for part in parts)
