"""State and settings of TensorFlow's runtime, without starting it, and its XLA compiler's plan of memory."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_TF, _EAGER = "tensorflow.python", "tensorflow.python.eager"
# Whether `tf.config.experimental.enable_op_determinism()` was called.
operations_are_deterministic = Borrowed(
    f"{_TF}.framework.config:is_op_determinism_enabled",
    feature="kerasmem.fit(isolated=True) with deterministic operations",
)
# Whether oneDNN's kernels stand in for TensorFlow's own on the CPU.
onednn_is_on = Borrowed(
    f"{_TF}.util._pywrap_util_port:IsMklEnabled", feature="asking TensorFlow which CPU kernels it uses"
)
_CURRENT = Borrowed(f"{_EAGER}.context:_context", feature="the peak of a kerasmem.run_isolated function")
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_STAGE = "optimized_hlo_proto_serialized"
_XLA = "method 'xla'"
COMPILE_FUNCTION = Borrowed(f"{_EAGER}.polymorphic_function.compiler_ir:from_concrete_function", feature=_XLA)
CONTEXT = Borrowed(f"{_EAGER}.context:context", feature=_XLA)
COMPILE_NAMED = Borrowed(f"{_EAGER}.context:Context.get_compiler_ir", feature=_XLA)
FUNCTION_DEF = Borrowed(f"{_EAGER}.context:Context.get_function_def", feature="fast planning of grouped convolutions")
# XLA plans as ever and makes code in a hurry, which takes up to half of the time otherwise. XLA reads its flags once in
# a process, with the first compilation.
UNOPTIMISED = "--xla_backend_optimization_level=0"


def devices_are_started() -> bool:
    """Return whether TensorFlow has started its devices (False if unknown)."""
    if "tensorflow" not in sys.modules or not _CURRENT.exists():
        return False
    return bool(getattr(_CURRENT.get(), "_initialized", False))


def compile_function(function: Any, arguments: list[Any]) -> bytes:
    """Compile a concrete function for this machine's CPU and return XLA's serialised `HloProto` of it.

    Args:
        function: of TensorFlow, traced.
        arguments: a `tf.TensorSpec` for each of its arguments.
    """
    generate = COMPILE_FUNCTION(function, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces that `device_name` will go; `platform_name` has no CPU yet
        return bytes(generate(stage=_STAGE, device_name=CPU))


def compile_named(name: str, arguments: list[Any]) -> bytes:
    """Compile a function that TensorFlow's runtime knows by this name, and return XLA's serialised `HloProto` of it.

    Args:
        name: of the function.
        arguments: a `tf.TensorSpec` for each of its arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serialised: bytes = COMPILE_NAMED(
            CONTEXT(), device_name=CPU, platform_name=None, function_name=name, flat_args=arguments,
            captured_inputs=[], stage=_STAGE,
        )  # fmt: skip
    return serialised


def body_of(name: str) -> Any:
    """Describe a function of TensorFlow's runtime, equal for two that differ in names alone.

    A model has a function for each of its grouped convolutions, and few that differ.

    Args:
        name: of the function.
    """
    import tensorflow as tf

    try:
        definition = FUNCTION_DEF(CONTEXT(), name)
    except (NotAvailableError, tf.errors.NotFoundError):
        return name
    arguments, nodes = definition.signature.input_arg, definition.node_def
    number = {each.name: place for place, each in enumerate((*arguments, *nodes))}

    def source(text: str) -> tuple[Any, ...]:
        made_by, *output = text.removeprefix("^").split(":")
        return text[0] == "^", number[made_by], *output

    done = tuple(
        (node.op, tuple(map(source, node.input)), *sorted((key, repr(value)) for key, value in node.attr.items()))
        for node in nodes
    )
    returned = tuple(source(definition.ret[each.name]) for each in definition.signature.output_arg)
    return tuple(each.type for each in arguments), done, returned
