"""The cache: the same question is answered without computing, another one never is, and damage is passed over."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import keras
import pytest

from kerasmem.estimation import cache, facade
from kerasmem.estimation.cache import NOTE, cache_folder, cache_key, cached_estimate, read_entry, write_entry


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("KERASMEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kerasmem" / "estimates"


@pytest.fixture
def model_file(tmp_path):
    return save(tmp_path / "model.keras")


def save(path, units=8):
    model = keras.Sequential([keras.Input((4,), name="input"), keras.layers.Dense(units, name="dense")], name="model")
    model.compile(keras.optimizers.SGD(name="sgd"), "mse")
    model.save(path)
    return path


@pytest.fixture
def computed(monkeypatch):
    """Estimates that were computed; by the formula, under the name of a method that takes time."""
    calls = []

    def counted(arguments):
        calls.append(arguments)
        report, _ = facade.estimated(replace(arguments, method="formula"))
        return facade.Estimated(replace(report, settings=replace(report.settings, method=arguments.method)), ())

    monkeypatch.setattr(cache, "estimated", counted)
    return calls


def test_an_answer_depends_on_code_and_tables():
    names = {name for name, *_ in cache._surroundings()[0]}
    assert {"units.py", "estimation/data/operations.json", "estimation/data/gpu_target.txtpb"} <= names


def test_asked_twice_computed_once(folder, model_file, computed):
    first = cached_estimate(model_file, method="graph", batch_size=8)
    again = cached_estimate(model_file, method="graph", batch_size=8)
    assert len(computed) == 1
    assert NOTE not in first.notes
    assert again.notes == (*first.notes, NOTE)
    assert (again.bytes, again.layers) == (first.bytes, first.layers)
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.iterdir())) == 1


def test_weights_do_not_matter_and_the_answer_names_the_file_asked(folder, model_file, computed, tmp_path):
    cached_estimate(model_file, method="graph")
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other" / "model.keras")
    report = cached_estimate(other, method="graph")
    assert len(computed) == 1
    assert report.model.source == str(other)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 9}, {"method": "xla"}, {"optimizer": "adam"}, {"device": "t4"}, {"mode": "inference"},
     {"dtype_policy": "mixed_float16"}, {"jit_compile": True}, {"input_shape": (4,)}, {"loss": "mae"}],
    ids=str,
)  # fmt: skip
def test_another_setting_is_another_question(folder, model_file, change):
    settings = {"method": "graph", "batch_size": 8}
    assert cache_key(model_file, settings) != cache_key(model_file, {**settings, **change})
    assert cache_key(model_file, settings) == cache_key(model_file, {**settings, "mode": "train"})  # the default


def test_another_model_version_machine_or_environment_is_another_question(folder, model_file, tmp_path, monkeypatch):
    before = cache_key(model_file, {})
    assert cache_key(save(tmp_path / "b.keras", 9), {}) != before
    for name in ("_version", "_processor"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, lambda *_: "another")
            assert cache_key(model_file, {}) != before
    monkeypatch.setenv("TF_XLA_FLAGS", "--something")
    assert cache_key(model_file, {}) != before
    monkeypatch.delenv("TF_XLA_FLAGS")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with_home = cache_key(model_file, {})
    (tmp_path / "keras.json").write_text('{"floatx": "float16"}')
    assert cache_key(model_file, {}) not in (with_home, before)


@pytest.mark.parametrize(
    "settings",
    [{"method": "formula"}, {"method": "probe"}, {"factory": "m:f"}, {"custom_objects": {"A": int}}, {"trust": True},
     {"input_shape": object()}],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_what_is_not_kept(folder, model_file, settings):
    assert cache_key(model_file, settings) is None


def test_code_and_objects_are_not_kept(folder, model_file):
    for model in ("package.module:build", keras.Sequential([keras.Input((2,))]), save, None, "absent.keras"):
        assert cache_key(model, {"method": "graph"}) is None


@pytest.mark.parametrize(
    ("method", "failed", "is_kept"), [("graph", (), True), ("graph", ("xla",), False), ("formula", (), False)]
)
def test_a_failed_method_is_asked_again(folder, model_file, monkeypatch, method, failed, is_kept):
    report = facade.estimate(model_file, method="formula")
    report = replace(report, settings=replace(report.settings, method=method))
    monkeypatch.setattr(cache, "estimated", lambda arguments: facade.Estimated(report, failed))
    cached_estimate(model_file)
    assert folder.exists() == is_kept


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\xff\xfe\n{}", b"\n", None, "cut", "edited", "large"])
def test_damaged_entries_are_computed_again(folder, model_file, computed, damage):
    cached_estimate(model_file, method="graph")
    (entry,) = folder.iterdir()
    data = entry.read_bytes()
    if damage is None:
        entry.unlink()
        entry.mkdir()
    else:
        changes = {
            "cut": data[: len(data) // 2],
            "edited": data.replace(b'"total": ', b'"total": 1'),
            "large": data + b" " * cache.MOST_BYTES_AN_ENTRY,
        }
        entry.write_bytes(changes[damage] if isinstance(damage, str) else damage)
    report = cached_estimate(model_file, method="graph")
    assert len(computed) == 2
    assert NOTE not in report.notes


@pytest.mark.parametrize("planted", ["writable", "link"])
def test_a_folder_that_others_can_change_is_not_used(folder, model_file, computed, tmp_path, planted):
    cached_estimate(model_file, method="graph")
    if planted == "link":
        os.rename(folder, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", folder)
    else:
        os.chmod(folder, 0o777)
    report = cached_estimate(model_file, method="graph")
    (told,) = [note for note in report.notes if str(folder) in note]
    assert told.endswith("or set KERASMEM_CACHE=off") and NOTE not in report.notes and len(computed) == 2


def test_an_entry_under_another_key_is_no_answer(folder, model_file, computed):
    cached_estimate(model_file, method="graph")
    (entry,) = folder.iterdir()
    entry.rename(folder / f"{'0' * 64}.json")
    assert read_entry(folder, "0" * 64) is None


def test_the_least_recently_used_goes_first(folder, model_file, monkeypatch):
    report = facade.estimate(model_file, method="formula")
    for number in range(4):
        write_entry(folder, f"key{number}", report)
        os.utime(folder / f"key{number}.json", (1000 + number, 1000 + number))
    size = (folder / "key0.json").stat().st_size
    assert read_entry(folder, "key0") == report  # used just now
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * size + size // 2)
    write_entry(folder, "key4", report)
    assert {path.stem for path in folder.iterdir()} == {"key0", "key3", "key4"}


def test_a_folder_that_cannot_be_written_is_no_error(folder, model_file, computed):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    assert cached_estimate(model_file, method="graph").bytes.total > 0
    assert cached_estimate(model_file, method="graph").bytes.total > 0
    assert len(computed) == 2


def test_switched_off(folder, model_file, computed, monkeypatch):
    monkeypatch.setenv("KERASMEM_CACHE", "off")
    assert cache_folder() is None
    cached_estimate(model_file, method="graph")
    cached_estimate(model_file, method="graph")
    assert len(computed) == 2
    assert not folder.exists()
    monkeypatch.setenv("KERASMEM_CACHE", "")
    assert cache_folder() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() is None


def test_what_is_kept_is_the_report(folder, model_file):
    report = facade.estimate(model_file, method="formula")
    write_entry(folder, "key", report)
    text = (folder / "key.json").read_text().partition("\n")[2]
    assert json.loads(text) == report.to_dict()
    assert [path.name for path in folder.iterdir()] == ["key.json"]  # nothing half-written is left
