"""XLA's plan for a card that is not there: the card's description, XLA's texts, the arithmetic; with JAX, the whole."""

from __future__ import annotations

import importlib.machinery
import re
from dataclasses import replace

import pytest

from kerasmem.devices.catalogue import all_cards, find_card, hardware_of
from kerasmem.errors import MissingExtraError, UsageError
from kerasmem.estimation import gpu_target
from kerasmem.estimation.gpu_target import gpu_target_outcome, gpu_target_plan
from kerasmem.estimation.report import Bytes
from kerasmem.estimation.xla import bytes_in_use, dumped_plan
from kerasmem.estimation.xla_plan import HOPPER, CompiledStep, JaxNames, XlaPlan, product_bytes, read_plan
from kerasmem.models.op_names import Origin
from kerasmem.models.spec import StepSpec
from kerasmem.processes.children import Limits
from kerasmem.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("loaded_python")

A100, T4, H100 = find_card("a100-80"), find_card("t4"), find_card("h100-sxm")
JAX_IS_MISSING = gpu_target.missing_parts()
needs_jax = pytest.mark.skipif(JAX_IS_MISSING, reason="needs pip install 'kerasmem[gpu-targets]'")


# Cards


def test_every_card_from_volta_on_is_described():
    assert all((hardware_of(card) is not None) == (card.compute_capability >= (7, 0)) for card in all_cards())


def field(text, name):
    found = re.findall(rf"\b{name}: (\S+)", text)
    assert len(found) == 1, (name, found)
    return found[0]


def test_a_target_has_the_cards_figures():
    text = gpu_target.target_text(A100)
    assert int(field(text, "device_memory_size")) == A100.memory_bytes
    assert field(text, "core_count") == "108"
    assert field(text, "shared_memory_per_block_optin") == "166912"
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert text.count("{") == text.count("}")
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in gpu_target.target_text(H100)


# The plan in XLA's protocol


