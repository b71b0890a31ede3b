"""Counts objects that grow with the memory: containers of arrays, graphs, variables, retracings."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kerasmem.compat.living import living_objects
from kerasmem.models.freeing import FREEING, kept_bytes
from kerasmem.records import Record
from kerasmem.units import format_size

# label -> start of the module's name, name of the class, remedy
_KNOWN = {
    "live graphs": (
        "tensorflow.", "FuncGraph", ": each tracing makes one, which keeps captured arrays; pass them as arguments"
    ),
    "traced functions": ("tensorflow.", "ConcreteFunction", ""),
    "variables": ("tensorflow.", "ResourceVariable", ": build models and optimizers outside the loop"),
    "eager tensors": (
        "tensorflow.", "EagerTensor", ": results are kept; convert them to numbers with float() or .numpy()"
    ),
    "Keras models": (
        "keras.", "Functional", f": build the model once, or call {FREEING} between them"
    ),
}  # fmt: skip
_MOST = 3  # containers in the evidence
_CONTAINERS = (list, dict, deque)
_ARRAYS = {"ndarray": "numpy", "ArrayImpl": "jaxlib", "Tensor": "torch", "EagerTensor": "tensorflow"}
_LEAST_SHARE = 0.1  # of the growth that a container must explain


@dataclass(frozen=True)
class Container(Record, what="container"):
    """A list, dict or deque of arrays and tensors.

    Attributes:
        kind: "list", "dict" or "deque".
        items: number of its items.
        arrays: number of arrays in it, in nested lists, tuples and dicts too.
        bytes: total size of the arrays.
        bytes_per_iteration: growth from one census to a later one.
    """

    kind: str
    items: int
    arrays: int
    bytes: int
    bytes_per_iteration: float = 0.0

    def __str__(self) -> str:
        more = format_size(round(self.bytes_per_iteration))
        return f"a {self.kind} holds {self.arrays} arrays, {format_size(self.bytes)}, {more} more per iteration"


@dataclass(frozen=True)
class Census:
    """The objects alive at one time.

    Attributes:
        iteration: number of iterations before the census.
        known: number of "live graphs", "variables" and so on.
        containers: containers with arrays in their last item, by `id`.
        tracings: number of tracings of each `tf.function`, by name.
        kept_bytes: weights and optimizers that TensorFlow keeps of deleted models, or None if unknown.
    """

    iteration: int
    known: Counter[str]
    tracings: Counter[str]
    kept_bytes: int | None = None
    containers: dict[int, Container] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence(Record, what="evidence"):
    """Objects that grew from one census to a later one.

    Attributes:
        iterations: iterations between the two.
        known: growth of the number of "live graphs", "variables" and so on.
        containers: containers that explain at least a tenth of the memory's growth, the fastest first.
        tracings: number of new tracings of each `tf.function`.
        kept_bytes: growth of the weights and optimizers that TensorFlow keeps of deleted models.
    """

    iterations: int
    known: dict[str, int]
    containers: tuple[Container, ...]
    tracings: dict[str, int]
    kept_bytes: int = 0

    def explain(self) -> tuple[str, ...]:
        """Return sentences, the most informative first."""
        sentences = [str(container) for container in self.containers]
        if self.kept_bytes:
            sentences.append(
                f"{format_size(self.kept_bytes)} of it are weights and optimizers of deleted models: "
                f"TensorFlow keeps each trained model; {FREEING} after `del model` frees them"
            )
        for name, count in self.tracings.items():
            sentences.append(
                f"{name} was traced {count} more times in {self.iterations} iterations: pass numbers as tensors, keep "
                "shapes the same (input_signature, reduce_retracing=True), and make tf.functions outside the loop"
            )
        for name, count in self.known.items():
            sentences.append(f"{count} more {name} in {self.iterations} iterations" + _KNOWN.get(name, ("", "", ""))[2])
        return tuple(sentences)


def take_census(iteration: int) -> Census:
    """Count living objects after garbage collection, in about 100 ms. Does not load TensorFlow."""
    gc.collect()
    objects = living_objects()
    tracings: Counter[str] = Counter()
    for function in _of_kind(objects, "tensorflow.", "Function"):
        try:
            tracings[function.python_function.__name__] += function.experimental_get_tracing_count()
        except AttributeError:  # another class of that name
            continue
    known = Counter({label: len(_of_kind(objects, module, name)) for label, (module, name, _) in _KNOWN.items()})
    return Census(iteration, known, tracings, kept_bytes(), _containers(objects))


def _containers(objects: Iterable[Any]) -> dict[int, Container]:
    """Return containers that end with arrays, by `id`."""
    containers = {}
    for value in objects:
        if type(value) in _CONTAINERS and len(value) > 1:
            items = list(value.values() if type(value) is dict else value)
            if items and _arrays(items[-1]):
                sizes = [size for item in items for size in _arrays(item)]
                containers[id(value)] = Container(type(value).__name__, len(items), len(sizes), sum(sizes))
    return containers


def _arrays(value: Any, depth: int = 2) -> list[int]:
    """Return the bytes of an array, or of each array in nested containers."""
    kind = type(value)
    package = _ARRAYS.get(kind.__name__)
    if package is not None and kind.__module__.startswith(package):
        if package == "tensorflow":
            return [(value.shape.num_elements() or 0) * value.dtype.size]
        return [int(value.nbytes)]
    if depth == 0 or kind not in (*_CONTAINERS, tuple):
        return []
    items = list(value.values() if kind is dict else value)
    return [size for item in items for size in _arrays(item, depth - 1)]


def compare(before: Census, after: Census, slope: float = 0.0) -> Evidence:
    """Compare two censuses: a count that grows by at least one in two iterations is evidence.

    Args:
        before, after: counts at two times.
        slope: growth of the memory, in bytes per iteration.
    """
    iterations = max(1, after.iteration - before.iteration)
    containers = []
    for identity, container in after.containers.items():
        earlier = before.containers.get(identity, Container(container.kind, 0, 0, 0))
        rate = (container.bytes - earlier.bytes) / iterations
        if container.items - earlier.items >= iterations / 2 and rate > _LEAST_SHARE * slope:
            containers.append(replace(container, bytes_per_iteration=rate))
    return Evidence(
        iterations=iterations,
        known={name: count for name, count in (after.known - before.known).items() if count >= iterations / 2},
        containers=tuple(sorted(containers, key=lambda container: -container.bytes_per_iteration)[:_MOST]),
        tracings={name: count for name, count in (after.tracings - before.tracings).items() if count >= iterations / 2},
        kept_bytes=max(0, (after.kept_bytes or 0) - (before.kept_bytes or 0)),
    )


def _of_kind(objects: Iterable[Any], module: str, name: str) -> list[Any]:
    kinds = {kind for kind in set(map(type, objects)) if kind.__name__ == name and kind.__module__.startswith(module)}
    return [value for value in objects if type(value) in kinds]
