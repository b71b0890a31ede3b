"""The table of what a process takes of a card beside its allocator, and what the verdict makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from kerasmem.devices.cards import all_cards, hardware_of
from kerasmem.devices.catalogue import available_bytes, find_card, resolve_device
from kerasmem.devices.driver_memory import CONTEXT, context_of, driver_shares
from kerasmem.estimation.report import Bytes
from kerasmem.estimation.verdict import device_verdict
from kerasmem.units import MIB


@pytest.mark.parametrize("share", driver_shares(), ids=lambda each: f"{each.part} {each.capability} {each.framework}")
def test_a_figure_has_a_source_or_is_predicted(share):
    assert share.basis in ("read", "predicted")
    assert (share.source or "").startswith("https://") == (share.basis == "read")
    assert share.note and share.framework
    assert share.size_bytes is None or 0 < share.size_bytes < 2048 * MIB
    hardware = next((hardware_of(card) for card in all_cards() if card.key == share.card), None)
    assert hardware is None or hardware["sms"] == share.multiprocessors


@pytest.mark.parametrize("card", all_cards(), ids=lambda each: each.key)
def test_every_card_has_a_context(card):
    size, how = context_of(card)
    assert 100 * MIB < size < 1024 * MIB
    read = {each.card for each in driver_shares() if each.part == CONTEXT and each.basis == "read"}
    assert (how == "read") == (card.key in read)
    assert f"({how})" in resolve_device(card.key).note


def test_a_card_that_nobody_read_goes_by_the_next_larger_one_of_its_generation():
    assert context_of(find_card("a30")) == (321 * MIB, "predicted")  # as the A100, which is larger
    assert context_of(find_card("rtx2080ti")) == (220 * MIB * 68 // 40, "predicted")  # larger than the T4
    assert context_of(find_card("rtx4070")) == context_of(find_card("rtx4090")) == (426 * MIB, "predicted")
    assert context_of(find_card("gtx1080ti")) == (317 * MIB, "predicted")  # nothing of its generation was read


def test_libraries_fit_into_what_tensorflow_leaves_to_the_system():
    """So the verdict does not take them off a second time."""
    shares = [each for each in driver_shares() if each.part != CONTEXT and each.size_bytes]
    most = {
        part: max(each.size_bytes for each in shares if each.part == part) for part in {each.part for each in shares}
    }
    for card in all_cards():
        if card.compute_capability >= (7, 0):
            free = card.memory_bytes - context_of(card)[0]
            assert sum(most.values()) < free - available_bytes(free, card.compute_capability)


def test_the_verdict_takes_the_context_off():
    device = resolve_device("t4")
    free = find_card("t4").memory_bytes - 1050 * MIB
    need = Bytes(free, free, free, *[None] * 7)
    assert device_verdict(device, need).verdict == "does not fit"  # as it would be without a context
    smaller = dataclasses.replace(need, total=free - 220 * MIB, low=free - 220 * MIB, high=free - 220 * MIB)
    assert device_verdict(device, smaller).verdict == "fits"
    assert resolve_device("15GB").available_bytes == 15 * 10**9  # a size is the allocator's own
