"""XLA's compiler inside TensorFlow: its plan of memory for a function, without running it."""

from __future__ import annotations

import warnings
from typing import Any

from kerasmem.compat.borrowing import Borrowed

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_STAGE = "optimized_hlo_proto_serialized"
_FEATURE = "method 'xla'"
COMPILE_FUNCTION = Borrowed(
    "tensorflow.python.eager.polymorphic_function.compiler_ir", "from_concrete_function", feature=_FEATURE,
    parameters=("concrete_fn", "specialized_flat_specs"),
)  # fmt: skip
CONTEXT = Borrowed("tensorflow.python.eager.context", "context", feature=_FEATURE)
COMPILE_NAMED = Borrowed(
    "tensorflow.python.eager.context", "Context.get_compiler_ir", feature=_FEATURE,
    parameters=("device_name", "platform_name", "function_name", "flat_args", "captured_inputs", "stage"),
)  # fmt: skip
HLO = Borrowed("tensorflow.compiler.xla.service.hlo_pb2", "HloProto", feature=_FEATURE)


def compile_function(function: Any, arguments: list[Any]) -> Any:
    """Compile a concrete function for this machine's CPU and return XLA's `HloProto` of it.

    Args:
        function: of TensorFlow, traced.
        arguments: a `tf.TensorSpec` for each of its arguments.
    """
    generate = COMPILE_FUNCTION.get()(function, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces that `device_name` will go; `platform_name` has no CPU yet
        return HLO.get().FromString(generate(stage=_STAGE, device_name=CPU))


def compile_named(name: str, arguments: list[Any]) -> Any:
    """Compile a function that TensorFlow's runtime knows by this name, and return XLA's `HloProto` of it.

    Args:
        name: of the function.
        arguments: a `tf.TensorSpec` for each of its arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serialised = COMPILE_NAMED.get()(
            CONTEXT.get()(), device_name=CPU, platform_name=None, function_name=name, flat_args=arguments,
            captured_inputs=[], stage=_STAGE,
        )  # fmt: skip
    return HLO.get().FromString(serialised)
