"""The rooms and the directions in which they may import one another, and that importing kerasmem is cheap."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import structure
from structure import room_of

import kerasmem

PACKAGE = Path(kerasmem.__file__).parent

# room -> the rooms it may import, beside the ground floor, which all may
GROUND = {"archives", "errors", "units", "checks", "files", "records"}
ALLOWED = {
    "errors": set(),
    "archives": set(),
    "files": set(),
    "units": set(),
    "checks": set(),
    "records": set(),
    "compat": set(),
    "processes": {"compat"},
    "cluster": {"compat"},
    "devices": {"compat", "processes"},
    "models": {"compat", "hdf5"},
    "diagnosis": {"models"},
    "profiling": {"compat", "devices", "models"},
    "estimation": {"compat", "devices", "models", "processes", "profiling"},
    "monitoring": {"cluster", "compat", "devices", "models", "processes", "profiling"},
    "hdf5": {"compat", "devices"},
    "streaming": {"cluster", "compat", "devices", "hdf5", "processes"},
    "datatools": {"compat", "devices", "hdf5", "processes", "streaming"},
    "data": {"datatools"},
    "training": {
        "cluster", "compat", "devices", "diagnosis", "estimation", "models", "processes", "streaming", "hdf5",
    },
    "recovery": {"compat", "devices", "diagnosis", "estimation", "models", "monitoring", "processes", "training"},
    "rendering": {
        "datatools", "devices", "diagnosis", "estimation", "monitoring", "profiling", "recovery", "training",
    },
    "display": {"estimation", "monitoring", "profiling", "rendering"},
    "cli": {
        "cluster", "compat", "data", "datatools", "devices", "diagnosis", "display", "estimation", "hdf5", "models",
        "monitoring", "processes", "profiling", "recovery", "rendering", "streaming", "training",
    },
}  # fmt: skip
# What rendering may know of other rooms: results, not the ways to them.
RESULTS = {
    "kerasmem.estimation.report", "kerasmem.estimation.reference", "kerasmem.estimation.search",
    "kerasmem.estimation.card_ranking", "kerasmem.estimation.many", "kerasmem.estimation.truth.results",
    "kerasmem.estimation.comparing", "kerasmem.monitoring.timeline", "kerasmem.devices.cards",
    "kerasmem.devices.live", "kerasmem.devices.doctor", "kerasmem.monitoring.tracking",
    "kerasmem.monitoring.curves", "kerasmem.monitoring.log_summary", "kerasmem.monitoring.rank_logs",
    "kerasmem.monitoring.phases",
    "kerasmem.monitoring.snapshot", "kerasmem.profiling.results", "kerasmem.diagnosis.diagnosis",
    "kerasmem.datatools.inspecting.results", "kerasmem.datatools.converting.results",
    "kerasmem.recovery.advice",
}  # fmt: skip
# library -> the rooms that may use it
ONLY_IN = {
    "click": {"cli"},
    "pynvml": {"devices"},
    "psutil": {"devices"},
    "h5py": {"compat", "models", "hdf5", "datatools", "streaming"},
    "matplotlib": {"rendering"},
    "prometheus_client": {"rendering"},
    "pyarrow": {"datatools"},
    "PIL": {"datatools"},
    "rich": {"rendering", "cli", "display"},
    "cattrs": {"records"},
}
# Modules that a user reaches only through a public name that needs Keras anyway.
KERAS_AT_THE_TOP = {
    "training/saving.py", "training/dataset_sources.py", "training/trainer.py",
    "monitoring/logger.py", "monitoring/step_profiler.py", "training/resume.py", "streaming/sequence.py",
    "training/best_weights.py", "models/recomputed.py", "models/segment_gradient.py", "training/sources.py",
    "training/array_source.py", "training/steps/batches.py", "training/steps/micro.py", "training/steps/losses.py",
    "training/steps/checks.py", "training/steps/packing.py", "training/fitting.py",
    "training/steps/row_sums.py", "models/segment_scope.py", "models/call_gradients.py",
}  # fmt: skip

MODULES = structure.modules(PACKAGE)


def imported(path):
    """Every module that a file imports, and whether at its top level."""
    tree = ast.parse((PACKAGE / path).read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in top


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_in_the_allowed_directions(path):
    room = room_of(path)
    for name, at_top in imported(path):
        first, *rest = name.split(".")
        if first == "kerasmem":
            other = rest[0] if rest else None
            if other and room not in ("__init__", "__main__"):
                assert other == room or other in GROUND | ALLOWED[room], f"{path} imports {name}"
                if room == "rendering" and other not in GROUND | {"rendering"}:
                    assert name in RESULTS, f"{path} imports {name}: rendering knows results only"
            continue
        if first in ONLY_IN:
            assert room in ONLY_IN[first], f"{path} imports {first}"
        if (
            first in ("tensorflow", "keras", "h5py", "pynvml", "matplotlib")
            and at_top
            and str(path) not in KERAS_AT_THE_TOP
        ):
            assert first == "h5py" and room in ("hdf5", "datatools", "streaming"), f"{path} imports {first} at its top"


kinds = pytest.mark.parametrize(
    "kind",
    [structure.guests, structure.long_functions, structure.circles, structure.private_imports],
    ids=lambda kind: kind.__name__,
)


@kinds
def test_no_module_has_such_a_fault(kind):
    found = {str(path): faults for path, faults in kind(PACKAGE).items()}
    assert not found, json.dumps(found, indent=2)


MADE_UP = {
    "__init__.py": "from made_up.ground import first\n",
    "compat/keras.py": "from keras.src.models import functional\n",
    "ground.py": "import sys\nfrom keras.src import ops\n\nframe = sys._getframe()\n",
    "table.py": "def rows():\n    return [\n" + "        1,\n" * 100 + "    ]\n",
    "long.py": "async def work():\n" + "    print()\n" * 80,
    "short.py": "def work():\n" + "    print()\n" * 79,
    "room/__init__.py": "from made_up.room import one\n",
    "room/one.py": "def work():\n    from made_up.room.two import other\n",
    "room/two.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from made_up.room import one\n",
    "room/own.py": "import made_up.room.own\nfrom made_up.ground import first\n",
    "taking.py": "from made_up.ground import _first\nfrom json import _default_decoder\nfrom made_up import ground\n",
}
FAULTS = {
    structure.guests: {"ground.py": ["line 2: from keras.src import ops", "line 4: frame = sys._getframe()"]},
    structure.long_functions: {"long.py": ["work: 81 lines"]},
    structure.circles: {
        "room/one.py": ["made_up.room.one -> made_up.room.two -> made_up.room.one"],
        "room/own.py": ["made_up.room.own -> made_up.room.own"],
        "room/two.py": ["made_up.room.two -> made_up.room.one -> made_up.room.two"],
    },
    structure.private_imports: {"taking.py": ["made_up.ground._first"]},
}


@kinds
def test_these_tests_can_fail(kind, tmp_path):
    for name, source in MADE_UP.items():
        path = tmp_path / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert {str(path): faults for path, faults in kind(tmp_path / "made_up").items()} == FAULTS[kind]


def test_the_walk_sees_imports():
    assert ("click", True) in set(imported(Path("cli/estimate_command.py")))
    assert ("kerasmem.estimation.cache", False) in set(imported(Path("cli/estimate_command.py")))


def test_every_room_is_known():
    assert {room_of(path) for path in MODULES} - {"__init__", "__main__"} <= set(ALLOWED)


def test_no_module_is_named_like_a_public_function():
    functions = {name for name in kerasmem.__all__ if name.islower()} - {"data"}
    assert not functions & {path.stem for path in MODULES}


def test_every_public_name_loads_and_is_documented():
    for name in kerasmem.__all__:
        value = getattr(kerasmem, name)
        if name != "__version__":
            assert value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kerasmem.nonsense
    assert set(dir(kerasmem)) == set(kerasmem.__all__)


HEAVY = "[name for name in ('tensorflow', 'keras', 'h5py', 'numpy', 'rich', 'pynvml') if name in sys.modules]"


@pytest.mark.parametrize("statement", ["import kerasmem", "import kerasmem.cli", "import kerasmem; dir(kerasmem)"])
def test_importing_loads_nothing_heavy(program, statement):
    assert program("-c", f"{statement}\nimport sys; print({HEAVY})").out.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["estimate", "-h"],
        ["devices", "-h"],
        ["max-batch", "-h"],
        ["compare", "-h"],
        ["watch", "-h"],
        ["doctor", "-h"],
        ["explain", "-h"],
        ["run", "-h"],
        ["data", "-h"],
        ["data", "convert", "-h"],
        ["advise", "-h"],
    ],
)
def test_help_loads_no_tensorflow(program, arguments):
    script = (
        f"import sys\nfrom kerasmem.cli import main\ntry: main({arguments!r})\nexcept SystemExit: pass\nprint({HEAVY})"
    )
    assert program("-c", script).out.splitlines()[-1] == "[]"


def test_the_test_of_cheap_imports_can_fail(program):
    assert "tensorflow" in program("-c", f"import kerasmem, sys; kerasmem.MemoryLogger; print({HEAVY})").out
