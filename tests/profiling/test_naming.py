"""Chunks → layers and categories, and the assembled profile's sums."""

from __future__ import annotations

import json

import pytest

from kerasmem.devices.recording import ALLOCATE, AllocatorEvent, of_device
from kerasmem.models.op_names import Attribution
from kerasmem.models.sizes import ModelFacts
from kerasmem.profiling.assembling import Namer, build_profile
from kerasmem.profiling.replaying import AllocatedChunk, KnownTensor, replay_step
from kerasmem.profiling.results import PeakBytes, ProfiledLayer, ProfileSettings, StepProfile

ATTRIBUTION = Attribution({"net_1": ("net",), "net_1/dense_1": ("net", "dense")}, ["dense"], ("adam",))
NAMER = Namer(
    ATTRIBUTION,
    contents={9000: ((6000, "net_1/dense_1/MatMul"), (2000, "XLA_Args"))},
)


def new(operation, region="output", size=100):
    return AllocatedChunk(size, 256, operation, region, "", True)


@pytest.mark.parametrize(
    ("chunk", "category", "layer", "share"),
    [
        (new("net_1/dense_1/MatMul"), "activations", "dense", ""),
        (new("StatefulPartitionedCall/gradient_tape/net_1/dense_1/MatMul"), "gradients", "dense", ""),
        (new("net_1/dense_1/MatMul", "temp"), "workspace", "dense", ""),
        (new("adam/Sqrt_3"), "workspace", None, "optimizer"),
        (new("compile_loss/mse/sub"), "activations", None, "loss"),
        (new("gradient_tape/compile_loss/mse/Mul"), "gradients", None, "loss"),
        (new("AddN_4"), "gradients", None, "sums of gradients"),
        (new("net_1/add/AddV2"), "activations", None, "net outside its layers"),
        (new("StatefulPartitionedCall/Sub"), "activations", None, "the step outside its layers"),
        (new("Sigmoid", "temp"), "workspace", None, "the step outside its layers"),
        (new(""), "workspace", None, "scratch of kernels"),
        (AllocatedChunk(100, 256, "", "", ""), "unnamed", None, "not known"),
        (AllocatedChunk(100, 256, "Fill", "", ""), "unnamed", None, "not known"),
        (AllocatedChunk(100, 256, "VarHandleOp", "temp", ""), "workspace", None, "TensorFlow itself"),
        (AllocatedChunk(100, 256, "gradient_tape/net_1/dense_1/zeros", "", ""), "workspace", "dense", ""),
        (
            AllocatedChunk(100, 256, tensor=KnownTensor(1, 100, "weights", "w", ("net", "dense"))),
            "weights",
            "dense",
            "",
        ),
        (AllocatedChunk(100, 256, tensor=KnownTensor(1, 100, "weights", "w")), "weights", None, "other weights"),
        (AllocatedChunk(100, 256, tensor=KnownTensor(1, 100, "optimizer", "m")), "optimizer", None, "optimizer"),
        (AllocatedChunk(100, 256, tensor=KnownTensor(1, 100, "metrics", "t")), "weights", None, "metrics"),
        (AllocatedChunk(100, 256, tensor=KnownTensor(1, 100, "inputs", "x")), "inputs", None, "batch"),
    ],
    ids=str,
)
def test_names(chunk, category, layer, share):
    (named,) = NAMER.name(chunk)
    assert (named.category, named.layer, named.share, named.bytes) == (category, layer, share, 100)


@pytest.mark.parametrize("operation", ["__inference_one_step_on_data_203", ""])
def test_names_in_xlas_buffer(operation):
    parts = list(NAMER.name(new(operation, size=9000)))
    assert [(part.bytes, part.category, part.layer, part.share) for part in parts] == [
        (6000, "activations", "dense", ""),
        (2000, "workspace", None, "rearranged by XLA"),
        (1000, "workspace", None, "gaps in XLA's buffer"),
    ]
    whole = Namer(ATTRIBUTION, is_xla=True)
    assert next(whole.name(new(operation, size=10**6))).share == "XLA's buffer for the whole step"
    assert whole.instant("GatherV2").text == "while XLA runs the step"
    assert Namer(ATTRIBUTION, is_xla=True, at="net_1/dense_1/MatMul").instant(operation).layer == "dense"


def test_the_instant_of_an_operation():
    assert NAMER.instant("gradient_tape/net_1/dense_1/MatMul").text == "while computing the gradient of dense"
    assert NAMER.instant("StatefulPartitionedCall/Sub").text == "while computing Sub"
    assert NAMER.instant("") is None


@pytest.fixture
def profile():
    sizes = {"net_1/dense_1/MatMul": 5000, "adam/Sqrt": 300, "Mystery": 50}
    in_use, events = 4096, []
    for number, (name, size) in enumerate(sizes.items()):
        chunk = -(-size // 256) * 256
        in_use += chunk
        events.append(AllocatorEvent(number, ALLOCATE, "GPU_0_bfc", 10 + number, size, chunk, in_use, name))
    weight = KnownTensor(1, 2000, "weights", "dense/kernel", ("net", "dense"))
    return build_profile(
        replay_step(of_device(events, "GPU:0"), (), (weight,)),
        NAMER,
        ModelFacts("net", "", 1, 500, 500),
        ProfileSettings(32, "adam", "mse", "float32", "train", "graph", None),
        [ProfiledLayer(name="dense", class_name="Dense", output_shape=(None, 4), parameters=500)],
        peaks=[9000, 10_000],
        notes=["a note"],
    )


def test_everything_adds_up_to_the_total(profile):
    need = profile.bytes
    assert need.total == 4096 + 5120 + 512 + 256
    assert sum(getattr(need, name) for name in PeakBytes.CATEGORIES) == need.total
    assert sum(row.bytes_at_peak for row in profile.layers) + sum(part.bytes for part in profile.shares) == need.total
    assert profile.layers[0].parts == {"weights": 2000, "activations": 5000}
    assert (need.weights, need.activations, need.workspace) == (2000, 5050, 300)
    assert need.unnamed == 4096 - 2048  # from before the step all but the weight's chunk
    assert profile.named_share == 1 - need.unnamed / need.total
    assert profile.unmodelled[0]["bytes"] == 4096 - 2048
    assert profile.requested is None
    assert [chunk.bytes for chunk in profile.live] == sorted((chunk.bytes for chunk in profile.live), reverse=True)


def test_a_profile_is_json_and_back(profile):
    data = json.loads(json.dumps(profile.to_dict()))
    assert StepProfile.from_dict(data) == profile
    assert (data["measured"], data["settings"]["method"], data["format_version"]) == (True, "profile", 1)
    assert data["layers"][0]["class"] == "Dense"
    assert StepProfile.from_dict({**data, "later": 1, "bytes": {**data["bytes"], "more": 2}}) == profile
