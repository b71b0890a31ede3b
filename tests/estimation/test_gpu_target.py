"""XLA's plan for a card that is not there: the card's description, XLA's texts, the arithmetic; with JAX, the whole."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

from kerasmem.devices.cards import all_cards, hardware_of
from kerasmem.devices.catalogue import find_card
from kerasmem.errors import InputError, MissingExtraError, UsageError
from kerasmem.estimation.compiled import hlo
from kerasmem.estimation.compiled.hlo import LiveBuffer
from kerasmem.estimation.compiled.planned import ENVIRONMENT, instant_of
from kerasmem.estimation.gpu_target import plan, worker
from kerasmem.estimation.gpu_target.plan import GpuPlan, Variant, gpu_target_outcome, gpu_target_plan
from kerasmem.models.request import ModelRequest
from kerasmem.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("loaded_python")

A100, T4, H100 = find_card("a100-80"), find_card("t4"), find_card("h100-sxm")
JAX_IS_MISSING = worker.missing_parts()
needs_jax = pytest.mark.skipif(JAX_IS_MISSING, reason="needs pip install 'kerasmem[gpu-targets]'")


# Cards


def test_every_card_from_volta_on_is_described():
    assert all((hardware_of(card) is not None) == (card.compute_capability >= (7, 0)) for card in all_cards())


def field(text, name):
    found = re.findall(rf"\b{name}: (\S+)", text)
    assert len(found) == 1, (name, found)
    return found[0]


def test_a_target_has_the_cards_figures():
    text = plan.target_text(A100)
    assert int(field(text, "device_memory_size")) == A100.memory_bytes
    assert field(text, "core_count") == "108"
    assert field(text, "shared_memory_per_block_optin") == "166912"
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert text.count("{") == text.count("}")
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in plan.target_text(H100)


# XLA's texts

MODULE = """
HloModule jit_train_step, is_scheduled=true
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
}
ENTRY %main (state_0__0_: f32[3,3,3,32]) -> f32[] {
  %image = f32[8,3,225,225]{3,2,1,0} parameter(1), metadata={op_name="data[0]"}
  %kernel = f32[32,3,3,3]{3,2,1,0} parameter(0), metadata={op_name="state[0][0]"}
  %cudnn-conv.1 = (f32[8,32,112,112]{3,2,1,0}, u8[0]{0}) custom-call(%image, %kernel), custom_call_target="__cudnn$convForward", metadata={op_name="jit(train_step)/jvp(conv1)/conv" stack_frame_id=79}
  %cudnn-conv.2 = (f32[8,32,112,112]{3,2,1,0}, u8[4096]{0}) custom-call(%image, %kernel), custom_call_target="__cudnn$convForward", metadata={op_name="jit(train_step)/jvp(conv2)/conv"}
  %get.1 = f32[8,32,112,112]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
  ROOT %loop_fusion.3 = f32[8]{0} fusion(%get.1), kind=kLoop, calls=%fused, metadata={op_name="jit(train_step)/transpose(jvp(conv1))/mul"}
}
"""  # noqa: E501
LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:image
    1:cudnn-conv.1
    2:loop_fusion.3
  BufferLiveRange:
    cudnn-conv.1{0}:1-2
  Live ranges at 2 (peak):
    cudnn-conv.1{0}: 12845056 bytes (cumulative: 12845056 bytes)
    kernel{}: 3456 bytes (cumulative: 12848512 bytes)
  Stack trace breakdown for peak usage: 12 bytes
    other{}: 99 bytes (cumulative: 99 bytes)
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[8,32]{1,0}", 1024), ("bf16[3]", 6), ("pred[5]", 5), ("f32[]", 4), ("s4[3]", 2), ("c64[2]", 16),
        ("f8e4m3fn[7]", 7), ("(f32[2]{0}, u8[0]{0}, /*index=5*/s32[])", 12), ("token[]", 0),
    ],
)  # fmt: skip
def test_bytes_of_a_shape(text, size):
    assert hlo.shape_bytes(text) == size


def test_a_convolution_without_workspace_counts_with_all_its_tensors():
    (found,) = hlo.convolution_bytes(MODULE)  # the other has its workspace in the plan
    assert found == (4 * (8 * 3 * 225 * 225 + 32 * 3 * 3 * 3 + 8 * 32 * 112 * 112), "jit(train_step)/jvp(conv1)/conv")


def test_the_peak_is_read():
    instruction, live = hlo.peak_of(LIVE)
    assert instruction == "loop_fusion.3"
    assert live == (("cudnn-conv.1", 12845056), ("kernel", 3456))
    found = hlo.live_buffers(live, hlo.operation_names(MODULE), {"conv1"}, "adam")
    assert [(each.layer, each.phase) for each in found] == [("conv1", "forward"), (None, None)]
    assert found[1].operation == "state[0][0]"
    assert hlo.peak_of("something else") == (None, ())


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("jit(train_step)/jvp(conv1)/jit(relu6)/min", ("conv1", "forward")),
        ("jit(train_step)/transpose(jvp(encoder))/dense/dot_general", ("encoder/dense", "backward")),
        ("jit(train_step)/transpose(jvp(encoder))/dense", ("encoder", "backward")),  # the operation itself is no layer
        ("jit(train_step)/jvp(encoder)/jit(dense)/mul", ("encoder", "forward")),  # nor is a function of JAX's
        ("jit(train_step)/adam_1/sub", (None, "optimizer")),
        ("jit(train_step)/adamant/sub", (None, "forward")),
        ("state[0][3]", (None, None)),
    ],
)
def test_where_an_operation_comes_from(operation, expected):
    assert hlo.origin(operation, {"conv1", "encoder", "dense"}, "adam") == expected


ASSIGNMENT = """BufferAssignment:
allocation 0: size 1024, parameter 3, shape |f32[8,32]| at ShapeIndex {}:
 value: <9 data.1{} @0> (size=1024,offset=0): f32[8,32]{1,0}