def varint(number):
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def message(*fields):
    """Serialise (number, value) pairs: an int, a text, or the bytes of a message inside."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(varint(number << 3 | 2) + varint(len(data)) + data)
    return b"".join(parts)


F32, U8 = 11, 6


def shape(kind, *sizes):
    return message((2, kind), (3, b"".join(map(varint, sizes))))


def instruction(number, name, made, *, opcode="", operation="", target="", operands=(), calls=()):
    return message(
        (1, name), (2, opcode), (3, made), (7, message((2, operation))), (28, target), (35, number),
        (36, b"".join(map(varint, operands))), *((38, called) for called in calls),
    )  # fmt: skip


def module(remat=""):
    def convolution(number, scratch):
        made = message((4, shape(F32, 8, 32, 112, 112)), (4, shape(U8, scratch)))
        operation = f"jit(train_step)/jvp(conv{number})/conv"
        target = "__cudnn$convForward"
        return instruction(
            10 + number, f"cudnn-conv.{number}", made, operation=operation, target=target, operands=(2, 3)
        )

    fused = message((5, 7), (2, instruction(1, "mul", shape(F32, 8), operation="jit(step)/transpose(jvp(conv1))/mul")))
    main = message(
        (5, 8),
        (2, instruction(2, "image", shape(F32, 8, 3, 225, 225))),
        (2, instruction(3, "kernel", shape(F32, 32, 3, 3, 3))),
        (2, convolution(1, 0)),
        (2, convolution(2, 4096)),
        (2, instruction(20, f"copy.1{remat}", shape(F32, 8), operands=(11,))),
        (2, instruction(21, "fusion.3", shape(F32, 8), calls=(7,))),
    )
    return message((3, fused), (3, main))


def buffer(number, size, maker):
    return message((1, number), (2, size), (3, message((4, maker))))


ALLOCATE, FREE = 0, 1


def proto(**options):
    events = ((ALLOCATE, 1), (ALLOCATE, 2), (FREE, 1), (ALLOCATE, 3), (FREE, 2), (FREE, 3))
    trace = message(*((1, message((1, kind), (2, number))) for kind, number in events))
    buffers = ((1, buffer(1, 1000, 11)), (1, buffer(2, 500, 20)), (1, buffer(3, 700, 21)))
    allocations = (
        message((2, 1024), (5, 1)),
        message((2, 128), (5, 1), (7, 1)),  # an argument that the result replaces
        message((2, 4), (7, 1)),
        message((2, 12), (7, 1)),
        message((2, 4), (12, 1)),  # constant
        message((2, 4), (3, 1)),  # thread-local
        message((2, 2304)),
    )
    assignment = message(*buffers, *((3, entry) for entry in allocations), (4, trace), (4, message()))
    return message((1, module(**options)), (3, assignment))


def test_the_bytes_of_a_plan_are_those_of_its_buffers():
    plan = read_plan(proto())
    assert (plan.argument, plan.results, plan.temporary) == (1152, (4, 12), 2304)
    assert (plan.requested, plan.total) == (2320, 3472)
    assert not plan.is_recomputed and read_plan(proto(remat=".remat2")).is_recomputed


def test_live_buffers_have_their_operations():
    plan = read_plan(proto())
    first = "jit(train_step)/jvp(conv1)/conv"
    assert sorted(plan.live) == [(500, first), (1000, first)]  # a copy counts as what it copies
    assert plan.at == first
    assert read_plan(message((1, module()), (3, message()))).at is None


def test_fusion_has_the_operation_of_its_last_instruction():
    events = message(*((1, message((1, ALLOCATE), (2, 3))),))
    plan = read_plan(message((1, module()), (3, message((1, buffer(3, 700, 21)), (4, events)))))
    assert plan.live == ((700, "jit(step)/transpose(jvp(conv1))/mul"),)


def test_a_convolution_without_workspace_counts_with_all_its_tensors():
    (convolution,) = read_plan(proto()).convolutions  # the other has its workspace in the plan
    size = 4 * (8 * 3 * 225 * 225 + 32 * 3 * 3 * 3 + 8 * 32 * 112 * 112)
    assert convolution == (size, "jit(train_step)/jvp(conv1)/conv")


def test_triton_product_counts_tensors_without_a_buffer():
    def product(number, *after):
        """Transposed columns times rows, and what follows."""
        return message(
            (5, number),
            (2, instruction(1, "columns", shape(F32, 8, 16), opcode="parameter")),
            (2, instruction(2, "rows", shape(F32, 32, 16), opcode="parameter")),
            (2, instruction(3, "transpose", shape(F32, 16, 8), opcode="transpose", operands=(1,))),
            (2, instruction(4, "as_matrix", shape(F32, 16, 8), opcode="bitcast", operands=(3,))),
            (2, instruction(5, "dot", shape(F32, 8, 32), opcode="dot", operands=(4, 2))),
            *((2, entry) for entry in after),
        )

    view = instruction(6, "view", shape(F32, 256), opcode="bitcast", operands=(5,))
    bias = instruction(6, "bias", shape(F32, 8, 32), opcode="add", operands=(5,))
    cublas = message((5, 10), (2, instruction(1, "gemm", shape(F32, 8, 32), target="__cublas$lt$matmul")))
    parts = (product(7), product(8, view), product(9, bias), cublas)
    plan = read_plan(message((1, message(*((3, part) for part in parts))), (3, message())))
    transposed, result = 4 * 16 * 8, 4 * 8 * 32
    assert plan.products == (transposed, transposed, transposed + result, 0)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("jit(train_step)/jvp(conv1)/jit(relu6)/min", Origin("conv1", "forward")),
        ("jit(train_step)/transpose(jvp(encoder))/dense/dot_general", Origin("encoder/dense", "backward")),
        ("jit(train_step)/transpose(jvp(encoder))/dense", Origin("encoder", "backward")),  # itself no layer
        ("jit(train_step)/jvp(encoder)/jit(dense)/mul", Origin("encoder", "forward")),  # nor a function of JAX's
        ("jit(train_step)/adam_1/sub", Origin(None, "optimizer")),
        ("jit(train_step)/adamant/sub", Origin(None, "forward")),
        ("copy.5", Origin(None, "forward")),
    ],
)
def test_jax_names_origin(operation, expected):
    assert JaxNames({"conv1", "encoder", "dense"}, "adam").origin(operation) == expected


def test_layers_inside_a_row_count_as_the_row():
    names = JaxNames({"attention", "query", "stranger"}, "adam", {"attention"})
    instant = names.instant("jit(train_step)/transpose(jvp(attention))/query/dot")
    assert (instant.layer, instant.text) == ("attention", "while computing the gradient of attention")
    assert names.instant("jit(train_step)/jvp(stranger)/mul").text == "while computing mul"


def test_a_dump_is_read_once_xla_has_written_it_whole(tmp_path):
    path, whole = tmp_path / "module_0001.jit_step.sm_8.0_gpu_after_optimizations.hlo.pb", proto()
    (tmp_path / "module_0001.jit_step.sm_8.0_gpu_after_optimizations-memory-usage-report.pb").write_bytes(b"")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert dumped_plan(tmp_path) is None  # the rest is still being written
    path.write_bytes(whole)
    assert dumped_plan(tmp_path) == read_plan(whole)


# Arithmetic

ARGUMENTS = {
    "trainable": (4 * MIB, 2 * MIB), "non_trainable": (1024,), "optimizer": (4 * MIB, 2 * MIB, 8),
    "metrics": (4, 4), "inputs": (3 * MIB,),
}  # fmt: skip
WEIGHTS = {"trainable": [(4 * MIB, "conv"), (2 * MIB, "attention")], "non_trainable": [(1024, "conv")]}


def one_plan(temporary, *, argument=0, results=(), **options):
    return XlaPlan(argument=argument, results=results, temporary=temporary, **options)


def compiled(*plans, arguments=None, **options):
    arguments = {"trainable": (40, 60), "inputs": (7,)} if arguments is None else arguments
    layers = ("conv", "attention", "query", "stranger")
    return CompiledStep(plans=plans, arguments=arguments, layers=layers, optimizer="adam", **options)


def outcome(step, rows=("image", "conv", "attention"), weights=WEIGHTS):
    return gpu_target_outcome(step, A100, rows, weights)


def test_the_total_is_the_plan_that_xla_makes_by_itself():
    step = compiled(one_plan(1000, argument=100, results=(10,)), one_plan(900, argument=100, results=(10,)))
    answer = outcome(step)
    # three arguments, results and temporary buffers, each rounded up to 256
    assert (answer.pool.requested, answer.total) == (1110, 4 * 256 + 1024)
    assert (answer.low, answer.high) == (1010, MIB)  # the smallest limit, in whole MiB
    assert {entry.what: entry.bytes for entry in answer.unmodelled} == {
        "CUDA context and libraries": None, "autotuning": None, "prefetched batches": 7,
    }  # fmt: skip
    assert not any("workspace" in note for note in answer.notes)


def test_the_workspace_of_the_largest_convolution_widens_the_interval_upwards():
    answer = outcome(compiled(one_plan(MIB, convolutions=((30 * MIB, "small"), (50 * MIB, "large")))))
    assert (answer.low, answer.high) == (MIB, answer.total + 50 * MIB)
    assert "large" in answer.notes[-1]
    assert gpu_target.workspace_bytes(one_plan(0, convolutions=((9 * GIB, "huge"),))) == 4 * GIB


def test_a_recurrent_layer_that_cudnn_runs_on_jax_is_named():
    import keras

    inputs, encoder = keras.Input((4, 3)), keras.layers.LSTM(2, name="encoder")
    model = keras.Sequential([inputs, keras.layers.Bidirectional(encoder)])
    (note,) = gpu_target.recurrent_notes(model)
    assert "encoder is planned as a loop" in note
    assert not list(gpu_target.recurrent_notes(keras.Sequential([inputs, keras.layers.SimpleRNN(2)])))


@pytest.mark.parametrize(
    ("plans", "arguments", "inside", "peak"),
    [  # of vision_transformer and mixer in scripts/bench/results/gpu.json
        ((647_892_164, 660_501_236), 29_168_520, 18_874_368, 700_935_168),
        ((736_951_788, 720_359_404), 18_510_984, 20_971_520, 774_719_488),
    ],
)
def test_products_that_a_card_runs_in_cublas_are_in_the_interval(plans, arguments, inside, peak):
    triton, cublas = (one_plan(total - arguments, argument=arguments) for total in plans)
    step = compiled(
        replace(triton, products=(0, inside)), replace(cublas, products=(0, 0)), arguments={"trainable": (arguments,)}
    )
    answer = gpu_target_outcome(step, H100)
    assert answer.total < peak <= answer.high
    assert product_bytes(step.plans, (8, 0)) == inside + 4 * MIB
    assert product_bytes((one_plan(1),), HOPPER) == 0


def test_a_growing_allocator_of_jax_hands_out_larger_chunks():
    arguments = {
        "trainable": (3456, 64, 55_296, 128, 1280, 40), "metrics": (4, 4), "inputs": (16 * MIB, 5120),
        "optimizer": (4, 4, *(size for size in (3456, 64, 55_296, 128, 1280, 40) for _ in range(2))),
    }  # fmt: skip
    conv3d = one_plan(429_670_192, argument=16_963_144, results=(188,))  # as planned by an H100
    step = compiled(conv3d, arguments=arguments)
    assert bytes_in_use(step, conv3d, grows=True) == pytest.approx(553_838_080, rel=1e-5)  # peak of its steps
    assert bytes_in_use(step, conv3d, grows=False) == pytest.approx(conv3d.total, rel=1e-4)


def test_recomputation_is_noted_with_its_saving():
    squeezed = one_plan(1000, is_recomputed=True)
    answer = outcome(compiled(squeezed, unlimited=(one_plan(1500 * MIB),), notes=("assumed",)))
    assert answer.pool.requested == 1000 < 1500 * MIB < answer.high <= 1502 * MIB
    assert any("recomputes" in note and f"{1500 * MIB:,} B" in note for note in answer.notes)
    assert answer.notes[-1] == "assumed"
    assert not any("recomputes" in note for note in outcome(compiled(one_plan(1))).notes)


LIVE = (
    (20 * MIB, "jit(train_step)/jvp(conv)/conv"),
    (8 * MIB, "jit(train_step)/transpose(jvp(attention))/query/dot"),
    (2 * MIB, "jit(train_step)/adam/mul"),
    (MIB, "jit(train_step)/jvp(stranger)/mul"),
)


def at_peak():
    return compiled(one_plan(36 * MIB, live=LIVE, at=LIVE[1][1]), arguments=ARGUMENTS)


def categories(need):
    return {name: getattr(need, name) for name in Bytes.CATEGORIES}


def test_categories_add_up_to_the_total():
    answer = outcome(at_peak())
    assert (answer.method, answer.execution) == ("gpu-target", "xla")
    assert sum(categories(answer).values()) == answer.total == answer.pool.in_use
    assert categories(answer) == {
        "weights": 6 * MIB + 1024 + 8, "optimizer": 6 * MIB + 8, "inputs": 3 * MIB, "activations": 21 * MIB,
        "gradients": 8 * MIB, "workspace": (2 + 36 - 31) * MIB, "allocator": answer.allocator,
    }  # fmt: skip
    assert answer.allocator >= 0
    assert answer.layers == {"conv": 24 * MIB + 1024, "attention": 10 * MIB}
    assert answer.instant.layer == "attention"


def test_weights_of_another_model_are_not_shared_out():
    answer = outcome(at_peak(), weights={"trainable": [(5, "conv"), (7, "attention")]})
    assert answer.layers == {"conv": 20 * MIB, "attention": 8 * MIB}


def test_inference_returns_more_than_it_is_lent():
    arguments = {"trainable": (4 * MIB,), "inputs": (MIB,)}
    answer = outcome(compiled(one_plan(30 * MIB, argument=5 * MIB, results=(2 * MIB,)), arguments=arguments))
    assert answer.optimizer == 0
    assert answer.pool.requested == 37 * MIB
    assert sum(categories(answer).values()) == answer.total


# The parent


def test_gpu_target_plan_passes_the_card_to_the_child(monkeypatch):
    asked, step = {}, compiled(one_plan(5))

    def run_child(function, request, target, has_triton, folder, **options):
        asked.update(function=function, target=target, has_triton=has_triton, **options)
        return step

    monkeypatch.setattr(gpu_target, "run_child", run_child)
    monkeypatch.setattr(gpu_target, "missing_parts", lambda: False)
    assert gpu_target_plan(StepSpec("m.keras"), T4, timeout=9) is step
    assert asked["function"] is gpu_target.compile_request
    assert asked["limits"] == Limits(9, 8 * GIB)
    assert (asked["environ"]["KERAS_BACKEND"], asked["environ"]["JAX_PLATFORMS"]) == ("jax", "cpu")
    assert asked["target"] == gpu_target.target_text(T4)
    assert asked["has_triton"] is False  # Turing
    gpu_target_plan(StepSpec("m.keras"), A100)
    assert asked["has_triton"] is True


def test_missing_packages_and_unknown_cards_are_named(monkeypatch):
    monkeypatch.setattr(gpu_target, "missing_parts", lambda: True)
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[gpu-targets\]'"):
        gpu_target_plan(StepSpec("m.keras"), T4)
    with pytest.raises(UsageError, match="K80"):
        gpu_target_plan(StepSpec("m.keras"), find_card("k80"))


def test_missing_ptxas_is_named(monkeypatch):
    monkeypatch.setattr(gpu_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ptxas .*kerasmem\[gpu-targets\]"):
        gpu_target.cuda_folder()


def test_the_extras_ptxas_is_preferred_to_that_of_jax(monkeypatch, tmp_path):
    known = {}
    monkeypatch.setattr(gpu_target.importlib.util, "find_spec", known.get)
    for package, name in (("nvidia.cu13", "jax"), ("nvidia.cuda_nvcc", "extra")):
        known[package] = importlib.machinery.ModuleSpec(package, None, is_package=True)
        known[package].submodule_search_locations.append(str(tmp_path / name))
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "ptxas").write_text("")
        assert gpu_target.cuda_folder() == str(tmp_path / name)


# The whole, with JAX

MODELS = """
import keras
from keras import layers

