"""Scratch of TensorFlow's kernels on a card, by functions as in `scratch`.

TensorFlow's own requests are exact: copies in the layout and padding of cuDNN (conv_ops_impl.h, conv_grad_input_ops.cc,
conv_grad_filter_ops.cc, fused_batch_norm_op.cc, softmax_op_gpu.cu.cc in tensorflow/core/kernels). cuDNN's workspace
depends on the algorithm that is fastest on the card in the first step. Its lower bound is 0, as TensorFlow falls back
to an algorithm without workspace (AllocateScratchOrFallback in autotune_conv_impl.h). Its upper bound is the largest
documented algorithm, within TF_CUDNN_WORKSPACE_LIMIT_IN_MB.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kerasmem.devices.kernels import CardKernels
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.scratch import Inputs, Kernels, Scratch
from kerasmem.estimation.unmodelled import REDZONES
from kerasmem.models.sizes import element_bytes

_HALVES = ("float16", "bfloat16")
_COMPLEX, _LAYOUTS = 8, 2  # bytes of a complex number of two float32, and number of layouts
_LARGEST_TRANSFORM, _TRANSFORMED_TILE = 256, 32  # sizes of cuDNN's FFT: largest plane, and tile of larger ones


def channels_last(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the dtypes in which tensor cores compute convolutions with the channels last.

    Examples:
        >>> channels_last((7, 5)), channels_last((8, 0)), channels_last((6, 1))
        (('float16',), ('float16', 'bfloat16', 'float32'), ())
    """
    if capability is None or capability < (7, 0):
        return ()
    return ("float16",) if capability < (8, 0) else ("float16", "bfloat16", "float32")


class _Convolution(NamedTuple):
    """A convolution, or the gradient of one.

    Attributes:
        batch: samples.
        channels: numbers of input and result channels.
        sizes: spatial shape of the input.
        kernel: spatial shape of the filter.
        results: spatial shape of the result.
        steps: spatial strides.
        paddings: (before, after) for each spatial dimension.
        is_dense: whether dilation and groups are 1.
        is_last: whether the channels come last.
        filter_bytes: bytes of the filter.
        element: bytes of an element.
    """

    batch: int
    channels: tuple[int, int]
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    results: tuple[int, ...]
    steps: tuple[int, ...]
    paddings: tuple[tuple[int, int], ...]
    is_dense: bool
    is_last: bool
    filter_bytes: int
    element: int

    @property
    def input_bytes(self) -> int:
        """Bytes of the input."""
        return self.batch * self.channels[0] * math.prod(self.sizes) * self.element

    @property
    def padded_bytes(self) -> int:
        """Bytes of the evenly padded input, as cuDNN pads both sides equally."""
        sizes = [size + abs(after - before) for size, (before, after) in zip(self.sizes, self.paddings, strict=True)]
        return self.batch * self.channels[0] * math.prod(sizes) * self.element

    @property
    def result_bytes(self) -> int:
        """Bytes of the result."""
        return self.batch * self.channels[1] * math.prod(self.results) * self.element

    @property
    def is_uneven(self) -> bool:
        """Whether one side is padded more than the other."""
        return any(before != after for before, after in self.paddings)

    @property
    def is_product(self) -> bool:
        """Whether cuBLAS computes it as a plain matrix product. The channels must come last."""
        is_point = set(self.kernel) | set(self.steps) == {1}
        is_whole = self.kernel == self.sizes and set(self.results) == {1} and not self.is_uneven
        return self.is_last and self.is_dense and (is_point or is_whole)


