"""Sizes of elements and variables in bytes."""

from __future__ import annotations

import math
from typing import Any

# tf.string: an element is a small structure, the text beyond 22 bytes lies elsewhere.
_STRING_BYTES = 24
_SPECIAL = {"bool": 1, "string": _STRING_BYTES, "complex64": 8, "complex128": 16, "int4": 1, "uint4": 1}


def element_bytes(dtype: str) -> int:
    """Return the bytes that one element of a Keras dtype takes in memory: 2 for "bfloat16".

    Examples:
        >>> element_bytes("float32"), element_bytes("uint8")
        (4, 1)
    """
    if dtype in _SPECIAL:
        return _SPECIAL[dtype]
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0].split("e")[0]
    return max(int(digits) // 8, 1)


def variable_bytes(variable: Any) -> int:
    """Return the bytes of a Keras variable's value."""
    return math.prod(variable.shape) * element_bytes(str(variable.dtype))