allocation 1: size 128, parameter 0, shape |f32[32]| at ShapeIndex {}, maybe-live-out:
 value: <1 state.1{} @0> (size=128,offset=0): f32[32]{0}
allocation 2: size 4, maybe-live-out:
allocation 3: size 12, output shape is |(f32[32], f32[])|, maybe-live-out:
allocation 4: size 4, constant:
allocation 5: size 4, thread-local:
allocation 6: size 2304, preallocated-temp:
"""


def test_the_plans_bytes_are_read_where_they_add_up():
    usage = "Memory Space: default (color=0)\nTotal bytes: {} (3.4KiB)\n  cumulative_size; size\n"
    found = hlo.assigned_bytes(ASSIGNMENT, usage.format(3480))
    assert found == {"argument": 1152, "output": 144, "alias": 128, "temp": 2304}
    assert hlo.assigned_bytes(ASSIGNMENT, usage.format(3481)) is None  # something was not read
    assert hlo.assigned_bytes("", "") is None


def test_recomputation_is_seen():
    assert not hlo.is_recomputed(MODULE)
    assert hlo.is_recomputed(MODULE.replace("%get.1 =", "%get.remat2 ="))
    assert not hlo.is_recomputed(MODULE.replace("jvp(conv1)", "remat.checkpoint(conv1)"))


# Arithmetic


def variant(limited, triton, argument, output, alias, temp, **options):
    sizes = {"argument": argument, "output": output, "alias": alias, "temp": temp}
    return Variant(limited=limited, triton=triton, **sizes, **options)


def made(variants, **options):
    sizes = {"memory_bytes": A100.memory_bytes, "arguments": {"trainable": (40, 60), "inputs": (7,)}}
    return GpuPlan(card="a100-80", variants=tuple(variants), **{**sizes, **options})


def test_the_total_is_the_plan_that_xla_makes_by_itself():
    found = gpu_target_outcome(made([variant(True, True, 100, 90, 80, 1000), variant(True, False, 100, 90, 80, 900)]))
    # three arguments, what is returned and the rest, each rounded up to 256
    assert (found.pool.requested, found.total, found.low, found.high) == (1110, 4 * 256 + 1024, 1010, 4 * 256 + 1024)
    assert {each.what: each.bytes for each in found.unmodelled} == {
        "CUDA context and libraries": None, "autotuning": None, "prefetched batches": 7,
    }  # fmt: skip
    assert not any("workspace" in note for note in found.notes)


def test_the_workspace_of_the_largest_convolution_widens_the_interval_upwards():
    found = gpu_target_outcome(
        made([variant(True, True, 0, 0, 0, 1000)], convolutions=((300, "small"), (500, "large")))
    )
    assert (found.total, found.low, found.high) == (3 * 256 + 1024, 1000, 3 * 256 + 1024 + 500)
    assert "large" in found.notes[-1]
    assert plan.workspace_bytes(made([], convolutions=((9 * GIB, "huge"),))) == plan.WORKSPACE_LIMIT


def test_recomputation_is_said_with_what_it_saves():
    squeezed = variant(True, True, 0, 0, 0, 1000, recomputed=True)
    found = gpu_target_outcome(made([squeezed, variant(False, True, 0, 0, 0, 1500)], notes=("assumed",)))
    assert (found.pool.requested, found.high) == (1000, 3 * 256 + 1536)
    assert any("recomputes" in note and "1,500 B" in note for note in found.notes)
    assert found.notes[-1] == "assumed"
    plain = gpu_target_outcome(made([variant(True, True, 0, 0, 0, 1)]))
    assert not any("recomputes" in note for note in plain.notes)


ARGUMENTS = {
    "trainable": (4 * MIB, 2 * MIB), "non_trainable": (1024,), "optimizer": (4 * MIB, 2 * MIB, 8),
    "metrics": (4, 4), "inputs": (3 * MIB,),
}  # fmt: skip
GIVEN = sum(map(sum, ARGUMENTS.values()))
STATE = GIVEN - 3 * MIB
LIVE_BUFFERS = (
    LiveBuffer(20 * MIB, "jit(train_step)/jvp(conv)/conv", "conv", "forward"),
    LiveBuffer(8 * MIB, "jit(train_step)/transpose(jvp(attention))/query/dot", "attention/query", "backward"),
    LiveBuffer(4 * MIB, "state[0][0]"),
    LiveBuffer(2 * MIB, "jit(train_step)/adam/mul", None, "optimizer"),
    LiveBuffer(MIB, "jit(train_step)/jvp(stranger)/mul", "stranger", "forward"),
)
INSTANT = instant_of("jit(train_step)/transpose(jvp(attention))/query/dot", "attention/query", "backward")
ROWS = ("image", "conv", "attention")
WEIGHTS = {"trainable": [(4 * MIB, "conv"), (2 * MIB, "attention")], "non_trainable": [(1024, "conv")]}


def peak_variant(temp):
    return variant(True, False, GIVEN, STATE, STATE, temp)


def at_peak(variants=None, **options):
    found = {"live": LIVE_BUFFERS, "instant": INSTANT, "arguments": ARGUMENTS, **options}
    return made(variants or (peak_variant(36 * MIB),), **found)


def outcome(plan, rows=ROWS, weights=WEIGHTS):
    return gpu_target_outcome(plan, rows, weights)


def test_categories_add_up_to_the_total():
    found = outcome(at_peak())
    assert (found.method, found.execution) == ("gpu-target", "xla")
    assert sum(found.categories.values()) == found.total == found.pool.in_use
    assert all(size >= 0 for size in found.categories.values())
    assert found.categories["weights"] == 6 * MIB + 1024 + 8
    assert found.categories["optimizer"] == 6 * MIB + 8
    assert found.categories["inputs"] == 3 * MIB
    assert found.categories["activations"] == 21 * MIB
    assert found.categories["gradients"] == 8 * MIB
    assert found.categories["workspace"] == (2 + 36 - 31) * MIB


def test_layers_inside_a_row_count_as_the_row_and_have_their_weights():
    found = outcome(at_peak())
    assert found.layers == {"conv": 24 * MIB + 1024, "attention": 10 * MIB}
    assert (found.instant.layer, found.instant.text) == ("attention", "while computing the gradient of attention")
    stranger = outcome(at_peak(instant=instant_of("jit(train_step)/jvp(stranger)/mul", "stranger", "forward")))
    assert (stranger.instant.layer, stranger.instant.text) == (None, "while computing mul")
    assert outcome(at_peak(instant=None)).instant is None


def test_weights_of_another_model_are_not_shared_out():
    found = outcome(at_peak(), weights={"trainable": [(5, "conv"), (7, "attention")]})
    assert found.layers == {"conv": 20 * MIB, "attention": 8 * MIB}


def test_nothing_more_is_shared_out_than_the_plan_has():
    found = outcome(at_peak((peak_variant(21 * MIB),)))
    assert sum(found.categories.values()) == found.total
    assert found.categories["activations"] == 20 * MIB
    assert found.categories["gradients"] == 0
    assert sum(found.layers.values()) <= found.total


def test_inference_returns_more_than_it_is_lent():
    arguments = {"trainable": (4 * MIB,), "inputs": (MIB,)}
    forward = Variant(limited=True, triton=False, argument=5 * MIB, output=2 * MIB, alias=0, temp=30 * MIB)
    found = outcome(at_peak((forward,), arguments=arguments), weights={})
    assert found.categories["optimizer"] == 0
    assert found.pool.requested == 37 * MIB
    assert sum(found.categories.values()) == found.total


# The parent

ANSWER = {
    "variants": [
        {"limited": True, "triton": True, "argument": 1, "output": 2, "alias": 1, "temp": 5, "recomputed": False}
    ],
    "arguments": {"trainable": [4, 8], "inputs": [16]},
    "live": [{"bytes": 5, "operation": "o", "layer": "l", "phase": "forward"}],
    "instant": {"text": "while computing the gradient of l", "operation": "jit(train_step)/transpose(jvp(l))/mul",
                "layer": "l", "phase": "backward"},
    "convolutions": [[7, "c"]], "notes": ["n"],
}  # fmt: skip


def test_the_child_is_asked_for_the_card(monkeypatch):
    asked = {}

    def run_child(module, request, **options):
        asked.update(module=module, request=request, **options)
        return ANSWER

    monkeypatch.setattr(plan, "run_child", run_child)
    monkeypatch.setattr(plan, "missing_parts", lambda: False)
    found = gpu_target_plan(ModelRequest("m.keras"), T4, timeout=9, memory_limit=8)
    assert asked["module"] == worker.__name__
    assert (asked["timeout"], asked["memory_limit"]) == (9, 8)
    assert (asked["env"]["KERAS_BACKEND"], asked["env"]["JAX_PLATFORMS"]) == ("jax", "cpu")
    assert asked["request"]["target"] == plan.target_text(T4)
    assert asked["request"]["has_triton"] is False  # Turing
    assert found.likely.total == 7
    assert found.instant.text == "while computing the gradient of l"
    assert GpuPlan.from_dict(found.to_dict()) == found
    gpu_target_plan(ModelRequest("m.keras"), A100)
    assert asked["request"]["has_triton"] is True


def test_what_is_missing_or_no_plan_is_named(monkeypatch):
    monkeypatch.setattr(plan, "missing_parts", lambda: True)
    with pytest.raises(MissingExtraError, match=r"pip install 'kerasmem\[gpu-targets\]'"):
        gpu_target_plan(ModelRequest("m.keras"), T4)
    with pytest.raises(UsageError, match="K80"):
        gpu_target_plan(ModelRequest("m.keras"), find_card("k80"))
    with pytest.raises(InputError, match="GPU plan"):
        GpuPlan.from_dict({"card": "t4", "memory_bytes": 1, "variants": [{"limited": True}], "arguments": {}})


def make_cuda(folder):
    for path in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("")
    return folder


@pytest.fixture
def no_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(worker.shutil, "which", lambda name: None)
    monkeypatch.setattr(worker, "SYSTEM_CUDA", tmp_path / "none")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", "")


@pytest.mark.usefixtures("no_cuda")
def test_ptxas_is_named_where_it_is_missing():
    with pytest.raises(MissingExtraError, match=r"ptxas .*kerasmem\[gpu-targets\]"):
        worker.cuda_folder()


@pytest.mark.usefixtures("no_cuda")
def test_ptxas_is_found_where_cuda_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(worker, "SYSTEM_CUDA", make_cuda(tmp_path / "system"))
    assert worker.cuda_folder() == str(tmp_path / "system")
    nvcc = make_cuda(tmp_path / "compiler") / "bin" / "nvcc"
    monkeypatch.setattr(worker.shutil, "which", lambda name: str(nvcc))
    assert worker.cuda_folder() == str(tmp_path / "compiler")
    monkeypatch.setenv("CUDA_HOME", str(make_cuda(tmp_path / "home")))
    assert worker.cuda_folder() == str(tmp_path / "home")
    for package, name in (("nvidia.cu13", "jax"), ("nvidia.cuda_nvcc", "extra")):
        specification = importlib.machinery.ModuleSpec(package, None, is_package=True)
        specification.submodule_search_locations.append(str(make_cuda(tmp_path / name)))
        known = {package: specification}
        monkeypatch.setattr(worker.importlib.util, "find_spec", known.get)
        assert worker.cuda_folder() == str(tmp_path / name)


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
        return gpu_target_plan(ModelRequest(f"target_models:{function}", batch_size=batch, **options), card)

    return planned


@needs_jax
@pytest.mark.slow
def test_a_plan_has_the_models_bytes(planned):
    found = planned("dense")
    weights = 4 * (32 * 64 + 64 + 64 * 10 + 10)
    assert sum(found.arguments["trainable"]) == weights
    assert sum(found.arguments["optimizer"]) == 2 * weights + 8  # moments, iteration, learning rate
    assert sum(found.arguments["inputs"]) == 64 * 32 * 4 + 64 * 4
    given = sum(sum(sizes) for sizes in found.arguments.values())
    assert given <= found.likely.argument <= given + 512 * sum(map(len, found.arguments.values()))
    assert found.likely.alias > 3 * weights  # the state is given up
    assert {(each.limited, each.triton) for each in found.variants} == {(True, True), (True, False)}
    assert found.live and found.instant is not None
    assert planned("dense", batch=4096).likely.temp > found.likely.temp


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
    assert len(replaced.variants) == 1  # no Triton on Turing
    forward = planned("dense", mode="inference")
    assert set(forward.arguments) == {"trainable", "non_trainable", "inputs"}
    assert forward.likely.alias == 0 and forward.likely.output == 64 * 10 * 4
    evaluated = planned("dense", mode="evaluate")
    assert set(evaluated.arguments) == {"trainable", "non_trainable", "metrics", "inputs"}
    assert evaluated.likely.total < plain.likely.total


@needs_jax
@pytest.mark.slow
def test_a_plan_read_early_is_that_of_the_whole_compilation():
    script = """
