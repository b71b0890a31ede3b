"""Arrays handed to `fit` that take twice the bytes they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kerasmem.units import format_size

ARGUMENTS = ("x", "y", "sample_weight", "validation_data")


def float64_inputs(arguments: Mapping[str, Any], floatx: str = "float32") -> list[str]:
    """Return a sentence for each float64 array among a Keras method's arguments, nested ones included.

    Args:
        arguments: by name; those that are not `ARGUMENTS` are left alone.
        floatx: what Keras computes in; nothing is too wide where that is float64.

    Example:
        >>> import numpy as np
        >>> print(*float64_inputs({"x": {"image": np.zeros((4, 2))}, "y": np.zeros(4, "float32")}))
        ... # doctest: +ELLIPSIS
        input: x['image'] is float64 and takes 64 B, twice the 32 B of float32, ...
    """
    if floatx == "float64":
        return []
    return [
        f"input: {place} is float64 and takes {format_size(size)}, twice the {format_size(size // 2)} of float32, "
        "to which Keras converts it by a further copy; pass it .astype('float32')"
        for name in ARGUMENTS
        for place, size in _wide(name, arguments.get(name))
    ]


def _wide(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield where a float64 array was handed in, such as "x" or "validation_data[0]['image']", and its bytes."""
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
            yield name, size
