"""The command line: exit codes, messages without tracebacks, and output that scripts can read."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest

import kerasmem
from kerasmem.cli import COMMANDS

pytestmark = pytest.mark.usefixtures("loaded_python")


@pytest.fixture
def model_file(mnist_cnn, tmp_path):
    mnist_cnn.save(tmp_path / "model.h5")
    return tmp_path / "model.h5"


def test_help_names_every_command(cli):
    page = cli("--help")
    assert page.code == 0
    for name in COMMANDS:
        assert name in page.out
        assert cli(name, "-h").code == cli(name, "--help").code == 0


def test_version(cli):
    assert kerasmem.__version__ in cli("--version").out


def test_estimate_in_a_pipe_is_plain_text(cli, model_file):
    result = cli("estimate", model_file, "-v")
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert "16,569,936 B" in result.out


def test_json_is_one_object(cli, model_file):
    result = cli("estimate", model_file, "--batch-size", 64, "--device", "t4", "--method", "formula", "--json")
    data = json.loads(result.out)
    assert result.code == 0
    assert data["settings"]["batch_size"] == 64
    assert data["formula"]["total_bytes"] == 8_895_568 + 64 * 239_824
    assert data["device"]["verdict"] == "fits"
    assert data["settings"]["device"] == data["device"]["name"]


def test_data_replaces_shapes_and_the_batch(cli, model_file, tmp_path):
    script = tmp_path / "data.py"
    script.write_text(
        "import numpy as np\n\ndef get():\n    return np.zeros((8, 28, 28, 1)), np.zeros(8, 'int32'), np.ones(8)\n"
    )
    result = cli("estimate", model_file, "--data", f"{script}:get", "--method", "graph", "--json")
    data = json.loads(result.out)
    assert (data["settings"]["batch_size"], data["bytes"]["inputs"]) == (8, 8 * (28 * 28 * 4 + 4 + 4))
    weighted = json.loads(cli("estimate", model_file, "-b", 8, "--sample-weight", "-m", "graph", "--json").out)
    assert weighted["bytes"]["inputs"] == data["bytes"]["inputs"]
    assert cli("estimate", model_file, "--data", f"{script}:other").code == 2


def test_csv(cli, model_file):
    rows = list(csv.DictReader(io.StringIO(cli("estimate", model_file, "--csv", "--method", "formula").out)))
    assert sum(int(row["bytes"]) for row in rows) == 16_569_936


@pytest.mark.parametrize(
    ("device", "code", "verdict"),
    [("t4", 0, "fits"), ("16GB", 0, "fits"), ("16MiB", 4, "too close to call"), ("2MiB", 3, "does not fit")],
)
def test_exit_codes_of_the_verdict(cli, model_file, device, code, verdict):
    result = cli("estimate", model_file, "--device", device, "--method", "formula")
    assert result.code == code
    assert verdict in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: kerasmem"),
        (["estimat"], "the command must be one of estimate"),
        (["estimate"], "MODEL must be a file"),
        (["estimate", "absent.h5", "--bad-option"], "No such option"),
        (["estimate", "absent.h5", "--batch-size", "0"], "0 is not in the range"),
        (["estimate", "absent.h5", "--batch-size", "10000000000"], "--batch-size must be a whole number from 1 to"),
        (["estimate", "absent.h5", "--device", "t44"], "did you mean 't4'?"),
        (["estimate", "absent.h5", "--json", "--csv"], "choose one"),
        (["estimate", "absent.h5", "--time-limit", "nan"], "is not a number"),
        (["estimate", "absent.h5", "--factory-arg", "depth=" + "[" * 100_000], "does not exist"),
        (["estimate", "absent.h5", "--grid", "depth=" + "[" * 100_000], "does not exist"),
        (["estimate", "keras.applications:VGG16", "--input-shape", "x=a,b"], "must be sizes of at least 1"),
        (["estimate", "keras.applications:VGG16", "--custom-objects", "no.such.module"], "cannot be imported"),
        (["estimate", "keras.applications:VGG16", "--loss", "mean_squared_eror"], "did you mean 'mean_squared_error'?"),
        (["estimate", "keras.applications:VGG16", "--optimizer", "adamm"], "did you mean 'adam'?"),
        (["estimate", "keras.applications:ResNet51"], "has no function 'ResNet51'; did you mean 'ResNet50'?"),
        (["estimate", "no.module:build"], "cannot be imported"),
    ],
)
def test_wrong_usage_is_exit_2_and_one_message(cli, arguments, message):
    result = cli(*arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err + result.out
    assert result.out == ""


WRONG_NAMES = """
import contextlib, io, sys
from kerasmem.cli import main
for arguments, message in (
    ("estimat", "did you mean 'estimate'?"),
    ("estimate modl.h5", "modl.h5: the file does not exist"),
    ("compare absent model.h5", "absent: the file does not exist"),
    ("estimate ResNet50", "keras.applications:ResNet50"),
    ("estimate s3://bucket/model.h5", "must be a local file"),
    ("estimate absent.py:build", "absent.py: the file does not exist"),
    ("estimate --factory build", "must be package.module:function"),
    ("estimate model.h5 --method grap", "did you mean 'graph'?"),
    ("estimate model.h5 --mode trian", "did you mean 'train'?"),
):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(arguments.split())
        except SystemExit as end:
            assert end.code == 2, (arguments, end.code)
    assert message in said.getvalue(), (arguments, said.getvalue())
    assert not {"keras", "tensorflow"} & set(sys.modules), arguments
