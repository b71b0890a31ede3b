"""Runs training scripts in processes of their own, under TensorFlow's real BFC allocator.

The allocator is chosen by environment variables that TensorFlow reads when it starts, so each kind of run
needs a fresh interpreter. The scenarios that can share one do: `scenario("name")` gives what the function of
that name in `scenarios.py` returned.
"""

import json
from pathlib import Path

import pytest
from fresh import python

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def all_scenarios(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    done = python(HERE / "scenarios.py", folder / "results.json", cwd=folder)
    results = json.loads((folder / "results.json").read_text())
    assert results, done.stderr
    return results


@pytest.fixture
def scenario(all_scenarios):
    def look_up(name):
        result = all_scenarios[name]
        if "error" in result:
            pytest.fail(f"scenario {name} failed:\n{result['error']}")
        return result["result"]

    return look_up


@pytest.fixture
def run_python(tmp_path):
    def run(*args, **environ):
        return python(*args, cwd=tmp_path, **environ)

    return run
