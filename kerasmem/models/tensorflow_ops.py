"""Stand-ins for `tf.*` functions that Keras 2 models call between layers, enough to infer shapes.

A name in a file must not choose what runs: only functions that compute tensors from tensors are looked up.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

from kerasmem.errors import UnknownLayerError
from kerasmem.models.backend import import_keras, require_tensorflow
from kerasmem.models.keras2 import TENSORFLOW_CALLS

# Whole modules of pure tensor functions, and single names from `tf`.
_PURE_MODULE = re.compile(r"(?:__operators__|math|nn|linalg|signal|image|bitwise)\.(?!decode|is_jpeg)[a-z]\w*\Z")
_PURE_NAMES = frozenset(
    """
    abs add add_n argmax argmin argsort boolean_mask broadcast_to cast clip_by_norm clip_by_value concat cos
    cosh cumsum debugging.check_numerics divide einsum ensure_shape equal exp expand_dims eye fill floor
    floor_div floordiv floormod gather gather_nd greater greater_equal identity less less_equal linspace
    logical_and logical_not logical_or matmul maximum meshgrid minimum mod multiply negative norm not_equal
    one_hot ones ones_like pad pow random.normal random.shuffle random.truncated_normal random.uniform range
    rank realdiv reduce_all reduce_any reduce_logsumexp reduce_max reduce_mean reduce_min reduce_prod reduce_sum
    repeat reshape reverse roll round sequence_mask shape sigmoid sign sin sinh size slice softmax sort split
    sqrt square squeeze stack stop_gradient strided_slice strings.as_string subtract tan tanh
    tensor_scatter_nd_update tensordot tile transpose truediv unique unstack where zeros zeros_like
    """.split()
)


def tensorflow_call_classes() -> dict[str, Any]:
    """Return the classes that stand in for TFOpLambda and SlicingOpLambda, by the name a file gives them."""
    keras = import_keras()

    class TensorFlowCall(keras.Operation):  # type: ignore[name-defined]
        """Calls one `tf.*` function."""

        def __init__(self, function: str, name: str | None = None) -> None:
            super().__init__(name=name)
            self.function = function
            self._callable = _look_up(function)

        def call(self, *args: Any, **kwargs: Any) -> Any:
            if "slice_spec" in kwargs:
                kwargs["slice_spec"] = _slices(kwargs["slice_spec"])
            return self._callable(*args, **kwargs)

        def get_config(self) -> dict[str, Any]:
            return {"name": self.name, "function": self.function}

    return dict.fromkeys(TENSORFLOW_CALLS, TensorFlowCall)


def check_function(function: object) -> None:
    """Raise UnknownLayerError unless `function` names a function of `tf` that may be called for a file."""
    name = function.removeprefix("compat.v1.") if isinstance(function, str) else ""
    if not (_PURE_MODULE.match(name) or name in _PURE_NAMES):
        raise UnknownLayerError(
            f"the model calls tf.{function}, which kerasmem does not run from a file; "
            "name code that builds the model instead: --factory package.module:function"
        )


def _look_up(function: str) -> Any:
    check_function(function)
    require_tensorflow(f"tf.{function}, which the file calls between layers")
    import tensorflow as tf

    return reduce(getattr, function.split("."), tf)


def _slices(specification: Any) -> Any:
    if isinstance(specification, list):
        return tuple(_slices(item) for item in specification)
    if isinstance(specification, dict) and specification.get("class_name") == "__ellipsis__":
        return ...
    if isinstance(specification, dict):
        return slice(specification.get("start"), specification.get("stop"), specification.get("step"))
    return specification
