"""What single operations ask of the allocator, on both kinds of CPU kernels, against the rules."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import onednn
import pytest
from tensorflow.python.framework import dtypes
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from kerasmem.devices.kernels import EIGEN, ONEDNN, CpuKernels, cpu_flags
from kerasmem.estimation.graph.program import Node, Tensor
from kerasmem.estimation.graph.rules import KINDS, needs
from kerasmem.models.sizes import element_bytes

pytestmark = pytest.mark.usefixtures("loaded_python")

PROGRAM = Path(__file__).parents[1] / "support" / "single_ops.py"
# oneDNN asks for a little scratch of its own, and threads of a depthwise convolution for a row of the filter each.
LITTLE = 160 << 10


def tensor(shape, dtype):
    return Tensor(tuple(shape), dtype, math.prod(shape) * element_bytes(dtype))


def expected(operation, kernels):
    """The requests of an operation by the rules: its output, and what it needs while it runs."""
    attributes = {name: operation[name] for name in ("axes", "equation")}
    node = Node("one", operation["type"], (), (), (tensor(operation["output"], operation["dtype"]),), attributes)
    inputs = tuple(tensor(*each) for each in operation["inputs"])
    return [node.outputs[0].bytes, *(size for size in needs(node, inputs, kernels) if size)]


# By the value of ONEDNN_MAX_CPU_ISA, the feature of a CPU that can use it. Without AVX-512, only float32 can run.
INSTRUCTIONS = {
    "AVX2": "avx2",
    "AVX512_CORE": "avx512f",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_FP16": "avx512_fp16",
    "AVX512_CORE_AMX": "amx_bf16",
}
ALLOWED = [name for name, feature in INSTRUCTIONS.items() if feature in cpu_flags()]


@pytest.mark.parametrize(
    ("kind", "seed", "threads", "instructions"),
    [
        (EIGEN, 1, 5, ""),
        pytest.param(ONEDNN, 1, 2, "", marks=onednn.needed),
        *(pytest.param(ONEDNN, 2, 2, name, marks=onednn.needed) for name in ALLOWED),
    ],
)
def test_requests_of_single_operations(program, kind, seed, threads, instructions):
    environment = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": str(int(kind == ONEDNN))}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1", "ONEDNN_MAX_CPU_ISA": instructions}
    dtypes = {"AVX2": ["float32"], "": []}.get(instructions, ["float32,bfloat16"])
    done = program(PROGRAM, seed, threads, *dtypes, env=environment)
    assert done.code == 0, done.err[-2000:]
    printed = json.loads(done.out.splitlines()[-1])
    kernels = CpuKernels(
        **{name: tuple(is_) if isinstance(is_, list) else is_ for name, is_ in printed["kernels"].items()}
    )
    assert (kernels.kind, kernels.intra_op_threads) == (kind, threads)
    kinds = Counter(each["type"] for each in printed["operations"])
    assert min(kinds.values()) >= 3
    differing = []
    for each in printed["operations"]:
        if each["type"] == "MaxPoolGrad" and each["dtype"] in kernels.dtypes:
            continue  # alone it has no note of where each maximum was, which oneDNN's pooling hands it in a step
        by_rule, asked = expected(each, kernels), each["requests"]
        if each["dtype"] in kernels.copied and each["type"] in ("MatMul", "BatchMatMulV2", "Conv2D"):
            assert set(by_rule) <= set(each["requests"])  # and copies, which have no rule
            continue
        large = [[size for size in sizes if size > LITTLE] for sizes in (sorted(by_rule), asked)]
        if large[0] != large[1] or abs(sum(by_rule) - sum(asked)) > LITTLE:
            differing.append((each, by_rule))
    assert not differing, differing


def registered(type_name):
    """The dtypes that TensorFlow registered a kernel of oneDNN's for in an operation's place."""
    names = (f"{prefix}{type_name.lstrip('_')}" for prefix in ("_Mkl", "_MklNative"))
    constraints = (
        each for name in names for kernel in get_registered_kernels_for_op(name).kernel for each in kernel.constraint
    )
    values = (each.allowed_values.list.type for each in constraints if each.name == "T")
    return {dtypes.as_dtype(value).name for each in values for value in each}


@pytest.mark.skipif(not registered("MatMul"), reason="TensorFlow was built without oneDNN")
@pytest.mark.parametrize("type_name", KINDS[ONEDNN]["rewritten"])
def test_onednn_has_the_kernels_that_tensorflow_registers(type_name):
    lacks = KINDS[ONEDNN]["lacks"]
    listed = {dtype for dtype in ("float32", "bfloat16", "float16") if type_name not in lacks.get(dtype, ())}
    assert registered(type_name) & {"float32", "bfloat16", "float16"} == listed


@pytest.mark.parametrize(("dtype", "copies"), [("float32", 0), ("bfloat16", 0), ("float16", 2)])
def test_gradient_without_onednn_kernel_needs_eigens_scratch(dtype, copies):
    kernels = CpuKernels(ONEDNN, ("float32", "bfloat16", "float16"))
    images = tensor((8, 32, 32, 16), dtype)
    node = Node("one", "FusedBatchNormGradV3", (), (), (images,), {})
    assert sum(needs(node, (images, images), kernels)) == copies * images.bytes


def gradient(type_name, images, filters, results):
    node = Node("one", type_name, (), (), (images if "Input" in type_name else filters,), {})
    return node, (tensor((len(images.shape),), "int32") if "Input" in type_name else images, filters, results)


@pytest.mark.parametrize(("cache_mib", "samples"), [(2, 5), (36, 78), (48, 103)])
def test_gradient_of_volumes_takes_the_samples_that_fit_the_cache(cache_mib, samples):
    volumes, filters = tensor((64, 8, 8, 8, 8), "float32"), tensor((3, 3, 3, 8, 16), "float32")
    node, inputs = gradient("Conv3DBackpropInputV2", volumes, filters, tensor((64, 8, 8, 8, 16), "float32"))
    assert needs(node, inputs, CpuKernels(EIGEN, cache_bytes=cache_mib << 20)) == (samples * 8**3 * 27 * 8 * 4,)


@pytest.mark.parametrize(("threads", "samples"), [(1, 1), (2, 1), (3, 48)])
def test_gradient_of_images_depends_on_the_number_of_threads(threads, samples):
    images, filters = tensor((16, 32, 32, 16), "float32"), tensor((3, 3, 16, 16), "float32")
    node, inputs = gradient("Conv2DBackpropInput", images, filters, tensor((16, 32, 32, 16), "float32"))
    assert needs(node, inputs, CpuKernels(EIGEN, (), 2, threads)) == (samples * 32**2 * 144 * 4,)
