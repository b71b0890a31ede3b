"""From the name of an operation, as it stands in a log, to the Keras layer and the phase of the step. Pure.

With the model at hand `kerasmem.models.op_names` tells layers apart for certain; a log has the names alone. Keras 3
numbers every scope of a call: "net_1/block_2_1/Relu" is the layer block_2 of the model net. Layers of Keras 2, which
numbers none, are not told apart.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from kerasmem.diagnosis.log_messages import read_data
from kerasmem.models.op_names import BACKWARD

_NUMBERED = re.compile(r"(.+)_\d{1,4}")


@dataclass(frozen=True)
class OperationName:
    """What an operation's name tells: the layer, if any, "forward", "backward" or "optimizer", if any."""

    layer: str | None
    phase: str | None


@functools.cache
def _scope(kind: str) -> re.Pattern[str]:
    """Compile a pattern for the scopes of a kind in `data/scopes.json`, with an optional number."""
    names = "|".join(read_data("scopes")[kind])
    case, end = "" if kind == "wrappers" else "(?i)", "(?:_grad)?" if kind == "inside" else ""
    return re.compile(rf"{case}(?:{names}){end}(?:_\d+)?")


def is_in_scope(name: str, kind: str) -> bool:
    """Return whether a scope or operation is of a kind in `data/scopes.json`."""
    return _scope(kind).fullmatch(name[:400]) is not None


def model_number(operation: str) -> tuple[str, int] | None:
    """Return the scope of a model without a name of its own, and its number in the process from 1.

    Examples:
        >>> model_number("gradient_tape/functional_3_1/dense_7_1/MatMul")
        ('functional_3', 4)
    """
    for part in operation[:400].split("/"):
        match = _scope("models").fullmatch(part)
        if match and match["number"]:
            return part[: match.end("number")], int(match["number"]) + 1
    return None


def parse_operation(name: str) -> OperationName:
    """Return the layer and the phase of the operation of this name.

    Args:
        name: as TensorFlow or XLA writes it.

    Examples:
        >>> parse_operation("gradient_tape/vgg16_1/block4_conv2_1/Conv2D/Conv2DBackpropInput")
        OperationName(layer='block4_conv2', phase='backward')
    """
    name = name[:400].split(";")[0]
    if "(" in name:
        return OperationName(None, "backward" if "transpose(" in name else "forward" if "jvp(" in name else None)
    parts = [part for part in re.sub(r"__inference_\w+$|:\d+$|\^", "", name).split("/") if part]
    backward = BACKWARD in parts or any(re.fullmatch(r"gradients?(?:_\d+)?", part) for part in parts)
    # the tape adds up the gradients of a value that was used more than once outside any scope
    backward = backward or any(re.fullmatch(r"AddN(?:_\d+)?", part) for part in parts)
    backward = backward or any(part.endswith("_grad") or "Backprop" in part for part in parts)
    while parts and (_scope("wrappers").fullmatch(parts[0]) or parts[0] == BACKWARD):
        parts.pop(0)
    if parts and _scope("optimizers").fullmatch(parts[0]) and not backward:
        return OperationName(None, "optimizer")
    if len(parts) < 2:  # of no layer: an operation of the step's own
        return OperationName(None, "backward" if backward else None)
    if _scope("losses").fullmatch(parts[0]) and not re.search(r"conv|dense|block", parts[0]):
        return OperationName(None, "backward" if backward else "forward")
    return OperationName(_layer(parts[:-1]), "backward" if backward else "forward")


def _layer(scopes: list[str]) -> str | None:
    """Return the layer by the numbered scopes below the model's, to the first one that a layer opens inside."""
    if not _NUMBERED.fullmatch(scopes[0]):
        return None
    layers: list[str] = []
    for scope in scopes[1:]:
        numbered = _NUMBERED.fullmatch(scope)
        if not numbered or (layers and _scope("inside").fullmatch(scope)):
            break
        layers.append(numbered[1])
    return "/".join(layers) or None
