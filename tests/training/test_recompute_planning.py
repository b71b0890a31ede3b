"""Where a chain is cut: against every partition of short chains, and what the plan says. No TensorFlow."""

from __future__ import annotations

import itertools
import random

import pytest

from kerasmem.errors import InputError, UsageError
from kerasmem.training.recompute.planning import (
    CostTable,
    KeptTensor,
    LayerCall,
    RecomputePlan,
    lowest_peak,
    partition_within,
    plan_segments,
)


def chain(count, seed):
    """A chain with skip connections, tensors that only later steps need, and steps that no segment may end after."""
    draw = random.Random(seed)
    steps = []
    for number in range(count):
        kept = [KeptTensor(draw.randint(1, 90), None, True) for _ in range(draw.randint(0, 2))]
        last = min(count, number + 1 + draw.choice([0, 0, 0, 2, 4]))
        kept.append(KeptTensor(draw.randint(1, 50), last, draw.random() < 0.8))
        steps.append(
            LayerCall(f"s{number}", draw.random() + 0.1, draw.randint(0, 40), tuple(kept), draw.random() < 0.9)
        )
    return steps


def partitions(steps):
    """The ends of the segments of every partition."""
    ends = [number + 1 for number, each in enumerate(steps[:-1]) if each.may_end]
    for count in range(len(ends) + 1):
        for places in itertools.combinations(ends, count):
            yield [*places, len(steps)]


def peak(table, ends):
    return max(each for _, each in table.peak_of(ends))


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_is_better(seed):
    steps = chain(7, seed)
    table = CostTable.of(steps)
    every = [(ends, peak(table, ends)) for ends in partitions(steps)]
    assert peak(table, lowest_peak(table)) == pytest.approx(min(most for _, most in every), rel=2e-3)
    for count in {len(ends) for ends, _ in every}:
        best = min(most for ends, most in every if len(ends) == count)
        found = lowest_peak(table, count)
        assert len(found) == count
        assert peak(table, found) == pytest.approx(best, rel=2e-3)
    for limit in sorted(most for _, most in every)[:: max(len(every) // 8, 1)]:
        found = partition_within(table, limit)
        assert found is not None and peak(table, found) <= limit
        assert [0, *found][-2] == min([0, *ends][-2] for ends, most in every if most <= limit)
    assert partition_within(table, min(most for _, most in every) * 0.99) is None


def dense(count=24, inside=30, crossing=10, working=5):
    return [
        LayerCall(f"d{n}", 1.0, working, (KeptTensor(inside, None, True), KeptTensor(crossing, n + 1, True)))
        for n in range(count)
    ]


def test_a_uniform_stack_is_cut_near_the_square_root():
    plans = {count: plan_segments(dense(), segments=count, batch_size=1) for count in range(1, 25)}
    peaks = {count: each.activation_bytes for count, each in plans.items()}
    best = min(peaks, key=peaks.get)
    assert 5 <= best <= 14
    assert peaks[1] > peaks[2] > peaks[4] > peaks[best] < peaks[24]
    assert plan_segments(dense(), batch_size=1).activation_bytes <= peaks[best] * 1.02
    assert plans[1].extra_time == 0
    assert plans[4].extra_time == pytest.approx(18 / (3 * 24), abs=1e-4)


def test_a_looser_target_costs_less_time():
    found = [
        plan_segments(dense(), batch_size=1, persistent_bytes=50, target_bytes=50 + size) for size in (300, 500, 900)
    ]
    assert [each.predicted_bytes <= each.target_bytes for each in found] == [True] * 3
    times = [each.extra_time for each in found]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    assert plan_segments(dense(), batch_size=1, target_bytes=10_000).cuts == ()


def test_a_shared_layer_ends_a_segment_only_at_its_last_call():
    steps = dense(6)
    steps[2] = LayerCall("d2", 1.0, 5, steps[2].kept_tensors, may_end=False)
    assert all("d2" not in plan_segments(steps, segments=count, batch_size=1).cuts for count in range(1, 6))
    with pytest.raises(UsageError, match="from 1 to 5"):
        plan_segments(steps, segments=6, batch_size=1)


def test_a_target_out_of_reach_says_what_is_needed():
    with pytest.raises(UsageError, match=r"(?s)at the best places.*of it weights.*smaller batch"):
        plan_segments(dense(), batch_size=8, persistent_bytes=2 << 20, target_bytes=2 << 20)


def test_to_dict_and_back():
    plan = plan_segments(dense(), segments=4, batch_size=2, target_bytes=1000)
    data = plan.to_dict()
    assert data["format_version"] == 1
    assert RecomputePlan.from_dict(data) == plan
    with pytest.raises(InputError, match="recomputation plan"):
        RecomputePlan.from_dict({"segments": [{}]})
