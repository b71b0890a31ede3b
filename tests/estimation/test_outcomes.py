"""What the methods with a process of their own find, put into the report's terms; the processes are not started."""

from __future__ import annotations

import pytest

from kerasmem.devices.catalogue import find_card
from kerasmem.devices.recording import ALLOCATE, AllocatorEvent
from kerasmem.estimation.compiled.hlo import LiveBuffer
from kerasmem.estimation.compiled.planned import instant_of
from kerasmem.estimation.gpu_target.plan import GpuPlan, Variant, gpu_target_outcome
from kerasmem.estimation.probe import probing
from kerasmem.estimation.probe.fitting import Fit, Replayed
from kerasmem.estimation.probe.probing import probe
from kerasmem.estimation.probe.running import Answer, Run
from kerasmem.models.request import ModelRequest
from kerasmem.units import MIB

T4 = find_card("t4")
EVENT = AllocatorEvent(1, ALLOCATE, "bfc_cpu_allocator_for_gpu", 256, 256, 256, 256, 256)
ARGUMENTS = {
    "trainable": (4 * MIB, 2 * MIB), "non_trainable": (1024,), "optimizer": (4 * MIB, 2 * MIB, 8),
    "metrics": (4, 4), "inputs": (3 * MIB,),
}  # fmt: skip
GIVEN = sum(map(sum, ARGUMENTS.values()))
STATE = GIVEN - 3 * MIB
LIVE = (
    LiveBuffer(20 * MIB, "jit(train_step)/jvp(conv)/conv", "conv", "forward"),
    LiveBuffer(8 * MIB, "jit(train_step)/transpose(jvp(attention))/query/dot", "attention/query", "backward"),
    LiveBuffer(4 * MIB, "state[0][0]"),
    LiveBuffer(2 * MIB, "jit(train_step)/adam/mul", None, "optimizer"),
    LiveBuffer(MIB, "jit(train_step)/jvp(stranger)/mul", "stranger", "forward"),
)
INSTANT = instant_of("jit(train_step)/transpose(jvp(attention))/query/dot", "attention/query", "backward")
ROWS = ("image", "conv", "attention")
WEIGHTS = {"trainable": [(4 * MIB, "conv"), (2 * MIB, "attention")], "non_trainable": [(1024, "conv")]}


def variant(temp, triton=False):
    return Variant(limited=True, triton=triton, argument=GIVEN, output=STATE, alias=STATE, temp=temp)


def made(variants=None, **options):
    found = {"live": LIVE, "instant": INSTANT, "arguments": ARGUMENTS, **options}
    return GpuPlan(card="t4", memory_bytes=T4.memory_bytes, variants=variants or (variant(36 * MIB),), **found)


@pytest.fixture
def planned():
    """Return the outcome of a plan."""

    def outcome(plan, rows=ROWS, weights=WEIGHTS):
        return gpu_target_outcome(plan, rows, weights)

    return outcome