import json, tempfile
from kerasmem.estimation.compiled import on_jax
from kerasmem.estimation.gpu_target import plan, worker
from kerasmem.devices.catalogue import find_card
import jax

place = jax.sharding.SingleDeviceSharding(worker._device(plan.target_text(find_card("a100-80"))))
given = jax.ShapeDtypeStruct((64, 64), "float32", sharding=place)
step = lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jax.numpy.sin(y @ x), x).sum()
lowered = jax.jit(step).lower(given)
options = {"xla_gpu_cuda_data_dir": worker.cuda_folder()}
module, early = on_jax.compile_until_assigned(lowered, options, "a test", tempfile.mkdtemp(dir=FOLDER))
on_jax._texts_of_assignment = lambda folder: None
text, whole = on_jax.compile_until_assigned(lowered, options, "a test", tempfile.mkdtemp(dir=FOLDER))
print(json.dumps([early, whole, "while" in module, "while" in text]))
"""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **ENVIRONMENT}
        ran = subprocess.run(
            [sys.executable, "-c", script.replace("FOLDER", repr(folder))], env=env, capture_output=True, text=True
        )
    assert ran.returncode == 0, ran.stderr
    early, whole, *loops = json.loads(ran.stdout.splitlines()[-1])
    assert early == whole and whole["temp"] > 0
    assert loops == [True, True]
