"""`kerasmem cards`: which cards are enough, by one estimate."""

from __future__ import annotations

import json

import keras
import pytest

import kerasmem
from kerasmem.devices.catalogue import all_cards
from kerasmem.errors import UsageError
from kerasmem.estimation.estimating import EstimateSession, estimate


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential(
        [keras.Input((256, 256, 3)), keras.layers.Conv2D(64, 3), keras.layers.GlobalMaxPooling2D()]
    )
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def model_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("cards") / "m.keras"
    model.save(path)
    return path


def test_one_estimate_ranks_all_cards(model, monkeypatch):
    asked, real = [], EstimateSession.estimate

    def noted(session, **changes):
        asked.append(changes)
        return real(session, **changes)

    monkeypatch.setattr(EstimateSession, "estimate", noted)
    ranking = kerasmem.rank_cards(model, batch_size=800, method="formula")
    assert asked == [{}] and len(ranking.cards) == len(all_cards())
    assert {each.verdict for each in ranking.cards} == {"fits", "too close to call", "does not fit"}
    for each in ranking.cards:
        single = estimate(model, batch_size=800, method="formula", device=each.key)
        assert (single.device.verdict, single.device.available_bytes) == (each.verdict, each.available_bytes), each
    fitting = [each.available_bytes for each in ranking.cards if each.verdict == "fits"]
    assert fitting == sorted(fitting) and ranking.best == ranking.cards[0]


def test_the_smallest_card_that_fits_comes_first(cli, model_file):
    result = cli("cards", model_file, "-b", 4, "-m", "formula")
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].startswith("✔ fits ")
    data = json.loads(cli("cards", model_file, "-b", 4, "-m", "formula", "--json").out)
    assert f"with the least memory: {data['cards'][0]['name']}" in result.out
    assert data["report"]["device"] is None


def test_no_card_is_enough(cli, model_file):
    result = cli("cards", model_file, "-b", 100_000, "-m", "formula")
    assert result.code == 3 and result.out.startswith("✘ fits none of the known cards")


def test_a_device_is_refused(model):
    with pytest.raises(UsageError, match="device: rank_cards estimates for all cards"):
        kerasmem.rank_cards(model, device="t4")


def test_cards_has_no_option_device(cli):
    assert "-d, --device" not in cli("cards", "--help").out
