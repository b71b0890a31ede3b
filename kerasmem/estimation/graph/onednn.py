"""The scratch of oneDNN's kernels. Most of them need next to none.

Where a batch is one image, TensorFlow hands the filter over as it is (mkl_conv_ops.cc). On a CPU without AVX-512 oneDNN
has no other kernel for that than a product of matrices, which works on copies (cpu/gemm_convolution_utils.cpp of
oneDNN 3.7). Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kerasmem.devices.kernels import AVX512_BYTES
from kerasmem.estimation.graph.program import Node
from kerasmem.estimation.graph.scratch import Cores, Inputs, Need, Scratch

_FLOAT = 4
_ALIGNED = 128  # bytes that each of its buffers gets more
_EVEN = 0.9  # from this share of the threads' time on, work counts as well divided
_ROWS = 4  # of these the rows of a piece are a multiple
_LIMIT, _LIMIT_IN_TENSORS = 1 << 30, 15  # bytes, and times what the convolution works on for each thread


def single_image(node: Node, inputs: Inputs, cores: Cores) -> tuple[Need, ...]:
    """Each thread's patches, and its transposed copy of the image."""
    made = node.outputs[0]
    given, kernel, result = inputs[0].shape, inputs[1].shape, made.shape
    is_first = node.attributes.get("data_format") in (b"NCHW", "NCHW")
    if cores.vector >= AVX512_BYTES or made.dtype != "float32" or is_first:
        return ()
    if given is None or kernel is None or result is None or given[0] != 1:
        return ()
    sizes, places, window = given[1:3], result[1:3], kernel[:2]
    if kernel[2] != given[3]:  # in groups
        return ()
    patch, threads = math.prod(kernel[:3]), 1
    patches = 0 if sizes == places and window == (1, 1) else patch * math.prod(places)
    is_dense = set(node.attributes.get("dilations") or (1,)) == {1}
    if patches and is_dense and math.prod(kernel) < cores.private_cache // _FLOAT // 2:
        piece = _piece(sizes[1], places, kernel, cores)
        if piece is not None:
            patches, threads = patch * piece, cores.threads
    size = _FLOAT * threads * (patches + math.prod(given)) + _ALIGNED * (1 + bool(patches))
    limit = _LIMIT_IN_TENSORS * cores.threads * sum(each.bytes or 0 for each in (*inputs[:2], made))
    return () if size > min(_LIMIT, limit) else (Need(size),)


def _piece(width: int, places: tuple[int, ...], kernel: Sequence[int], cores: Cores) -> int | None:
    """Return how many places of the result a thread works on at a time; None where the threads share each product."""
    rows, columns = places
    patch, (channels, filters) = math.prod(kernel[:3]), kernel[2:]
    numbers, lanes = cores.private_cache // _FLOAT, cores.vector // _FLOAT
    # What a row and a column take, by which oneDNN chooses how many of them fit into its cache.
    beside = channels * width + filters * columns
    row = _FLOAT * (5 * (patch * columns + 2 * beside) + beside)
    column = _FLOAT * (patch + 2 * (channels + filters))
    high, wide = min(max(1, -(-numbers // row)), rows), columns
    if high == 1:
        wide = min(max(1, -(-numbers // column)), columns)
    high = high if high == rows else max(1, high // _ROWS * _ROWS)
    wide = wide if wide == columns else max(1, wide // lanes * lanes)
    share = 0.0
    if wide == columns:
        for size in _smaller(high, _ROWS):
            high, share = size, _share(-(-rows // size), rows, size, cores.threads)
            if share >= _EVEN:
                break
    if share < _EVEN:
        high = 1
        for size in _smaller(wide, lanes):
            wide, share = size, _share(rows * -(-columns // size), columns, size, cores.threads)
            if share > _EVEN:
                break
        else:
            wide = 1
    products = -(-rows * columns // lanes) * -(-filters // lanes)
    if share < products / _up(products, cores.threads) / 2:
        return None
    return high * (wide if high == 1 else columns)


def _smaller(size: int, step: int) -> Iterator[int]:
    while size > 0:
        yield size
        size = (size - step) // step * step


def _share(pieces: int, whole: int, piece: int, threads: int) -> float:
    """Return how well pieces are divided among threads, and how full they are."""
    return (pieces / _up(pieces, threads) + whole / _up(whole, piece)) / 2


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


ONEDNN_FUNCTIONS: dict[str, Scratch] = {single_image.__name__: single_image}
