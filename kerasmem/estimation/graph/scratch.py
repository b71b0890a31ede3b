"""The scratch that kernels need while they run, as bytes of each buffer. Pure arithmetic.

`data/kernels.json` names the function of each operation, by kind of kernel. Sources: the kernels' calls of
`allocate_temp` and `forward_input_or_allocate_temp` in tensorflow/core/kernels, compared with the requests of single
operations to the allocator (`tests/estimation/test_kernel_scratch.py`). Eigen's own memory inside a product or a
convolution comes from the C library, not from TensorFlow's allocator, and is not part of a step's figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kerasmem.devices.kernels import CardKernels, CpuKernels, last_cache_bytes
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.models.sizes import element_bytes

Inputs = tuple[Tensor, ...]
Kernels = CpuKernels | CardKernels
Scratch = Callable[[Node, Inputs, Kernels], tuple[int, ...]]

_HALVES = ("float16", "bfloat16")
AXES = "axes"  # the attribute with the axes of a reduction


def reduction(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """A reduction over axes that do not lie together is done on a transposed copy (reduction_ops_common.h)."""
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
    """An Einsum copies operands, and its product, whose axes are not in the order of a matrix product.

    It also sums over axes that one operand alone has (einsum_op_impl.h). Equations with dots, and copies of the
    diagonal of an operand that has an axis twice, are left out.
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


def mirrored(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """The gradient of a mirrored border is added to a copy of the input (mirror_pad_op.cc)."""
    return (inputs[0].bytes or 0,) if inputs else ()


def product(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Factors are copied to the dtype of the result; 16-bit ones, and the result, to float32 (matmul_op_impl.h)."""
    if not node.outputs:
        return ()
    result = node.outputs[0]
    if result.dtype in _HALVES:
        return tuple(2 * (tensor.bytes or 0) for tensor in (*inputs[:2], result))
    others = (tensor for tensor in inputs[:2] if tensor.dtype != result.dtype)
    return tuple((tensor.bytes or 0) // element_bytes(tensor.dtype) * element_bytes(result.dtype) for tensor in others)


# A convolution's gradient works on patches: a copy of the filter's input for every pixel of the result. It takes as
# many samples at a time as keep patches, filter and result within this, for any batch.
_WORKING_SET = 30 << 20
# From this much work for each thread on, a sample at a time is divided among the threads, in the gradient of the input.
_DIVIDED = 256 << 10
# Of volumes, patches that would take this many times the operation's tensors are not made.
_MOST_OVERHEAD = 25


class Patches(NamedTuple):
    """The work on one sample in elements (patches, filter and result), its patches' bytes, bytes of an element."""

    work: int
    bytes: int
    element: int

    def within(self, cache: int) -> int:
        """Return the bytes of the patches of as many samples as a cache holds."""
        return -(-(cache // self.element) // self.work) * self.bytes

    def is_divided(self, threads: int) -> bool:
        """Return whether one sample is enough work for all threads, in the gradient of the input."""
        return self.work // threads >= _DIVIDED // self.element


def filter_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Patches of as many samples as fit into a cache of 30 MiB (conv_grad_filter_ops.cc)."""
    patches = patches_of(node, inputs, 4)
    return () if patches is None else (patches.within(_WORKING_SET),)


def input_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """As for the filter, unless one sample is enough work for all threads: then its patches (conv_grad_input_ops.h)."""
    patches = patches_of(node, inputs, 4)
    if patches is None:
        return ()
    is_alone = (inputs[2].shape or (1,))[0] == 1
    if is_alone or patches.is_divided(_threads(kernels)):
        return (patches.bytes,)
    return (patches.within(_WORKING_SET),)


def volume_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Patches of as many samples as fit into the processor's cache, or none if those are many (conv_grad_ops_3d.cc)."""
    patches = patches_of(node, inputs, 5)
    if patches is None:
        return ()
    is_alone = "BackpropInput" in node.type and (inputs[2].shape or (1,))[0] == 1
    size = patches.bytes if is_alone else patches.within(last_cache_bytes())
    taken = inputs[1:] if "BackpropInput" in node.type else (inputs[0], inputs[2])
    total = sum(tensor.bytes or 0 for tensor in (*taken, *node.outputs))
    return () if size // total > _MOST_OVERHEAD else (size,)


def patches_of(node: Node, inputs: Inputs, rank: int) -> Patches | None:
    """Return the patches of one sample in a convolution's gradient, or None if not of this rank."""
    result = inputs[2].shape if len(inputs) > 2 else None
    filters = node.outputs[0].shape if "BackpropFilter" in node.type else inputs[1].shape
    if result is None or filters is None or len(result) != rank or len(filters) != rank:
        return None
    places, patch, channels = math.prod(result[1:-1]), math.prod(filters[:-1]), filters[-1]
    element = element_bytes(node.outputs[0].dtype)
    work = places * patch + patch * channels + places * channels
    return Patches(work, places * patch * element, element) if work else None


def batch_norm(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Copies with the channels last if they come first, and a 16-bit gradient's products in float32."""
    size, dtype = (inputs[0].bytes or 0, inputs[0].dtype) if inputs else (0, "")
    is_first = node.attributes.get("data_format") in (b"NCHW", "NCHW")
    copies = (3 if "Grad" in node.type else 2) * is_first
    products = (2 * size,) if "Grad" in node.type and dtype in _HALVES else ()
    return (*(size,) * copies, *products)


def pooling_gradient(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """The maxima are computed again: pooled values, and a 64-bit index for each (maxpooling_op.cc)."""
    if len(inputs) < 2 or inputs[1].shape is None:
        return ()
    return inputs[1].bytes or 0, 8 * math.prod(inputs[1].shape)


def depthwise_filter(node: Node, inputs: Inputs, kernels: Kernels) -> tuple[int, ...]:
    """Every sample's gradient is kept before they are summed (depthwise_conv_grad_op.cc)."""
    if not inputs or inputs[0].shape is None:
        return ()
    return (inputs[0].shape[0] * (node.outputs[0].bytes or 0),)


def _threads(kernels: Kernels) -> int:
    """Return how many threads share an operation's work on the CPU."""
    return (kernels.beside if isinstance(kernels, CardKernels) else kernels).intra_op_threads


FUNCTIONS: dict[str, Scratch] = {
    function.__name__: function
    for function in (
        reduction, contraction, mirrored, product, filter_gradient, input_gradient, volume_gradient,
        pooling_gradient, batch_norm, depthwise_filter,
    )
}  # fmt: skip
