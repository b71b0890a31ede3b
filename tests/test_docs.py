"""The code, outputs and links of the README and the manual are right."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest
import yaml

import kerasmem
from kerasmem.devices import kernels

pytestmark = pytest.mark.usefixtures("loaded_python")

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
TEXT = "\n".join(PAGES.values())
sys.path.insert(0, str(ROOT / "scripts"))
import docs_outputs as outputs  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))


# The figures of graph mode are those of oneDNN on a CPU with AVX-512 and two threads.
SHOWN_ON = kernels.CpuKernels(kernels.ONEDNN, ("float32", "bfloat16"), 2, 2)


def blocks(language, text=TEXT):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands():
    """Every `$ command` of the console blocks, with the output shown below it."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def marks_of(command):
    if "--backend jax" in command:
        return pytest.mark.skipif(find_spec("jax") is None, reason="needs jax: pip install 'kerasmem[jax]'")
    return pytest.mark.slow if " advise " in command else ()


KERASMEM = [
    pytest.param(command, output, id=command, marks=marks_of(command))
    for command, output in commands()
    if command.startswith("kerasmem ")
]


@pytest.mark.parametrize(("command", "output"), KERASMEM)
def test_commands_print_what_is_shown(cli, command, output, request, tmp_path, monkeypatch):
    keras.backend.clear_session()  # number layer names from the beginning
    request.getfixturevalue("mnist_cnn").save(tmp_path / "model.h5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda *_: SHOWN_ON)
    if "--backend" in command:  # this process has another backend
        text = outputs.run(command, tmp_path)
    else:
        result = cli(*shlex.split(command)[1:])
        assert result.code in (0, 3, 4), result.err
        text = result.out
    shown = [line.rstrip() for line in output.splitlines() if line.strip()]
    printed = iter(line.rstrip() for line in text.splitlines())
    for line in shown:  # in this order; "…" stands for lines left out
        assert line == "…" or line in printed, f"{line!r} is not printed by {command!r}:\n{text}"


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks("python", text)])
def test_python_blocks_run(program, page, tmp_path):
    """The blocks of a page run one after another."""
    preamble = (
        "import numpy as np, h5py, keras\n"
        "rng = np.random.default_rng(0)\n"
        "with h5py.File('train.h5', 'w') as f:\n"
        "    images = rng.integers(0, 255, (512, 28, 28, 1), dtype='u1')\n"
        "    f.create_dataset('images', data=images, chunks=(64, 28, 28, 1))\n"
        "    f['labels'] = rng.integers(0, 10, 512)\n"
        "x, y = rng.random((256, 28, 28, 1), 'f4'), rng.integers(0, 10, 256)\n"
        "def make():\n"
        "    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))\n"
        "    return model\n"
        "make().save('model.h5')\n"
    )
    code = "".join(f"model = make()\n{block}" for block in blocks("python", PAGES[page]))
    if "enable_memory_growth" in code:  # must come before anything else of TensorFlow
        preamble = "import kerasmem; kerasmem.enable_memory_growth()\n" + preamble
    (tmp_path / "page.py").write_text(preamble + code)
    result = program("page.py", cwd=tmp_path, env={"TF_CPU_ALLOCATOR_USE_BFC": "true"})
    assert result.code == 0, result.err[-3000:]


QUICK = ("convert", "shuffling")
SHOWN = [
    pytest.param(name, shown, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for _, name, shown, _ in outputs.BLOCK.findall(TEXT)
]


@pytest.mark.parametrize(("name", "shown"), SHOWN)
def test_outputs_shown_are_printed(name, shown, tmp_path):
    """Numbers may differ; `scripts/refresh_docs --outputs` updates them."""
    _, missing = outputs.refreshed(shown, outputs.SCENES[name](tmp_path))
    assert not missing


def test_every_block_of_text_is_some_commands_output():
    assert len(SHOWN) == len(blocks("text")) == len(outputs.SCENES)


def test_every_file_and_script_named_is_there():
    for path in set(re.findall(r"`((?:scripts|examples|tests|kerasmem)/[\w./-]+)`", TEXT)):
        assert (ROOT / path).exists(), path
    modules = re.findall(r"\b(?:[a-z0-9]+/)+\w+\.(?:py|json)\b", PAGES["docs/architecture.md"])
    missing = {path for path in modules if not any((root / path).exists() for root in (ROOT, ROOT / "kerasmem"))}
    assert modules and not missing


def test_every_public_name_in_the_manual_exists():
    for name in set(re.findall(r"kerasmem\.([A-Za-z_]\w*)", TEXT)) - {"py"}:
        modules = (ROOT / "kerasmem" / name, ROOT / "kerasmem" / f"{name}.py")
        assert name in kerasmem.__all__ or any(path.exists() for path in modules), name


def test_the_reference_has_every_public_name():
    described = re.findall(r"^::: kerasmem\.(\w+)$", PAGES["docs/reference/python.md"], re.MULTILINE)
    assert sorted(described) == sorted(set(kerasmem.__all__) - {"__version__"})


def test_docstrings_have_the_sections_that_the_reference_knows():
    for path in (ROOT / "kerasmem").rglob("*.py"):
        assert not re.search(r"^ *Example:$", path.read_text(), re.MULTILINE), f"{path}: write Examples:"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(kerasmem.__all__) - {"__version__", "data"} | set(kerasmem.data.__all__)))
def test_examples_of_public_docstrings_run(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(getattr(kerasmem, name, None) or getattr(kerasmem.data, name)):
        runner.run(example)
    assert not runner.failures


def test_every_link_leads_to_a_page():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Ignores Python's tags."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    named = re.findall(r"[\w/-]+\.md", json.dumps(nav))
    assert sorted(f"docs/{name}" for name in named) == sorted(set(PAGES) - {"README.md"})


def test_every_disagreement_with_public_readings_has_a_reason(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    from gpu_facts import compare

    rows = json.loads((ROOT / "scripts" / "bench" / "results" / "gpu_facts.json").read_text())["rows"]
    assert len(rows) >= 40 and all(row["why"] for row in rows)
    assert [compare(row, row["sizes"]) for row in rows] == rows
    assert all(row["reason"] for row in rows if row["agreement"] != "yes")
