"""The catalogue of cards: its rows, their names, and what TensorFlow's allocator gets of a card."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote, urlparse

import pytest

from kerasmem.devices.catalogue import (
    DeviceTarget,
    all_cards,
    allocator_bytes,
    available_on_device,
    families,
    find_card,
    largest_context,
    resolve_device,
)
from kerasmem.errors import UsageError
from kerasmem.units import GIB, MIB

CARDS, FAMILIES = all_cards(), families()
ROWS = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
KEYS = {card.key for card in CARDS}
REQUIRED = (
    "k20 k80 p100-12 p100-16 v100-16 v100-32 t4 a10 a10g a100-40 a100-80 a30 l4 l40s rtxa6000 rtx6000ada "
    "h100-pcie h100-sxm h100-nvl h200 b200 rtx2080ti rtx3060 rtx3070 rtx3080 rtx3090 rtx4060ti-16 rtx4070 "
    "rtx4080 rtx4090 rtx5070 rtx5070ti rtx5080 rtx5090 gtx1080ti titanv rtxa5000 rtxa2000-12 rtx2070 rtx3080ti "
    "rtx4070super gtx1650 gtx1660ti gtx1080 titanrtx quadro-rtx5000 quadro-rtx6000 quadro-rtx8000 rtx3080-laptop-16 "
    "rtx4060-laptop a100-40-mig-1g h100-mig-3g"
)
REPORTED = {  # by NVML
    "Tesla K80": "k80", "Tesla P100-PCIE-16GB": "p100-16", "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla V100-PCIE-32GB": "v100-32", "Tesla T4": "t4", "NVIDIA A10G": "a10g", "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA A100 80GB PCIe": "a100-80", "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 NVL": "h100-nvl", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s", "NVIDIA RTX A6000": "rtxa6000", "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090-laptop", "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "a100-40-mig-1g",
    "NVIDIA RTX A5000": "rtxa5000", "Quadro RTX 8000": "quadro-rtx8000", "NVIDIA GeForce GTX 1080": "gtx1080",
    "GeForce RTX 2080 Ti": "rtx2080ti", "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA TITAN V": "titanv",
}  # fmt: skip


def test_has_the_cards_and_finds_them_by_the_names_that_nvml_reports():
    assert set(REQUIRED.split()) <= KEYS
    assert {reported: find_card(reported).key for reported in REPORTED} == REPORTED


@ROWS
def test_row_has_sources_and_plausible_figures(card):
    for source in (card.memory_source, card.capability_source):
        address = urlparse(source)
        assert address.scheme == "https" and "." in address.netloc and len(address.path) > 1
        assert "{" not in source and " " not in source
    (nominal,) = map(int, re.findall(r"(\d+)GB", card.name))
    # Names count in GB that memory makers mean as GiB; ECC and driver take up to 9 %, decimal GB 7 %.
    assert 0.88 * nominal * GIB <= card.memory_bytes <= 1.02 * nominal * GIB
    major, minor = card.compute_capability
    assert 3 <= major <= 12 and 0 <= minor <= 9
    if card.memory_basis == "datasheet":
        assert card.note.startswith("Nominal capacity") and card.memory_bytes == nominal * 10**9
    elif card.memory_basis == "log":
        assert card.note.startswith("Least total") and card.limit is not None
    else:
        assert card.memory_basis == "driver"
        assert card.note.startswith(("CUDA total", "nvidia-smi total", "Driver total"))
    if shown := re.match(r"(?:CUDA|Driver) total[^.]*?\((\d+) MiB\)", card.note):
        assert abs(card.memory_bytes / MIB - int(shown[1])) < 1


@ROWS
def test_every_name_finds_its_row(card):
    assert card.aliases
    for name in (card.key, card.name, *card.aliases):
        for written in (name, name.upper(), name.replace(" ", "-"), name.replace("-", " "), f"NVIDIA {name}"):
            assert find_card(written) is card
    device = resolve_device(card.key)
    assert device.memory_bytes == card.memory_bytes
    assert 0.2 * GIB < card.memory_bytes - device.available_bytes < 2.3 * GIB + 0.03 * card.memory_bytes
    assert ("nominal" in device.note) == (card.memory_basis == "datasheet")
    assert ("CUDA context" in device.note) == (card.limit is None)
    assert json.loads(json.dumps(card.to_dict())) == card.to_dict()


def test_keys_and_names_are_unique():
    assert len(KEYS) == len(CARDS)
    owners: dict[str, set[str]] = {}
    for card in CARDS:
        for name in (card.key, card.name, *card.aliases):
            owners.setdefault(re.sub(r"[^a-z0-9]", "", name.lower()), set()).add(card.key)
    assert {name: keys for name, keys in owners.items() if len(keys) > 1} == {}
    assert not set(owners) & set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_ambiguous_name_lists_its_cards(name):
    assert set(FAMILIES[name]) <= KEYS
    for written in (name, name.upper(), f"Tesla {name}"):
        with pytest.raises(UsageError) as caught:
            resolve_device(written)
        assert all(word in str(caught.value) for word in (*FAMILIES[name], "GiB", "16GB", "`kerasmem devices`"))


@pytest.mark.parametrize(
    ("text", "near"),
    [("a100-41", "a100-40"), ("rtx3091", "rtx3090"), ("l40x", "l40"), ("RTX 4080 Laptob GPU", "RTX 4080 Laptop")],
)
def test_unknown_name_offers_the_nearest(text, near):
    with pytest.raises(UsageError) as caught:
        resolve_device(text)
    message = str(caught.value)
    assert f"did you mean {near!r}?" in message
    assert repr(text) in message and "a size such as 16GB" in message and "`kerasmem devices`" in message


@pytest.mark.parametrize(
    ("text", "memory"),
    [("16GB", 16 * 10**9), ("16GiB", 16 * GIB), (" 11 gib ", 11 * GIB), ("1MiB", MIB), ("25769803776", 24 * GIB)],
)
def test_a_size_is_taken_as_it_is(text, memory):
    device = resolve_device(text)
    assert device.memory_bytes == device.available_bytes == memory
    assert (device.source, device.compute_capability, device.name) == ("size", None, text.strip())


@pytest.mark.parametrize("text", ["16", "4061", "0", "900KiB"])
def test_a_size_without_its_unit_is_refused(text):
    with pytest.raises(UsageError, match="unit, as in 16GB"):
        resolve_device(text)


def test_card_target():
    assert resolve_device("3090").name == find_card("rtx3090").name, "a number may be a card's name"
    card, device = find_card("a10"), resolve_device("NVIDIA A10")
    available = card.memory_bytes - 256 * MIB - 1536 * MIB
    assert device == DeviceTarget(card.name, card.memory_bytes, available, (8, 6), "catalogue", device.note)
    assert unquote(card.memory_source) in device.note and "%" not in device.note and "CUDA context" in device.note


@pytest.mark.parametrize(
    ("major", "reserve"), [(3, 500), (6, 500), (7, 1050), (8, 1536), (9, 1800), (10, 1800), (12, 1800)]
)
def test_reserve_by_compute_capability(major, reserve):
    for memory in (2 * GIB, 16 * GIB, 100 * GIB):
        assert allocator_bytes(memory, (major, 0)) == allocator_bytes(memory, (major, 9)) == memory - reserve * MIB
    assert allocator_bytes(2 * GIB - 1, (major, 0)) == 2 * GIB - 1 - 225 * MIB
    assert allocator_bytes(225 * MIB + 1, (major, 0)) == 1


def test_negative_memory_is_refused():
    with pytest.raises(UsageError, match="negative"):
        allocator_bytes(-1, (8, 0))


@pytest.mark.parametrize(
    ("key", "mib", "logs"), [("h200", 138533, 1), ("rtx3070", 5472, 5), ("titanv", 10550, 1), ("t4", 13764, 5)]
)
def test_logs_give_a_card_its_limit(key, mib, logs):
    card, device = find_card(key), resolve_device(key)
    assert device.available_bytes == mib * MIB < card.memory_bytes
    assert card.limit.logs == logs and card.limit.lowest <= mib <= card.limit.highest
    assert card.limit.source.startswith("TensorFlow 2.") and card.limit.source in device.note


def test_a_card_with_different_readings_has_an_interval_of_limits():
    low, high = resolve_device("rtx3070").limits
    assert low == 5450 * MIB and high == find_card("rtx3070").rule_bytes > 6017 * MIB
    for card in CARDS:
        low, high = card.limits
        assert low <= card.available_bytes <= high and (card.limit is not None or low == high)
    assert resolve_device("8GB").limits == (8 * 10**9, 8 * 10**9)


def test_the_rule_agrees_with_the_logs_of_servers():
    """Desktops and laptops have a display, and some totals are nominal; of the others the rule must be near."""
    rows = [card for card in CARDS if card.limit and card.memory_basis == "driver" and "GeForce" not in card.name]
    assert len(rows) >= 7
    for card in rows:
        rule = allocator_bytes(card.memory_bytes - card.context_bytes, card.compute_capability)
        assert card.available_bytes == pytest.approx(rule, rel=0.03)


def test_a_context_grows_with_the_card():
    assert find_card("a30").context_bytes == find_card("a100-40").context_bytes == 321 * MIB
    assert find_card("rtx2080ti").context_bytes == 220 * MIB * 68 // 40
    assert (find_card("a100-40").context_basis, find_card("a30").context_basis) == ("read", "predicted")
    assert all(100 * MIB < card.context_bytes < 1024 * MIB for card in CARDS)
    assert largest_context((99, 0)) == find_card("rtx5090").context_bytes


def test_available_memory_of_a_live_device():
    total = 16 * GIB
    assert available_on_device(total, "Tesla T4", (7, 5)) == total - 220 * MIB - 1050 * MIB
    assert available_on_device(total, "NVIDIA Unheard", (7, 0)) == total - 317 * MIB - 1050 * MIB
    assert available_on_device(total, "NVIDIA Unheard", (99, 0)) < total - 1800 * MIB
