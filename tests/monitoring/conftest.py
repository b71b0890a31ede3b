"""Runs training scripts in processes of their own, under TensorFlow's real BFC allocator.

The allocator is chosen by environment variables that TensorFlow reads with its first operation, so each kind of run
needs a process. The scenarios that can share one do: `scenario("name")` gives what the function of
that name in `scenarios.py` returned.
"""

import fcntl
import json
from pathlib import Path

import pytest
from fresh import python

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def all_scenarios(tmp_path_factory, worker_id):
    """What all scenarios returned; one process runs them, for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "scenarios"
    folder.mkdir(exist_ok=True)
    target = folder / "results.json"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = None if target.exists() else python(HERE / "scenarios.py", target, cwd=folder)
        results = json.loads(target.read_text())
        assert results, done and done.stderr
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
