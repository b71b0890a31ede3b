"""Which package may import which, private parts of other projects stay in compat/, and importing kerasmem is cheap."""

from __future__ import annotations

import ast
import graphlib
import json
import re
from pathlib import Path

import pytest

import kerasmem

PACKAGE = Path(kerasmem.__file__).parent
SOURCES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
PRIVATE = re.compile(r"keras\.src|tensorflow\.python|_getframe|currentframe|_current_frames|\bf_locals\b|\bf_back\b")

# package -> the packages that it may import besides the root modules, which all may import
ROOT_MODULES = {"errors", "units", "checks", "files", "records"}
ALLOWED = {
    "errors": set(),
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
    "display": {"estimation", "models", "monitoring", "profiling", "rendering"},
    "cli": {
        "cluster", "compat", "data", "datatools", "devices", "diagnosis", "display", "estimation", "hdf5", "models",
        "monitoring", "processes", "profiling", "recovery", "rendering", "streaming", "training",
    },
}  # fmt: skip
# Rendering imports results, not the code that computes them.
RESULTS = {
    "kerasmem.estimation.report", "kerasmem.estimation.formula", "kerasmem.estimation.search",
    "kerasmem.estimation.card_ranking", "kerasmem.estimation.many",
    "kerasmem.estimation.comparing", "kerasmem.monitoring.timeline", "kerasmem.devices.catalogue",
    "kerasmem.devices.machine", "kerasmem.devices.examination", "kerasmem.monitoring.tracking",
    "kerasmem.monitoring.curves", "kerasmem.monitoring.log_summary",
    "kerasmem.profiling.results", "kerasmem.diagnosis.diagnosis",
    "kerasmem.datatools.reports", "kerasmem.recovery.advice",
}  # fmt: skip
# library -> the packages that may import it
ONLY_IN = {
    "click": {"cli"},
    "pynvml": {"devices"},
    "psutil": {"devices"},
    "h5py": {"compat", "models", "hdf5", "datatools", "streaming"},
    "pyarrow": {"datatools"},
    "PIL": {"datatools"},
    "rich": {"rendering", "cli", "display"},
    "cattrs": {"records"},
}
# Modules that are loaded only for a public name that needs Keras anyway.
KERAS_AT_THE_TOP = {
    "monitoring/logger.py", "streaming/sequence.py", "training/checkpoint.py",
    "training/fitting.py", "training/indexed_sources.py", "training/resume.py", "training/run_state.py",
    "training/sources.py",
    "training/trainer.py", "training/steps/batches.py", "training/steps/splitting.py", "training/steps/divisors.py",
    "training/steps/engine.py", "training/steps/remote.py",
    "training/recompute/call_gradients.py", "training/recompute/gradient.py", "training/recompute/model.py",
    "training/recompute/segments.py",
}  # fmt: skip


def package_of(path):
    return path.parts[0].removesuffix(".py")


def dotted(path):
    return ".".join(("kerasmem", *path.with_suffix("").parts)).removesuffix(".__init__")


def imports(source):
    """Yield (module, names, is_at_top) for each import statement."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), [alias.name for alias in node.names], node in tree.body


def faults_of_imports(path, source):
    package = package_of(path)
    for name, names, is_at_top in imports(source):
        first, *rest = name.split(".")
        if not first:
            yield f"{path}: relative import of {names}"
        elif first == "kerasmem" and rest and package not in ("__init__", "__main__"):
            if rest[0] != package and rest[0] not in ROOT_MODULES | ALLOWED[package]:
                yield f"{path} imports {name}"
            elif package == "rendering" and rest[0] not in ROOT_MODULES | {"rendering"} and name not in RESULTS:
                yield f"{path} imports {name}, not a module of results"
            if any(part.startswith("_") for part in (*rest, *names)):
                yield f"{path} imports the private name {name}.{names}"
        elif first in ONLY_IN and package not in ONLY_IN[first]:
            yield f"{path} imports {first}"
        elif first in ("tensorflow", "keras", "pynvml") and is_at_top and str(path) not in KERAS_AT_THE_TOP:
            yield f"{path} imports {first} at its top"


def imported_modules(source, modules):
    """The kerasmem modules that a source imports; `from a import b` is `a.b` if that is a module."""
    for name, names, _ in imports(source):
        inner = {f"{name}.{each}" for each in names}
        yield from (inner & modules) | ({name} & modules if inner - modules or not inner else set())


def import_cycle(sources):
    """The first cycle of imports, or None. `kerasmem/__init__.py` is left out: it imports lazily."""
    modules = {dotted(path): source for path, source in sources.items() if str(path) != "__init__.py"}
    graph = {name: set(imported_modules(source, set(modules))) for name, source in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_imports_run_downwards():
    faults = [fault for path, source in SOURCES.items() for fault in faults_of_imports(path, source)]
    assert not faults, json.dumps(faults, indent=2)


def test_layers_of_hdf5_import_downwards():
    layers = ["format", "io", "rows"]
    for path, source in SOURCES.items():
        if path.parts[0] == "hdf5" and len(path.parts) == 3:
            above = layers[layers.index(path.parts[1]) + 1 :]
            names = [name for name, _, _ in imports(source)]
            assert not [name for name in names if name.startswith(tuple(f"kerasmem.hdf5.{layer}" for layer in above))]


def test_modules_import_one_another_in_no_cycle():
    assert import_cycle(SOURCES) is None


def test_private_parts_of_others_stay_in_compat():
    named = {str(path): PRIVATE.findall(text) for path, text in SOURCES.items() if package_of(path) != "compat"}
    assert not {path: names for path, names in named.items() if names}


def test_no_module_is_named_like_a_public_function():
    functions = {name for name in kerasmem.__all__ if name.islower()} - {"data"}
    assert not functions & {path.stem for path in SOURCES}


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


def test_help_loads_no_tensorflow(program):
    script = (
        "import sys\nfrom kerasmem.cli import main\n"
        "def every_help(command, words):\n"
        "    try: main([*words, '-h'])\n"
        "    except SystemExit: pass\n"
        "    for name in getattr(command, 'list_commands', lambda _: [])(None):\n"
        "        every_help(command.get_command(None, name), [*words, name])\n"
        f"every_help(sys.modules['kerasmem.cli'].cli, [])\nprint({HEAVY})"
    )
    assert program("-c", script).out.splitlines()[-1] == "[]"
