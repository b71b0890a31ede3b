"""XLA's compiler inside TensorFlow: its plan of memory for a function, without running it."""

from __future__ import annotations

import warnings
from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
_STAGE = "optimized_hlo_proto_serialized"
_FEATURE = "method 'xla'"
_COMPILER = "tensorflow.python.eager.polymorphic_function.compiler_ir"
_CONTEXT = "tensorflow.python.eager.context"
COMPILE_FUNCTION = Borrowed(
    f"{_COMPILER}:from_concrete_function(concrete_fn, specialized_flat_specs)", feature=_FEATURE
)
CONTEXT = Borrowed(f"{_CONTEXT}:context", feature=_FEATURE)
COMPILE_NAMED = Borrowed(
    f"{_CONTEXT}:Context.get_compiler_ir(device_name, platform_name, function_name, flat_args, captured_inputs, stage)",
    feature=_FEATURE,
)
FUNCTION_DEF = Borrowed(f"{_CONTEXT}:Context.get_function_def(name)", feature="fast planning of grouped convolutions")
# XLA plans as ever and makes code in a hurry, which takes up to half of the time otherwise. XLA reads its flags once in
# a process, with the first compilation.
UNOPTIMISED = "--xla_backend_optimization_level=0"


def compile_function(function: Any, arguments: list[Any]) -> bytes:
    """Compile a concrete function for this machine's CPU and return XLA's serialised `HloProto` of it.

    Args:
        function: of TensorFlow, traced.
        arguments: a `tf.TensorSpec` for each of its arguments.
    """
    generate = COMPILE_FUNCTION.get()(function, arguments)
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
        serialised: bytes = COMPILE_NAMED.get()(
            CONTEXT.get()(), device_name=CPU, platform_name=None, function_name=name, flat_args=arguments,
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
        definition = FUNCTION_DEF.get()(CONTEXT.get()(), name)
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
