"""Last resorts on the host's memory: where they apply, what they take there, and that they stay behind what fits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kerasmem.devices.catalogue import resolve_device
from kerasmem.estimation.report import Bytes, DeviceVerdict, ModelFacts, Settings
from kerasmem.recovery import last_resorts as module
from kerasmem.recovery.advice import Advice, Considered, LastResort, Remedy
from kerasmem.recovery.last_resorts import OFFLOAD, UNIFIED, last_resorts
from kerasmem.rendering.advice_table import advice_table, labelled
from kerasmem.rendering.layout import plain_text
from kerasmem.units import GIB

T4 = resolve_device("t4")
SETTINGS = Settings(32, "adam", "mse", "float32", "train", "graph", "graph", None)


def need(total, high=None, activations=None):
    return Bytes(total, total, high or total, GIB, GIB, None, activations, *[None] * 3)


@pytest.fixture
def on(monkeypatch):
    def choose(*, jax=False, cards=(), free=64 * GIB):
        monkeypatch.setattr(module, "runs_on_jax", lambda: jax)
        monkeypatch.setattr(module, "list_devices", lambda: list(cards))
        monkeypatch.setattr(module, "host_memory", lambda: SimpleNamespace(available_bytes=free))

    return choose


def test_unified_memory_takes_what_is_beyond_the_card(on):
    on()
    (way,), refused = last_resorts(need(18 * GIB, 20 * GIB), SETTINGS, T4)
    assert (way.name, refused) == (UNIFIED, ())
    assert way.host_bytes == 20 * GIB - T4.available_bytes
    assert way.verdict == "too close to call" and way.basis == "predicted, not measured here"
    assert all(each.startswith("https://") for each in way.sources)
    assert "per_process_gpu_memory_fraction=1.4" in way.code  # 20 GiB of 14.8
    assert 'os.environ["TF_FORCE_UNIFIED_MEMORY"] = "1"' in way.code
    compile(way.code, "code", "exec")
    (near,), _ = last_resorts(need(T4.available_bytes - 1, T4.available_bytes + 1), SETTINGS, T4)
    assert near.host_bytes == 1 and "fraction=1.1" in near.code


def test_the_code_for_tensorflow_runs(on):
    on()
    (way,), _ = last_resorts(need(20 * GIB), SETTINGS, T4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {})
        exec(way.code, {})  # ours, not a model's


def test_on_jax_activations_too(on):
    on(jax=True)
    (unified, offload), refused = last_resorts(need(20 * GIB, activations=12 * GIB), SETTINGS, T4)
    assert (unified.name, offload.name, refused) == (UNIFIED, OFFLOAD, ())
    assert 'XLA_PYTHON_CLIENT_MEM_FRACTION"] = "1.4"' in unified.code and "tensorflow" not in unified.code
    assert offload.host_bytes == 12 * GIB and "offload_dot_with_no_batch_dims" in offload.code
    compile(offload.code, "code", "exec")
    (_, unknown), _ = last_resorts(need(20 * GIB), SETTINGS, T4)
    assert unknown.host_bytes is None
    _, (refused,) = last_resorts(need(40 * GIB, activations=GIB), SETTINGS, T4)
    assert refused == Considered(OFFLOAD, "without any activations the step takes 39.0 GiB still")
    predict = Settings(32, "adam", "mse", "float32", "inference", "xla", "xla", None)
    assert [each.name for each in last_resorts(need(20 * GIB), predict, T4)[0]] == [UNIFIED]


def test_only_on_a_card_that_pages_and_with_host_memory_enough(on):
    on()
    assert last_resorts(need(20 * GIB), SETTINGS, resolve_device("16GB")) == ((), ())
    offered, (refused,) = last_resorts(need(20 * GIB), SETTINGS, resolve_device("k80"))
    assert not offered and "6.0" in refused.why
    on(cards=[object()], free=2 * GIB)
    offered, (refused,) = last_resorts(need(20 * GIB), SETTINGS, T4)
    assert not offered and "which has 2.00 GiB free" in refused.why
    on(cards=[], free=2 * GIB)  # the card is elsewhere, and so is its host
    assert last_resorts(need(20 * GIB), SETTINGS, T4)[0]


def test_they_stand_last_and_are_not_recommended():
    remedy = Remedy("batches of 16", ({"kind": "batch_size", "value": 16},), "same", "more steps", 1.0, GIB, GIB, GIB,
                    20 * GIB, "fits", "graph", "batch_size=16")  # fmt: skip
    way = LastResort(UNIFIED, 6 * GIB, "same training trajectory", "slow", ("https://example.org",), "import os")
    device = DeviceVerdict(T4.name, T4.memory_bytes, T4.available_bytes, "does not fit", T4.note)
    facts = ModelFacts("net", "net.h5", 3, 10, 10)
    advice = Advice(facts, SETTINGS, need(20 * GIB), device, (remedy,), (remedy,), last_resorts=(way,))
    assert advice.answer.startswith("net fits Tesla T4 16GB with batches of 16")
    assert Advice.from_dict(json.loads(json.dumps(advice.to_dict()))) == advice
    assert advice.to_dict()["last_resorts"][0]["basis"] == "predicted, not measured here"
    assert list(labelled(advice)) == ["1", "A", "H1"]
    for is_brief in (True, False):
        text = plain_text(advice_table(advice, is_brief=is_brief))
        assert text.index("batches of 16") < text.index("Last resorts")
        assert "H1 unified memory: takes at most 6.00 GiB of the host; slow" in text
    alone = Advice(facts, SETTINGS, need(20 * GIB), device, last_resorts=(way,))
    assert alone.verdict == "does not fit" and not alone.fits