class TestGpuTarget:
    def test_categories_add_up_to_the_total(self, planned):
        found = planned(made())
        assert (found.method, found.execution) == ("gpu-target", "xla")
        assert sum(found.categories.values()) == found.total == found.pool.in_use
        assert all(size >= 0 for size in found.categories.values())
        assert found.categories["weights"] == 6 * MIB + 1024 + 8
        assert found.categories["optimizer"] == 6 * MIB + 8
        assert found.categories["inputs"] == 3 * MIB
        assert found.categories["activations"] == 21 * MIB
        assert found.categories["gradients"] == 8 * MIB
        assert found.categories["workspace"] == (2 + 36 - 31) * MIB

    def test_the_total_is_the_plan_and_what_the_allocator_adds(self, planned):
        found = planned(made())
        assert found.pool.requested == GIVEN + 36 * MIB
        assert found.pool.requested <= found.total <= found.pool.reserved
        assert found.low <= found.pool.requested  # an allocator that holds the whole card wastes next to nothing
        assert found.pool.requested <= found.pool.smallest_limit <= found.high

    def test_the_interval_spans_the_variants_and_the_workspace(self, planned):
        one = planned(made())
        both = planned(made((variant(36 * MIB, True), variant(70 * MIB)), convolutions=((5 * MIB, "conv"),)))
        assert both.total == one.total
        assert both.low == one.low <= both.total <= both.high
        assert both.high >= GIVEN + (70 + 5) * MIB
        assert any("cuDNN's workspace for 1 convolutions: up to 5,242,880 B" in note for note in both.notes)

    def test_layers_inside_a_row_count_as_the_row_and_have_their_weights(self, planned):
        found = planned(made())
        assert found.layers == {"conv": 24 * MIB + 1024, "attention": 10 * MIB}
        assert sum(found.layers.values()) <= found.total
        assert found.instant.layer == "attention"
        assert found.instant.text == "while computing the gradient of attention"

    def test_what_has_no_row_keeps_its_own_words(self, planned):
        found = planned(made(instant=instant_of("jit(train_step)/jvp(stranger)/mul", "stranger", "forward")))
        assert found.instant.layer is None
        assert found.instant.text == "while computing mul"
        assert planned(made(instant=None)).instant is None

    def test_weights_of_another_model_are_not_shared_out(self, planned):
        found = planned(made(), weights={"trainable": [(5, "conv"), (7, "attention")]})
        assert found.layers == {"conv": 20 * MIB, "attention": 8 * MIB}

    def test_nothing_more_is_shared_out_than_the_plan_has(self, planned):
        found = planned(made((variant(21 * MIB),)))
        assert sum(found.categories.values()) == found.total
        assert found.categories["activations"] == 20 * MIB
        assert found.categories["gradients"] == 0
        assert sum(found.layers.values()) <= found.total

    def test_inference_returns_more_than_it_is_lent(self, planned):
        arguments = {"trainable": (4 * MIB,), "inputs": (MIB,)}
        forward = Variant(limited=True, triton=False, argument=5 * MIB, output=2 * MIB, alias=0, temp=30 * MIB)
        found = planned(made((forward,), arguments=arguments), weights={})
        assert found.categories["optimizer"] == 0
        assert found.pool.requested == 37 * MIB
        assert sum(found.categories.values()) == found.total


def answer(*batches, optimizer=60):
    runs = tuple(Run(batch, 5 * batch, 0, 0, (95, 100, 110), 0.1) for batch in batches)
    return Answer("CPU:0", "graph", 30, optimizer, ("assumed",), runs)


class TestProbe:
    @pytest.fixture
    def outcome(self, monkeypatch):
        """Return what a probe says of the batch of a request, by what the process and the replay found."""

        def ask(answer, target, *, limit=105, **options):
            replayed = Replayed((95, 100, 110), (80, 90, 100), 200, limit)
            monkeypatch.setattr(probing, "run_steps", lambda request, runs, **_: answer)
            monkeypatch.setattr(probing, "read_recording", lambda folder, marks: ((EVENT,), ()))
            monkeypatch.setattr(probing, "fit_recording", lambda segments, sizes: Fit(24, (), (), (0,), 0, 0))
            monkeypatch.setattr(probing, "replay_fit", lambda *_, **__: replayed)
            return probe(ModelRequest("m.keras", batch_size=target), **options)

        return ask

    def test_what_was_measured_is_passed_on(self, outcome):
        found = outcome(answer(512), 512, is_fixed=True)
        assert (found.method, found.execution) == ("probe", "graph")
        assert (found.total, found.low, found.high) == (100, 95, 110)
        assert (found.pool.requested, found.pool.in_use, found.pool.reserved) == (None, 100, None)
        assert found.categories == {"weights": 30, "inputs": 5 * 512, "optimizer": 60}
        assert "small enough to be run itself: 3 steps" in found.notes[0] and found.notes[1] == "assumed"

    def test_what_was_foretold_is_passed_on(self, outcome):
        found = outcome(answer(24, 16, 8), 512)
        assert (found.total, found.low, found.high) == (100, 91, 110)
        assert found.pool.smallest_limit == 105
        assert (found.pool.requested, found.pool.in_use, found.pool.reserved) == (90, 100, 200)
        assert found.categories == {"weights": 30, "inputs": 5 * 512, "optimizer": 60}
        assert found.notes[0].startswith("run at batches 8 and 16 and 24 on CPU:0") and found.notes[1] == "assumed"

    def test_the_upper_end_is_never_below_the_limit_that_trains(self, outcome):
        assert outcome(answer(24, 16, 8), 512, limit=130).high == 130

    def test_what_is_not_known_is_left_out(self, outcome):
        found = outcome(answer(512, optimizer=None), 512, is_fixed=True)
        assert "optimizer" not in found.categories
        assert found.high == 110
