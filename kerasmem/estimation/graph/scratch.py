"""Scratch of TensorFlow's kernels on a CPU, as bytes of each buffer.

`data/kernels.json` names the function of each operation, by kind of kernel. Sources: the kernels' calls of
`allocate_temp` and `forward_input_or_allocate_temp` in tensorflow/core/kernels, compared with the requests of single
operations to the allocator (`tests/estimation/test_kernel_scratch.py`). Eigen's own memory inside a product or a
convolution comes from the C library, not from TensorFlow's allocator, and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kerasmem.devices.kernels import CardKernels, CpuKernels
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.models.sizes import element_bytes

Inputs = tuple[Tensor, ...]
Kernels = CpuKernels | CardKernels
Scratch = Callable[[Node, Inputs, Kernels], tuple[int, ...]]

_HALVES = ("float16", "bfloat16")
AXES = "axes"  # the attribute with the axes of a reduction


def reduction(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """A transposed copy for a reduction over axes that are not adjacent (reduction_ops_common.h)."""
    shape, axes = inputs[0].shape, node.attributes.get(AXES)
    if shape is None or axes is None:
        return ()
    groups: list[bool] = []
    for axis, size in enumerate(shape):
        reduced = axis in axes or axis - len(shape) in axes
        if size != 1 and (not groups or groups[-1] != reduced):
            groups.append(reduced)
    return () if len(groups) <= 3 else (inputs[0].bytes or 0,)


def contraction(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies of Einsum's operands and product in the order of a matrix product.

    Einsum also sums over axes that only one operand has (einsum_op_impl.h). Equations with dots, and the diagonal of an
    operand that has an axis twice, are not counted.
    """
    equation = node.attributes.get("equation", b"")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    left, _, result = equation.replace(" ", "").partition("->")
    if not left or "." in left or any(tensor.shape is None for tensor in inputs):
        return ()
    terms, needs, product_axes = left.split(","), [], ""
    for number, (term, tensor) in enumerate(zip(terms, inputs, strict=True)):
        other = "".join(terms[:number] + terms[number + 1 :])
        ordered = sorted(term, key=left.index)
        batch, free, contracted, summed = (
            "".join(label for label in ordered if (label in other, label in result) == kind)
            for kind in ((True, True), (False, True), (True, False), (False, False))
        )
        if term not in (batch + free + contracted + summed, batch + contracted + free + summed):
            needs.append(tensor.bytes or 0)
        count = math.prod(size for label, size in zip(term, tensor.shape or (), strict=True) if label in summed)
        if count > 1:
            needs.append((tensor.bytes or 0) // count)
        product_axes += free if number else batch + free
    if len(terms) > 1:
        return tuple(needs) if product_axes == result else (*needs, node.outputs[0].bytes or 0)
    return tuple(needs[:-1]) if product_axes == result else tuple(needs)  # of one operand the last copy is the product


def mirror_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """A copy of the input for the gradient of a mirrored border (mirror_pad_op.cc)."""
    return (inputs[0].bytes or 0,) if inputs else ()


def product(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies of factors in the result's dtype, or of 16-bit tensors in float32 (matmul_op_impl.h)."""
    if not node.outputs:
        return ()
    result = node.outputs[0]
    if result.dtype in _HALVES:
        return tuple(2 * (tensor.bytes or 0) for tensor in (*inputs[:2], result))
    others = (tensor for tensor in inputs[:2] if tensor.dtype != result.dtype)
    return tuple((tensor.bytes or 0) // element_bytes(tensor.dtype) * element_bytes(result.dtype) for tensor in others)


# A convolution's gradient works on patches: a copy of the filter's input for every pixel of the result. It takes as
# many samples at a time as keep patches, filter and result within this size.
_WORKING_SET = 30 << 20
# In the gradient of the input, threads share one sample if its work for each thread is at least this.
_DIVIDED = 256 << 10
# oneDNN's sums are whole blocks of elements, or of pixels and channels. Its scratchpad is aligned.
_ALIGNED, _PIXELS, _CHANNELS, _SCRATCHPAD = 64, 10, 16, 128
_MOST_OVERHEAD = 25  # of volumes: patches are not made if they are this many times as large as the tensors


class Patches(NamedTuple):
    """Patches of one sample.

    Attributes:
        work: elements of patches, filter and result.
        bytes: bytes of the patches.
        element: bytes of an element.
    """

    work: int
    bytes: int
    element: int

    def within(self, cache: int) -> int:
        """Return the bytes of the samples' patches that fit a cache."""
        return -(-(cache // self.element) // self.work) * self.bytes

    def is_divided(self, threads: int) -> bool:
        """Return whether all threads share one sample in the gradient of the input."""
        return self.work // threads >= _DIVIDED // self.element


def filter_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Patches of all samples that fit into a cache of 30 MiB (conv_grad_filter_ops.cc)."""
    patches = patches_of(node, inputs, 4)
    return () if patches is None else (patches.within(_WORKING_SET),)


def input_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Patches as for the filter, or of one sample if all threads share it (conv_grad_input_ops.h)."""
    patches = patches_of(node, inputs, 4)
    if patches is None:
        return ()
    is_alone = (inputs[2].shape or (1,))[0] == 1
    if is_alone or patches.is_divided(_cpu(kernels).intra_op_threads):
        return (patches.bytes,)
    return (patches.within(_WORKING_SET),)


def volume_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Patches that fit into the processor's cache, or none if too large (conv_grad_ops_3d.cc)."""
    patches = patches_of(node, inputs, 5)
    if patches is None:
        return ()
    is_alone = "BackpropInput" in node.type and (inputs[2].shape or (1,))[0] == 1
    size = patches.bytes if is_alone else patches.within(_cpu(kernels).cache_bytes)
    operands = inputs[1:] if "BackpropInput" in node.type else (inputs[0], inputs[2])
    total = sum(tensor.bytes or 0 for tensor in (*operands, *node.outputs))
    return () if size // total > _MOST_OVERHEAD else (size,)


def patches_of(node: Node, inputs: Inputs, rank: int) -> Patches | None:
    """Return a convolution's patches of one sample, or None for another rank."""
    result = inputs[2].shape if len(inputs) > 2 else None
    filters = node.outputs[0].shape if "BackpropFilter" in node.type else inputs[1].shape
    if result is None or filters is None or len(result) != rank or len(filters) != rank:
        return None
    pixels, patch, channels = math.prod(result[1:-1]), math.prod(filters[:-1]), filters[-1]
    element = element_bytes(node.outputs[0].dtype)
    work = pixels * patch + patch * channels + pixels * channels
    return Patches(work, pixels * patch * element, element) if work else None


def batch_norm(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies with the channels last, and products of 16-bit gradients in float32."""
    size, dtype = (inputs[0].bytes or 0, inputs[0].dtype) if inputs else (0, "")
    is_first = node.attributes.get("data_format") in (b"NCHW", "NCHW")
    copies = (3 if "Grad" in node.type else 2) * is_first
    products = (2 * size,) if "Grad" in node.type and dtype in _HALVES else ()
    return (*(size,) * copies, *products)


def pooling_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """The recomputed maxima: pooled values, and a 64-bit index for each (maxpooling_op.cc)."""
    if len(inputs) < 2 or inputs[1].shape is None:
        return ()
    return inputs[1].bytes or 0, 8 * math.prod(inputs[1].shape)


def depthwise_filter(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """The gradient of each sample, before their sum (depthwise_conv_grad_op.cc)."""
    if not inputs or inputs[0].shape is None:
        return ()
    return (inputs[0].shape[0] * (node.outputs[0].bytes or 0),)


def converted_product(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Sums in float32 of a product whose dtype oneDNN converts (matmul/gemm_based_common.hpp).

    Each thread has the rows of one matrix that are its share, and one thread must be able to compute all.
    """
    result = node.outputs[0]
    if result.dtype not in _cpu(kernels).converted or not result.shape or not result.bytes:
        return ()
    return (_sums(result.bytes // element_bytes(result.dtype), result.shape[-2:], _cpu(kernels).intra_op_threads),)


def _sums(elements: int, matrix: Sequence[int], threads: int) -> int:
    """Return the bytes of the threads' sums.

    Args:
        elements: elements of all matrices of the result.
        matrix: rows and columns.
        threads: number of threads.
    """
    whole, columns, share = math.prod(matrix), matrix[-1], -(-elements // threads)
    rows = share - share % columns if share >= columns else share
    of_one_thread = -(-min(whole, rows) // _ALIGNED) * _ALIGNED
    return 4 * max(-(-whole // _ALIGNED) * _ALIGNED, threads * of_one_thread) + _SCRATCHPAD


def converted_convolution(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Sums in float32 of a pointwise convolution (jit_avx512_core_bf16_1x1_conv_kernel.cpp).

    Each thread has the sums of one sample, and of a strided convolution also the sample's pixels.
    """
    result, source, filters = node.outputs[0], inputs[0].shape, inputs[1].shape
    if result.dtype not in _cpu(kernels).converted or not (result.shape and source and filters):
        return ()
    if math.prod(filters[:-2]) != 1:
        return ()
    pixels = math.prod(result.shape[1:-1])
    sums = -(-pixels // _PIXELS) * _PIXELS * -(-filters[-1] // _CHANNELS) * _CHANNELS
    strided = pixels * filters[-2] if result.shape[1:-1] != source[1:-1] else 0
    return (_cpu(kernels).intra_op_threads * (4 * sums + 2 * strided) + _SCRATCHPAD,)


def _cpu(kernels: Kernels) -> CpuKernels:
    return kernels.beside if isinstance(kernels, CardKernels) else kernels


FUNCTIONS: dict[str, Scratch] = {
    function.__name__: function
    for function in (
        reduction, contraction, mirror_gradient, product, filter_gradient, input_gradient, volume_gradient,
        pooling_gradient, batch_norm, depthwise_filter, converted_product, converted_convolution,
    )
}  # fmt: skip
