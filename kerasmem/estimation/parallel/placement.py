"""Which dimension of each variable is divided among the devices, and what a device then holds. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kerasmem.errors import UsageError
from kerasmem.estimation.parallel.parallelism import BATCH_AXIS, MODEL, MODEL_AXIS, Axes, Parallelism
from kerasmem.records import Record

Find = Callable[[str], Axes | None]  # the layout of a path, as the user's layout map has it


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
    weights = [each for each in variables if each.group in ("trainable", "non_trainable")]
    placed: dict[str, Placed] = {}
    if asked.kind == MODEL:
        for each in weights:
            axes = (
                _given(each, asked.replicas, find(each.path)) if asked.layout else by_rule(each.shape, asked.replicas)
            )
            placed[each.path] = replace(each, axes=axes)
    found = []
    for each in variables:
        if each.group in ("trainable", "non_trainable"):
            found.append(placed.get(each.path, each))
        elif each.group == "optimizer" and asked.shard_optimizer:
            found.append(replace(each, axes=first_divisible(each.shape, asked.replicas)))
        elif each.group == "optimizer" and (weight := weight_of(each, weights)) is not None and placed:
            found.append(replace(each, axes=placed[weight.path].axes))
        else:
            found.append(each)
    return tuple(found)


def by_rule(shape: tuple[int, ...], replicas: int) -> Axes:
    """Return the axes where no layout is given: the largest dimension that the devices divide, of equal ones the last.

    Example:
        >>> by_rule((128, 512), 4), by_rule((64, 64), 4), by_rule((512,), 4), by_rule((3, 3), 4)
        ((None, 'model'), (None, 'model'), (None,), (None, None))
    """
    sizes = [(size, number) for number, size in enumerate(shape) if size and size % replicas == 0]
    chosen = max(sizes)[1] if len(shape) > 1 and sizes else None
    return tuple(MODEL_AXIS if number == chosen else None for number in range(len(shape)))


def first_divisible(shape: tuple[int, ...], replicas: int) -> Axes:
    """Return the axes of a slot that is divided among devices with the whole model: the first dimension that can be.

    Example:
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


def not_divided(placed: Iterable[Placed], groups: tuple[str, ...] = ("trainable", "non_trainable")) -> tuple[int, int]:
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
