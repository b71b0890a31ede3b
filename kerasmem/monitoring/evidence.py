"""What grows beside the memory: kinds of Python objects, graphs, variables, retracings, constants in graphs."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kerasmem.compat.gradients import living_objects, living_types
from kerasmem.models.freeing import FREEING, kept_bytes
from kerasmem.records import Record
from kerasmem.units import format_size

# what people know a class by -> the module's beginning, the class's name, and what to do about many of them
_KNOWN = {
    "live graphs": ("tensorflow.", "FuncGraph", ": each tracing makes one, and it lives as long as its function"),
    "traced functions": ("tensorflow.", "ConcreteFunction", ""),
    "variables": ("tensorflow.", "ResourceVariable", ": build models and optimizers outside the loop"),
    "eager tensors": (
        "tensorflow.", "EagerTensor", ": something keeps results; turn them into numbers with float() or .numpy()"
    ),
    "Keras models": (
        "keras.", "Functional", f": build the model once, or call {FREEING} between them"
    ),
}  # fmt: skip
_PLAIN = ("builtins.", "collections.", "weakref.")  # what everything is made of
_GRAPHS, _TYPES = 20, 4  # how many of the newest graphs are looked into, and kinds of objects told of


@dataclass(frozen=True)
class Census:
    """The objects alive at one time.

    Attributes:
        iteration: after which it was taken.
        types: how many of each kind, by "module.class".
        tracings: how often each `tf.function` has been traced, by its name.
        kept_bytes: weights and optimizers that TensorFlow keeps of models that are gone; None where it cannot be known.
    """

    iteration: int
    types: dict[str, int]
    tracings: dict[str, int]
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Evidence(Record, what="evidence"):
    """What grew from one census to a later one.

    Attributes:
        iterations: between the two.
        known: how many more of "live graphs", "variables" and so on.
        types: how many more of the other kinds of Python objects, the fastest first.
        tracings: how many more tracings of each `tf.function`.
        constant_bytes: bytes of arrays that the newest graphs hold each, on average: constants and captured tensors.
        constant_name: where the largest of them is.
        kept_bytes: how much more TensorFlow keeps of models that are gone: weights and optimizers.
    """

    iterations: int
    known: dict[str, int]
    types: dict[str, int]
    tracings: dict[str, int]
    constant_bytes: int
    constant_name: str | None
    kept_bytes: int = 0

    def explain(self) -> tuple[str, ...]:
        """Return sentences for people, the most telling first."""
        said = []
        if self.kept_bytes:
            said.append(
                f"{format_size(self.kept_bytes)} of it, weights and optimizers, are of models that are gone: "
                f"TensorFlow keeps each model that was trained; {FREEING} after `del model` frees them"
            )
        for name, count in self.tracings.items():
            said.append(
                f"{name} was traced {count} more times in {self.iterations} iterations: pass numbers as tensors, keep "
                "shapes the same (input_signature, reduce_retracing=True), and make tf.functions outside the loop"
            )
        for name, count in self.known.items():
            said.append(f"{count} more {name} in {self.iterations} iterations" + _KNOWN.get(name, ("", "", ""))[2])
        if self.constant_bytes >= 4096 and self.known.get("live graphs"):
            where = f", the largest in {self.constant_name}" if self.constant_name else ""
            said.append(
                f"each of the newest graphs holds {format_size(self.constant_bytes)} of arrays{where}: "
                "pass arrays to a tf.function as arguments, for what it captures stays with its graph"
            )
        for name, count in self.types.items():
            said.append(f"{count} more objects of {name} in {self.iterations} iterations")
        return tuple(said)


def take_census(iteration: int) -> Census:
    """Count what is alive; collects garbage first. Takes some 100 ms. TensorFlow is not loaded for it."""
    gc.collect()
    types, objects = living_types(), living_objects()
    tracings: Counter[str] = Counter()
    for function in _of_kind(objects, "tensorflow.", "Function"):
        try:
            tracings[function.python_function.__name__] += function.experimental_get_tracing_count()
        except AttributeError:  # another class of that name
            continue
    named: Counter[str] = Counter()
    for kind, count in types.items():
        named[f"{kind.__module__}.{kind.__qualname__}"] += count
    return Census(iteration, dict(named), dict(tracings), kept_bytes())


def compare(before: Census, after: Census) -> Evidence:
    """Return what grew in step with the iterations: by one at least in every two of them."""
    iterations = max(1, after.iteration - before.iteration)
    grown = {name: count - before.types.get(name, 0) for name, count in after.types.items()}
    grown = {name: count for name, count in grown.items() if count >= iterations / 2}
    known: Counter[str] = Counter()
    for label, (module, name, _) in _KNOWN.items():
        for full in [full for full in grown if full.startswith(module) and full.endswith(f".{name}")]:
            known[label] += grown.pop(full)
    tracings = {name: count - before.tracings.get(name, 0) for name, count in after.tracings.items()}
    grown = {name: count for name, count in grown.items() if not name.startswith("kerasmem.")}
    telling = {name: count for name, count in grown.items() if not name.startswith(_PLAIN)} or grown
    types = dict(sorted(telling.items(), key=lambda item: -item[1])[:_TYPES])
    constants, where = _constants() if known.get("live graphs") else (0, None)
    return Evidence(
        iterations=iterations,
        known=dict(known.most_common()),
        types=types,
        tracings={name: count for name, count in tracings.items() if count >= iterations / 2},
        constant_bytes=constants,
        constant_name=where,
        kept_bytes=max(0, (after.kept_bytes or 0) - (before.kept_bytes or 0)),
    )


def _of_kind(objects: Iterable[Any], module: str, name: str) -> list[Any]:
    kinds = {kind for kind in set(map(type, objects)) if kind.__name__ == name and kind.__module__.startswith(module)}
    return [each for each in objects if type(each) in kinds]


def _constants() -> tuple[int, str | None]:
    """Return the bytes of arrays in the newest graphs, on average, and the name of the graph with the largest."""
    if "tensorflow" not in sys.modules:
        return 0, None
    graphs = _of_kind(living_objects(), "tensorflow.", "FuncGraph")[-_GRAPHS:]
    total, largest, where = 0, 0, None
    for graph in graphs:
        for size in _sizes(graph):
            total += size
            if size > largest:
                largest, where = size, str(graph.name)
    return total // max(1, len(graphs)), where


def _sizes(graph: Any) -> Iterable[int]:
    for node in graph.as_graph_def().node:
        if node.op == "Const":
            yield node.attr["value"].tensor.ByteSize()
    for tensor, _ in graph.captures:
        if tensor.dtype.size and tensor.shape.is_fully_defined() and tensor.dtype.name != "resource":
            yield tensor.shape.num_elements() * tensor.dtype.size