def _convolution(node: Node, inputs: Inputs) -> _Convolution | None:
    """Return a node's convolution, or None if a shape is unknown."""
    if not node.outputs or len(inputs) < 2:
        return None
    if "BackpropInput" in node.type:
        images, filters, result = node.outputs[0], inputs[1], inputs[2]
    elif "BackpropFilter" in node.type:
        images, filters, result = inputs[0], node.outputs[0], inputs[2]
    else:
        images, filters, result = inputs[0], inputs[1], node.outputs[0]
    if images.shape is None or filters.shape is None or result.shape is None or len(images.shape) != len(filters.shape):
        return None
    layout = node.attributes.get("data_format", b"NHWC")
    layout = layout.decode() if isinstance(layout, bytes) else str(layout)
    is_last = layout.endswith("C")
    rank = len(images.shape) - 2
    first = 1 if is_last else 2
    space, channel = slice(first, first + rank), rank + 1 if is_last else 1
    steps, dilations = (
        tuple(int(value) for value in (node.attributes.get(name) or [1] * (rank + 2))[space])
        for name in ("strides", "dilations")
    )
    kernel, sizes, results = filters.shape[:rank], images.shape[space], result.shape[space]
    return _Convolution(
        images.shape[0],
        (images.shape[channel], result.shape[channel]),
        sizes,
        kernel,
        results,
        steps,
        _paddings(node.attributes, sizes, results, kernel, steps, dilations),
        set(dilations) == {1} and filters.shape[rank] == images.shape[channel],
        is_last,
        filters.bytes or 0,
        element_bytes(images.dtype),
    )


