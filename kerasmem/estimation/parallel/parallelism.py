"""How many devices were asked for, what is divided among them, and what one of them then holds. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasmem.checks import whole
from kerasmem.errors import UsageError
from kerasmem.records import Record

DATA, MODEL = "data", "model"
KINDS = (DATA, MODEL)
BATCH_AXIS, MODEL_AXIS = "batch", "model"  # of the mesh, as in Keras's own examples

SHARDED_METHOD = "xla"
WHY_SHARDED = "Keras divides weights and slots on JAX alone, which compiles with XLA"

WEIGHTS = ("trainable", "non_trainable")  # groups of variables

Axes = tuple[str | None, ...]
Find = Callable[[str], Axes | None]  # the layout of a path, as the user's layout map has it


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

    Examples:
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

    Examples:
        >>> parse_layout(["dense.*/kernel=,model", "embedding/embeddings=model,"])
        (('dense.*/kernel', (None, 'model')), ('embedding/embeddings', ('model', None)))
    """
    if given is None:
        return ()
    if not isinstance(given, (str, Mapping, Sequence)):
        raise UsageError(f"layout {given!r}: give texts 'REGEX=,{MODEL_AXIS}' or a mapping")
    if isinstance(given, Mapping):
        entries = [(str(pattern), axes) for pattern, axes in given.items()]
    else:
        entries = [_entry(text) for text in ([given] if isinstance(given, str) else given)]
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


@dataclass(frozen=True)
class Placed(Record):
    """A variable and the axis of the mesh that each of its dimensions is divided over.

    Attributes:
        path: in Keras.
        shape: whole.
        axes: None for a dimension that every device has all of.
        bytes: whole.
        group: "trainable", "non_trainable", "optimizer" or "metrics".
    """

    path: str
    shape: tuple[int, ...]
    axes: Axes
    bytes: int
    group: str

    @property
    def is_divided(self) -> bool:
        """Whether a device has less than all of it."""
        return any(axis is not None for axis in self.axes)

    def on_device(self, replicas: int) -> int:
        """Return the bytes that one device has of it."""
        return self.bytes // replicas if self.is_divided else self.bytes


def place(variables: Sequence[Placed], asked: Parallelism, find: Find) -> tuple[Placed, ...]:
    """Return the variables with their axes.

    Args:
        variables: of all groups, in order, with no axes yet.
        asked: what is divided.
        find: the user's layout of a path; None where it has none.

    Raises:
        UsageError: the layout does not fit a variable.
    """
    weights = [each for each in variables if each.group in WEIGHTS]

    def axes_of(each: Placed) -> Axes:
        if each.group in WEIGHTS and asked.kind == MODEL:
            if asked.layout:
                return _given(each, asked.replicas, find(each.path))
            return by_rule(each.shape, asked.replicas)
        if each.group == "optimizer" and asked.shard_optimizer:
            return first_divisible(each.shape, asked.replicas)
        weight = weight_of(each, weights) if each.group == "optimizer" and asked.kind == MODEL else None
        return each.axes if weight is None else axes_of(weight)

    return tuple(replace(each, axes=axes_of(each)) for each in variables)


def by_rule(shape: tuple[int, ...], replicas: int) -> Axes:
    """Return the axes where no layout is given: the largest dimension that the devices divide, of equal ones the last.

    Examples:
        >>> by_rule((128, 512), 4), by_rule((64, 64), 4), by_rule((512,), 4), by_rule((3, 3), 4)
        ((None, 'model'), (None, 'model'), (None,), (None, None))
    """
    sizes = [(size, number) for number, size in enumerate(shape) if size and size % replicas == 0]
    chosen = max(sizes)[1] if len(shape) > 1 and sizes else None
    return tuple(MODEL_AXIS if number == chosen else None for number in range(len(shape)))


def first_divisible(shape: tuple[int, ...], replicas: int) -> Axes:
    """Return the axes of a slot that is divided among devices with the whole model: the first dimension that can be.

    Examples:
        >>> first_divisible((3, 3, 64, 128), 4), first_divisible((), 4)
        ((None, None, 'batch', None), ())
    """
    chosen = next((number for number, size in enumerate(shape) if size and size % replicas == 0), None)
    return tuple(BATCH_AXIS if number == chosen else None for number in range(len(shape)))


def weight_of(slot: Placed, weights: Iterable[Placed]) -> Placed | None:
    """Return the weight that a slot belongs to: Keras names a slot after its weight, and gives it the weight's layout.

    A slot of another shape than the weight (Adafactor's rows and columns) has no layout in Keras either.
    """
    name = slot.path.rpartition("/")[2]
    fits = [each for each in weights if each.shape == slot.shape and name.startswith(each.path.replace("/", "_") + "_")]
    return max(fits, key=lambda each: len(each.path), default=None)


def not_divided(placed: Iterable[Placed], groups: tuple[str, ...] = WEIGHTS) -> tuple[int, int]:
    """Return how many variables of some groups every device has all of, and their bytes; scalars are passed over."""
    whole = [each for each in placed if each.group in groups and each.shape and not each.is_divided]
    return len(whole), sum(each.bytes for each in whole)


def unused_layout(patterns: Iterable[str], paths: Sequence[str]) -> UsageError:
    """Return the error for regular expressions of a layout that nothing in the model has, with the nearest paths."""
    named = list(patterns)
    near = [each for pattern in named for each in difflib.get_close_matches(pattern, paths, 3, 0.3)]
    shown = list(dict.fromkeys(near or paths))[:5]
    return UsageError(
        f"layout {', '.join(map(repr, named))}: no variable's path is matched by it (a regular expression matches the "
        f"whole path); the model has {', '.join(shown)}" + (", …" if len(paths) > len(shown) else "")
    )


def _given(variable: Placed, replicas: int, axes: Axes | None) -> Axes:
    if axes is None:
        return (None,) * len(variable.shape)
    if len(axes) != len(variable.shape):
        raise UsageError(
            f"layout of {variable.path}: axes {_words(axes)} for {len(axes)} of the {len(variable.shape)} dimensions "
            f"of its shape {variable.shape}; give one for each, empty where it is whole"
        )
    for axis, size in zip(axes, variable.shape, strict=True):
        if axis is not None and size % replicas:
            raise UsageError(
                f"layout of {variable.path}: {_words(axes)} divides {size:,} of its shape {variable.shape} among "
                f"{replicas} devices, which does not come out even; choose another dimension or number of devices"
            )
    return axes


def _words(axes: Axes) -> str:
    return repr(",".join(axis or "" for axis in axes))
