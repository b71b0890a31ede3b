"""Living objects, and TensorFlow's registry of custom gradients with its entries that no living graph needs.

Each `tf.custom_gradient` that is traced leaves an entry "CustomGradient-N" in a table of the process. One operation of
the graph names the entry, and whoever differentiates that graph, copies it or exports it looks the entry up by name.
The entry's function holds tensors of the graph and so the graph, with everything that it captures. Nothing takes the
entry away again (tensorflow#97697, tensorflow#80895).

What is done here: for the length of one garbage collection, every graph that names an entry owns its function, and the
table knows it by a weak reference alone. Functions whose graphs all died with that collection are gone; the others
are put back as they were.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

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
_UNNAMED: set[str] = set()  # entries that no graph named when they were last looked at


def custom_gradients() -> dict[str, Callable[..., Any]]:
    """Return the gradient functions that TensorFlow registered itself, by name.

    Raises:
        NotAvailableError: If this TensorFlow keeps them elsewhere.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, entry in list(_REGISTRY.get().items()):
        function = entry.get(_KIND) if isinstance(entry, dict) else None
        if callable(function) and _NAME.fullmatch(name) and getattr(function, "__module__", None) in _MAKERS:
            found[name] = function
    return found


def free_unneeded_gradients() -> tuple[int, int, int]:
    """Collect garbage, and with it each custom gradient that no living graph or function of the runtime names.

    A gradient that no graph names yet may belong to one that another thread is making: it goes with the next call.

    Returns:
        How many entries of the registry went, how many variables that graphs had captured (weights, slots of
        optimizers, metrics), and the bytes of these.

    Raises:
        NotAvailableError: If this TensorFlow keeps them elsewhere; nothing has been done.
    """
    with _LOCK:
        if not custom_gradients():
            gc.collect()
            return 0, 0, 0
        functions, owners, variables = _weaken()
        try:
            gc.collect()
        finally:
            freed = _put_back(functions, owners)
        gone = [size for reference, size in variables if reference() is None]
        return freed, len(gone), sum(gone)


def forget_gradients(graph: Any) -> None:
    """Drop the entries that the operations of a graph name, for a graph that is never differentiated again.

    Entries of other graphs that it calls stay, and so does everything where TensorFlow keeps its entries elsewhere.
    """
    with contextlib.suppress(NotAvailableError):
        registry = _REGISTRY.get()
        for name in custom_gradients().keys() & set(_named_in(graph)):
            registry.pop(name, None)


def kept_variables() -> list[int]:
    """Return the bytes of each variable that a graph keeps although no `tf.Variable` stands for it any more.

    Such are the weights, the optimizer's slots and the metrics of models that are gone. Garbage that was not collected
    does not count.

    Raises:
        NotAvailableError: If this TensorFlow keeps its gradients elsewhere.
    """
    if not custom_gradients():
        return []
    import tensorflow as tf

    graphs, known = _living(tf.Graph, tf.Variable)
    known += [reference() for graph in graphs for reference in getattr(graph, "_weak_variables", ())]
    living = {id(each.handle) for each in known if hasattr(each, "handle")}
    return [_bytes_behind(handle) for handle in _captured_variables(graphs) if id(handle) not in living]


def _weaken() -> tuple[dict[str, weakref.ref[Any]], list[weakref.ref[Any]], list[tuple[weakref.ref[Any], int]]]:
    """Hand the gradient functions to the graphs that name them, and leave weak references in the registry.

    Returns:
        References to the functions by name, to the graphs that own them, and to captured variables with their bytes.
    """
    import tensorflow as tf

    registry, entries = _REGISTRY.get(), custom_gradients()
    graphs, runtime_functions = _living(tf.Graph, _FUNCTION.get())
    named = {id(graph): set(_named_in(graph)) & entries.keys() for graph in graphs}
    with_operations = {id(graph) for graph in graphs if graph.get_operations()}
    elsewhere = set(_named_outside(runtime_functions, with_operations))
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


def _put_back(functions: dict[str, weakref.ref[Any]], owners: list[weakref.ref[Any]]) -> int:
    """Put the functions that live on back into the registry, and return how many do not."""
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
    """Call a function that its graph holds."""
    return reference()(*arguments)


def _living(*wanted: type) -> tuple[list[Any], ...]:
    """List the living instances of each class, except those hidden by `gc.freeze`."""
    is_wanted: Any = functools.cache(lambda kind: issubclass(kind, wanted))
    found = [each for each in living_objects() if is_wanted(type(each))]
    return tuple([each for each in found if isinstance(each, kind)] for kind in wanted)


def _named_in(graph: Any) -> Iterator[str]:
    """Yield the gradients that the operations of a graph name."""
    for operation in graph.get_operations():
        if operation.type == _OPERATION:
            try:
                yield operation.get_attr(_ATTRIBUTE).decode()
            except ValueError:  # it has TensorFlow's own gradient
                continue


def _named_outside(functions: Iterable[Any], graphs: set[int]) -> Iterator[str]:
    """Yield the gradients that the runtime's functions name, except functions of `graphs`.

    Such are functions of which no graph was made yet, and those that `gc.freeze` hides.
    """
    context = _CONTEXT()
    with_graph = {each.name.decode() for each in functions if id(each._cached_graph) in graphs}
    for name in _FUNCTION_NAMES(context) - with_graph:
        for node in _DEFINITION(context, name).node_def:
            if node.op == _OPERATION and _ATTRIBUTE in node.attr:
                yield node.attr[_ATTRIBUTE].s.decode()


def _captured_variables(graphs: Iterable[Any]) -> list[Any]:
    """Return the handles of the variables that graphs have captured, each once."""
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
    return sum((tf.TensorShape(each.shape).num_elements() or 0) * tf.as_dtype(each.dtype).size for each in parts)


_NO_TUPLES: dict[type, Any] = {tuple: ()}  # in place of the tuples


def living_objects() -> list[Any]:
    """Return the objects that the garbage collector tracks, except plain tuples and frozen ones.

    All of it is one call without a line of Python, within which no other thread runs.
    """
    everything = itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()]))
    # What groups remembers the object that it has seen last.
    by_type = itertools.groupby(itertools.chain(everything, [None]), key=type)
    return list(itertools.chain.from_iterable(itertools.starmap(_NO_TUPLES.get, by_type)))