def _paddings(
    attributes: dict[str, Any], sizes: tuple[int, ...], results: tuple[int, ...],
    kernel: tuple[int, ...], steps: tuple[int, ...], dilations: tuple[int, ...],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    padding = attributes.get("padding", b"SAME")
    padding = padding.decode() if isinstance(padding, bytes) else padding
    if padding == "VALID":
        return ((0, 0),) * len(sizes)
    totals = (
        max((result - 1) * step + (width - 1) * dilation + 1 - size, 0)
        for size, result, width, step, dilation in zip(sizes, results, kernel, steps, dilations, strict=True)
    )
    return tuple((total // 2, total - total // 2) for total in totals)


def convolution(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies in cuDNN's order, with the channels first and an even padding.

    The gradient of the input is computed in a second buffer, that of the filter first in cuDNN's order.
    """
    conv = _convolution(node, inputs)
    if conv is None or conv.is_product:
        return ()
    needs = [conv.filter_bytes]
    is_turned = conv.is_last and not _as_it_comes(node, kernels)
    has_channels, has_results = (count > 1 for count in conv.channels)
    is_forward = "Backprop" not in node.type
    if is_forward and is_turned:
        needs += [conv.padded_bytes] * has_channels + [conv.result_bytes]
    elif is_forward:
        needs += [conv.padded_bytes] * conv.is_uneven
    elif "BackpropInput" in node.type:
        needs += [conv.padded_bytes] + [conv.input_bytes] * conv.is_uneven
        needs += [conv.result_bytes] * (is_turned and has_results)
    else:
        needs += [conv.padded_bytes] * conv.is_uneven
        needs += [conv.result_bytes] * (is_turned and has_results)
        needs += [conv.padded_bytes] * (is_turned and has_channels)
    return (*needs, *_autotuning(conv, kernels, node.type))


def _as_it_comes(node: Node, kernels: Kernels) -> bool:
    return isinstance(kernels, CardKernels) and node.outputs[0].dtype in channels_last(kernels.capability)


def _autotuning(conv: _Convolution, kernels: Kernels, kind: str) -> list[int]:
    """Return autotuning's scratch: a copy of the result and the largest workspace."""
    if not isinstance(kernels, CardKernels) or not kernels.workspace:
        return []
    results = {"BackpropInput": conv.input_bytes, "BackpropFilter": conv.filter_bytes}
    copy = next((size for part, size in results.items() if part in kind), conv.result_bytes)
    workspace = min(_workspace(conv, "Backprop" not in kind), kernels.workspace)
    return [copy + REDZONES, workspace + REDZONES]


def _workspace(conv: _Convolution, is_forward: bool) -> int:
    """Return the largest workspace of the documented algorithms."""
    # Copies in the layout of tensor cores.
    workspaces = [conv.input_bytes + conv.filter_bytes + conv.result_bytes]
    if is_forward:  # GEMM, "a significant memory workspace to store the matrix that holds the input tensor data"
        places = conv.batch * math.prod(conv.results)
        workspaces.append(places * math.prod(conv.kernel) * conv.channels[0] * conv.element)
    if conv.is_dense and set(conv.steps) == {1} and len(conv.sizes) == 2:
        workspaces.append(_fft_bytes(conv))
    return max(workspaces)


def _plane_elements(conv: _Convolution, elements: int) -> tuple[int, int, int]:
    """Return the elements of input, filter and result, from those of a plane."""
    first, last = conv.channels
    return conv.batch * first * elements, first * last * elements, conv.batch * last * elements


def _fft_bytes(conv: _Convolution) -> int:
    """Return the workspace of FFT: all planes as complex numbers (arXiv:1312.5851).

    Symmetry halves them. All are in memory in two layouts: profiles of TensorFlow's Conv2D show cuDNN's fft2d_r2c, then
    cuBLAS's transposition of complex numbers, then a complex matrix product. Larger planes are divided into tiles of 32
    × 32 ("FFT_TILING"), which overlap by the filter's size less one.
    """
    padded = [size + sum(pads) for size, pads in zip(conv.sizes, conv.paddings, strict=True)]
    if max(padded) > _LARGEST_TRANSFORM:
        if max(conv.kernel) > _TRANSFORMED_TILE:
            return 0
        tiles = math.prod(
            -(-result // (_TRANSFORMED_TILE - width + 1))
            for result, width in zip(conv.results, conv.kernel, strict=True)
        )
        images, filters, result = _plane_elements(conv, _TRANSFORMED_TILE * (_TRANSFORMED_TILE // 2 + 1))
        return (images * tiles + filters + result * tiles) * _COMPLEX * _LAYOUTS
    height, width = (1 << (size - 1).bit_length() for size in padded)
    return sum(_plane_elements(conv, height * (width // 2 + 1))) * _COMPLEX * _LAYOUTS


def cudnn_batch_norm(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies in cuDNN's layout, if the channels come last (fused_batch_norm_op.cc)."""
    layout = node.attributes.get("data_format", b"NHWC")
    if layout not in (b"NHWC", "NHWC") or not node.attributes.get("is_training", True) or not inputs:
        return ()
    is_gradient = "Grad" in node.type
    return (inputs[0].bytes or 0,) * (3 if is_gradient else 2)


def softmax(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Maxima and sums of rows, each as large as the result (softmax_op_gpu.cu.cc)."""
    result: Tensor = node.outputs[0]
    size = result.bytes or 0
    return size, 2 * size if result.dtype in _HALVES else size


# cuDNN's reserve for a recurrent layer's gradient, in elements for each unit, sample and step: four gates and the cell
# of an LSTM, six for a GRU. cuDNN reported 736,000,000 and 864,000,000 bytes for four layers of 320 units over 25,000
# samples and steps, which are those elements and the outputs of three layers (pytorch/pytorch#2895).
_RESERVED = {"lstm": 5, "gru": 6}


def rnn_reserve(node: Node) -> tuple[Tensor, ...]:
    """Return a recurrent layer's outputs, with the reserve for its gradient."""
    mode = node.attributes.get("rnn_mode", b"lstm")
    result, shape = node.outputs[0], node.outputs[0].shape
    if shape is None:
        return node.outputs
    elements = _RESERVED.get(mode.decode() if isinstance(mode, bytes) else mode, 1) * math.prod(shape)
    reserve = Tensor((elements,), result.dtype, elements * element_bytes(result.dtype))
    return (
        *node.outputs[:3],
        reserve,
        *(Tensor((), tensor.dtype, element_bytes(tensor.dtype)) for tensor in node.outputs[4:]),
    )


def rnn(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """A copy of the weights, as cuDNN reported for the same layers."""
    return (inputs[3].bytes or 0,) if len(inputs) > 3 else ()


CUDA_FUNCTIONS: dict[str, Scratch] = {
    function.__name__: function for function in (convolution, cudnn_batch_norm, softmax, rnn)
}