def dense(width=64, accumulate=None):
    model = keras.Sequential([keras.Input((32,)), layers.Dense(width, name="hidden", activation="relu"),
                              layers.Dropout(0.5), layers.Dense(10)])
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=accumulate),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    (tmp_path / "target_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def planned(function, card=A100, batch=64, **options):
        return gpu_target_plan(StepSpec(f"target_models:{function}", batch_size=batch, **options), card)

    return planned


@needs_jax
@pytest.mark.slow
def test_a_plan_has_the_models_bytes(planned):
    found = planned("dense")
    weights = 4 * (32 * 64 + 64 + 64 * 10 + 10)
    assert sum(found.arguments["trainable"]) == weights
    assert sum(found.arguments["optimizer"]) == 2 * weights + 8  # moments, iteration, learning rate
    assert sum(found.arguments["inputs"]) == 64 * 32 * 4 + 64 * 4
    known = sum(sum(sizes) for sizes in found.arguments.values())
    assert known <= found.likely.argument <= known + 512 * sum(map(len, found.arguments.values()))
    assert sum(found.likely.results) < weights  # the state is given up
    assert len(found.plans) == 2 and not found.unlimited  # with Triton and without
    assert found.likely.live and found.likely.at
    assert planned("dense", batch=4096).likely.temporary > found.likely.temporary


@needs_jax
@pytest.mark.slow
def test_settings_reach_the_step(planned):
    plain, accumulated = planned("dense"), planned("dense", factory_args={"accumulate": 4})
    weights = sum(plain.arguments["trainable"])
    assert sum(accumulated.arguments["optimizer"]) == sum(plain.arguments["optimizer"]) + weights
    scaled = planned("dense", card=H100, dtype_policy="mixed_float16")
    extra = len(scaled.arguments["optimizer"]) - len(plain.arguments["optimizer"])
    assert extra == 4  # the optimizer around it: its scale and step, its own iteration and learning rate
    assert sum(scaled.arguments["optimizer"]) == sum(plain.arguments["optimizer"]) + 4 * extra
    replaced = planned("dense", card=T4, optimizer="sgd")
    assert sum(replaced.arguments["optimizer"]) < weights
    assert len(replaced.plans) == 1  # no Triton on Turing
    forward = planned("dense", mode="inference")
    assert set(forward.arguments) == {"trainable", "non_trainable", "inputs"}
    assert sum(forward.likely.results) == 64 * 10 * 4
    evaluated = planned("dense", mode="evaluate")
    assert set(evaluated.arguments) == {"trainable", "non_trainable", "metrics", "inputs"}
    assert evaluated.likely.total < plain.likely.total
