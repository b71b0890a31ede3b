"""Arrays handed to `fit` that take twice the bytes they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kerasmem.units import format_size

ARGUMENTS = ("x", "y", "sample_weight", "validation_data")


class WideInput(NamedTuple):
    """A float64 array: where it was handed in, such as "x" or "validation_data[0]['image']", and its bytes."""

    argument: str
    nbytes: int

    @property
    def note(self) -> str:
        """A sentence for people."""
        return (
            f"input: {self.argument} is float64 and takes {format_size(self.nbytes)}, twice the "
            f"{format_size(self.nbytes // 2)} of float32, to which Keras converts it by a further copy; "
            "pass it .astype('float32')"
        )


def float64_inputs(arguments: Mapping[str, Any], floatx: str = "float32") -> list[WideInput]:
    """Return the float64 arrays among a Keras method's arguments, nested ones included.

    Args:
        arguments: by name; those that are not `ARGUMENTS` are left alone.
        floatx: what Keras computes in; nothing is too wide where that is float64.

    Example:
        >>> import numpy as np
        >>> float64_inputs({"x": {"image": np.zeros((4, 2))}, "y": np.zeros(4, "float32")})
        [WideInput(argument="x['image']", nbytes=64)]
    """
    if floatx == "float64":
        return []
    return [wide for name in ARGUMENTS for wide in _wide(name, arguments.get(name))]


def _wide(name: str, value: Any) -> Iterator[WideInput]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _wide(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            if hasattr(inner, "dtype") or isinstance(inner, (dict, list, tuple)):
                yield from _wide(f"{name}[{place}]", inner)
    else:
        dtype = getattr(value, "dtype", None)
        size = getattr(value, "nbytes", None)
        if getattr(dtype, "name", None) == "float64" and isinstance(size, int):
            yield WideInput(name, size)
