"""How a process that trains begins: the variables' first values and the batch."""

from __future__ import annotations

from kerasmem.estimation.allocator import FREED, Heap
from kerasmem.estimation.graph.memory import HANDLE_BYTES, make_variables
from kerasmem.estimation.graph.program import Variable


def variable(size, kind="weights", initial="random", dtype="float32"):
    return Variable("v", size, kind, initial, (size // 4,), dtype)


def allocations(heap):
    return [buffer.bytes for buffer, variable in heap.log if variable != FREED]


def test_random_variable_takes_three_buffers_and_a_filled_one_takes_one():
    heap = Heap()
    (held,) = make_variables([variable(4096)], [], heap)
    assert allocations(heap) == [HANDLE_BYTES, 4096, 4096, 4096]
    made = [buffer for buffer, variable in heap.log if variable != FREED]
    assert held is made[3]
    assert [buffer.holders for buffer in made] == [1, 0, 0, 1]
    assert heap.allocator.requested_in_use == HANDLE_BYTES + 4096
    assert heap.peak.requested == HANDLE_BYTES + 3 * 4096
    filled = Heap()
    make_variables([variable(4096, initial="filled")], [], filled)
    assert allocations(filled) == [HANDLE_BYTES, 4096]


def test_slots_of_one_shape_share_one_filling_until_it_is_written():
    heap = Heap()
    slots = [variable(4096, "optimizer", "filled") for _ in range(3)]
    other = variable(2048, "optimizer", "filled")
    half = variable(4096, "optimizer", "filled", "float16")
    held = make_variables([*slots, other, half], [], heap)
    assert held[0] is held[1] is held[2]
    assert held[0].holders == 3
    assert len({id(each) for each in held}) == 3
    assert heap.allocator.requested_in_use == 5 * HANDLE_BYTES + 4096 + 2048 + 4096
    for each in held:
        heap.release(each)
    assert heap.allocator.requested_in_use == 5 * HANDLE_BYTES
    # Nor are the optimizer's numbers.
    counters = [Variable("c", 8, "optimizer", "filled", (), "int64") for _ in range(2)]
    first, second = make_variables(counters, [], Heap())
    assert first is not second


def test_the_batch_is_allocated_between_weights_and_slots():
    heap = Heap()
    make_variables([variable(512, initial="filled"), variable(1024, "optimizer", "filled")], [(7, 2048)], heap)
    order = [size for size in allocations(heap) if size != HANDLE_BYTES]
    assert order.index(512) < order.index(2048) < order.index(1024)
    assert [buffer.node for buffer, _ in heap.log if buffer.bytes == 2048] == [7]