"""


@pytest.mark.usefixtures("new_python")
def test_a_wrong_name_is_told_before_keras_is_imported(program, tmp_path):
    (tmp_path / "model.h5").write_bytes(b"")
    result = program("-c", WRONG_NAMES, cwd=tmp_path)
    assert result.code == 0, result.err


def test_a_failing_factory_is_exit_1(cli, tmp_path):
    (tmp_path / "f.py").write_text("def build():\n    raise RuntimeError('boom \\x1b[2J')\n")
    result = cli("estimate", f"{tmp_path}/f.py:build")
    assert result.code == 1
    assert "boom \\x1b[2J" in result.err
    assert "Traceback" not in result.err


def test_what_a_factory_prints_stays_out_of_the_result(program, tmp_path):
    (tmp_path / "f.py").write_text(
        "import keras, sys\n"
        "def build():\n"
        "    print('building'); print('careful', file=sys.stderr)\n"
        "    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])\n"
    )
    result = program("-m", "kerasmem", "estimate", "f.py:build", "--method", "formula", "--json", cwd=tmp_path)
    assert json.loads(result.out)["model"]["parameters"] == 15
    assert result.err == "building\ncareful\n"


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(program, where, tmp_path):
    arguments = ["estimate", str(tmp_path / "absent.h5")]
    arguments = ["--debug", *arguments] if where == "before" else [*arguments, "--debug"]
    result = program("-m", "kerasmem", *arguments)
    assert result.code == 2  # as without it
    assert "Traceback" in result.err
    assert "ModelFileError" in result.err


@pytest.mark.usefixtures("new_python")
def test_a_full_disk_is_no_defect(model_file):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kerasmem", "estimate", model_file, "--method", "formula"],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"


def test_an_error_names_the_file(cli, tmp_path, monkeypatch):
    import keras

    image = keras.Input((None, None, 3), name="image")
    keras.Model(image, keras.layers.Conv2D(2, 5)(image)).save(tmp_path / "open.keras")
    monkeypatch.chdir(tmp_path)
    unknown = cli("estimate", "open.keras").err
    assert unknown.startswith("Error: open.keras: inputs with unknown dimensions: 'image'")
    assert "--input-shape image=224,224,3" in unknown
    few = cli("estimate", "open.keras", "--input-shape", "224,224").err
    assert few.startswith("Error: open.keras: --input-shape image must have 3 sizes")
    small = cli("estimate", "open.keras", "--input-shape", "2,2,3")
    assert small.err.startswith("Error: open.keras: model ")
    assert (small.code, cli("estimate", "open.keras").code) == (1, 2)


def test_a_defect_is_named_as_one(cli, model_file, monkeypatch):
    from kerasmem.estimation import shapes

    monkeypatch.setattr(shapes, "infer_layers", lambda *a: 1 / 0)
    result = cli("estimate", model_file)
    assert result.code == 1
    assert "unexpected ZeroDivisionError" in result.err
    assert "--debug" in result.err
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("new_python")
def test_a_closed_pipe_is_no_error(model_file):
    command = f"{sys.executable} -m kerasmem devices | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert "In this machine" in done.stdout


def test_another_keras_backend_is_a_clear_message(program, model_file):
    for backend in ("jax", "torch", "nonsense"):
        result = program("-m", "kerasmem", "estimate", model_file, env={"KERAS_BACKEND": backend})
        assert result.code == 2
        assert f"'{backend}'" in result.err
        assert "KERAS_BACKEND=tensorflow" in result.err
        assert "Traceback" not in result.err


def test_devices(cli):
    result = cli("devices")
    assert result.code == 0
    for name in ("t4", "a100-80", "rtx5090", "Host"):
        assert name in result.out
    data = json.loads(cli("devices", "--json").out)
    card = next(card for card in data["catalogue"] if card["key"] == "t4")
    assert card["memory_source"].startswith("https://")
    assert card["available_bytes"] < card["memory_bytes"]
    assert data["machine"]["host"]["total_bytes"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("new_python")
def test_sixteen_hundred_million_parameters_in_little_memory(program, tmp_path):
    """The whole command stays under 1.5 GB of host memory, where the weights alone would take 6.4 GB."""
    (tmp_path / "big.py").write_text(
        "import keras\n"
        "def build():\n"
        "    return keras.Sequential([keras.Input((1000,)), keras.layers.Dense(40_000, name='a'),\n"
        "                             keras.layers.Dense(39_000, name='b'), keras.layers.Dense(10)])\n"
        "if __name__ == '__main__':\n"
        "    from kerasmem.models.weightless import weightless\n"
        "    with weightless():\n"
        "        open('big.json', 'w').write(build().to_json())\n"
    )
    assert program("big.py", cwd=tmp_path).code == 0
    measure = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run([sys.executable, '-m', 'kerasmem', 'estimate', sys.argv[1], '--optimizer', 'adam',\n"
        "                       '--json']).returncode\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code, file=sys.stderr)\n"
    )
    for source in ("big.json", "big:build"):
        result = program("-c", measure, source, cwd=tmp_path)
        data = json.loads(result.out)
        kibibytes, code = map(int, result.err.split())
        assert code == 0
        assert data["model"]["parameters"] > 1_600_000_000
        assert data["settings"]["method"] == "graph" and data["bytes"]["optimizer"] > 12_800_000_000
        assert kibibytes * 1024 < 1_500_000_000
