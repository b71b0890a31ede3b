"""What was asked: how many devices, and what is divided among them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerasmem.checks import whole
from kerasmem.errors import UsageError
from kerasmem.records import Record

DATA, MODEL = "data", "model"
KINDS = (DATA, MODEL)
BATCH_AXIS, MODEL_AXIS = "batch", "model"  # of the mesh, as in Keras's own examples

SHARDED_METHOD = "xla"
WHY_SHARDED = "Keras divides weights and slots on JAX alone, which compiles with XLA"

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Parallelism(Record):
    """How one step is spread over devices.

    Attributes:
        replicas: devices.
        kind: "data" (each has all weights and a share of the batch) or "model" (each has a share of the weights and
            all of the batch).
        shard_optimizer: each device has a share of the optimizer's slots.
        layout: regular expressions of variables' paths → axis for each dimension, as `keras.distribution.LayoutMap`
            has them; empty where each weight is divided by rule.
    """

    replicas: int
    kind: str = DATA
    shard_optimizer: bool = False
    layout: tuple[tuple[str, Axes], ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether anything but the batch is divided, which is done by Keras on JAX alone."""
        return self.kind == MODEL or self.shard_optimizer

    def share_of(self, batch_size: int) -> int:
        """Return the samples of a batch that the device with the most of them has."""
        return batch_size if self.kind == MODEL else -(-batch_size // self.replicas)


def parallelism(
    replicas: Any, parallel: Any = DATA, shard_optimizer: bool = False, layout: Any = None
) -> Parallelism | None:
    """Check the arguments of `kerasmem.estimate` and return what they ask for; None for one device.

    Args:
        replicas: devices.
        parallel: "data" or "model".
        shard_optimizer: whether the optimizer's slots are divided.
        layout: for "model": texts as `parse_layout` takes them, or a mapping of regular expressions to axes.

    Raises:
        UsageError: one of them is wrong, or they contradict one another.

    Example:
        >>> parallelism(2, "model", layout=[".*kernel=,model"]).layout
        (('.*kernel', (None, 'model')),)
    """
    replicas = whole("replicas", replicas)
    if parallel not in KINDS:
        raise UsageError(f"parallel {parallel!r}: choose from {', '.join(KINDS)}")
    axes = parse_layout(layout)
    if axes and parallel != MODEL:
        raise UsageError("a layout says how weights are divided among devices: it needs --parallel model")
    if shard_optimizer and parallel == MODEL:
        raise UsageError(
            "--shard-optimizer divides slots among devices that all have the whole model; with --parallel model the "
            "slots are divided as their weights are: leave it out"
        )
    if replicas == 1:
        if parallel == MODEL or shard_optimizer:
            what = "--parallel model" if parallel == MODEL else "--shard-optimizer"
            raise UsageError(f"replicas 1: with one device there is nothing to divide; {what} needs --replicas from 2")
        return None
    return Parallelism(replicas, parallel, bool(shard_optimizer), axes)


def check_method(method: str, asked: Parallelism | None) -> None:
    """Refuse a method that cannot answer.

    Raises:
        UsageError: it knows nothing of weights or slots in shards.
    """
    if asked is not None and asked.is_sharded and method not in ("auto", SHARDED_METHOD):
        raise UsageError(
            f"method {method!r} looks at one device with the whole model: {WHY_SHARDED}; take xla, or auto"
        )


def parse_layout(given: Any) -> tuple[tuple[str, Axes], ...]:
    """Return a layout as pairs of a regular expression and an axis for each dimension.

    Args:
        given: None; texts "REGEX=AXIS,AXIS" with nothing where a dimension is not divided; or a mapping of regular
            expressions to a sequence of axes.

    Raises:
        UsageError: it cannot be read; the message names the entry.

    Example:
        >>> parse_layout(["dense.*/kernel=,model", "embedding/embeddings=model,"])
        (('dense.*/kernel', (None, 'model')), ('embedding/embeddings', ('model', None)))
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        entries = [(str(pattern), axes) for pattern, axes in given.items()]
    elif isinstance(given, Sequence):
        entries = [_entry(text) for text in given]
    else:
        raise UsageError(f"layout {given!r}: give texts 'REGEX=,{MODEL_AXIS}' or a mapping")
    found: dict[str, Axes] = {}
    for pattern, axes in entries:
        if pattern in found:
            raise UsageError(f"layout {pattern!r} is given twice: a variable has one layout")
        found[pattern] = _checked(pattern, axes)
    return tuple(found.items())


def _entry(text: Any) -> tuple[str, list[str]]:
    pattern, equals, axes = str(text).rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"layout {text!r}: write 'REGEX=,{MODEL_AXIS}': a variable's path, and an axis a dimension")
    return pattern, axes.split(",")


def _checked(pattern: str, axes: Any) -> Axes:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"layout {pattern!r}: not a regular expression ({error})") from None
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise UsageError(f"layout {pattern!r}: {axes!r} is no list of axes, one a dimension")
    names = tuple(each.strip() if isinstance(each, str) and each.strip() not in ("", "None") else None for each in axes)
    wrong = next((each for each in axes if each is not None and not isinstance(each, str)), None)
    wrong = wrong or next((name for name in names if name not in (None, MODEL_AXIS)), None)
    if wrong is not None:
        raise UsageError(f"layout {pattern!r}: axis {wrong!r}; the mesh has one to divide weights over: {MODEL_AXIS!r}")
    if names.count(MODEL_AXIS) > 1:
        raise UsageError(f"layout {pattern!r}: one dimension of a variable can lie on {MODEL_AXIS!r}, not two")
    return names
