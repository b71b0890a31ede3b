"""`kerasmem doctor`: the real TensorFlow, stand-ins that crash or hang as real ones do, and the rules on their own."""

import json

import pytest

from kerasmem.devices.examination import doctor, judge, self_report
from kerasmem.devices.host import HostMemory
from kerasmem.devices.machine import LiveDevice, LiveMachine
from kerasmem.errors import UsageError

HOST = HostMemory(2**34, 2**33)
CARD = LiveDevice(0, "gpu", "Tesla T4", "GPU-1", "7.5", 2**34, 2**20, 2**34 - 2**20, "550.54", None, 0)
WITH_CARD = LiveMachine((CARD,), None, HOST)
HIDDEN = LiveMachine((LiveDevice(*[*CARD.to_dict().values()][:-2], None),), None, HOST)
WITHOUT = LiveMachine((), "no NVIDIA driver here", HOST)
DONE = {"stage": "done", "built_with_cuda": True, "jit_compile": True, "keras": "3", "backend": "tensorflow"}
SEEN = {**DONE, "gpus": [{"name": "/physical_device:GPU:0", "card": "Tesla T4", "growth": True}]}
LOST = {"package": "keras", "feature": "kerasmem.fit", "missing": "keras.src:part"}
MISSING = "dso_loader.cc:144] Could not load dynamic library '{}'; dlerror: not found\n"


def sentences(facts, machine, environ, log):
    return {f"{f.kind}: {f.what} | {f.fix}" for f in judge(self_report(facts, log), machine, environ)}


def case(expected, facts=DONE, machine=WITH_CARD, log="", **environ):
    return pytest.param(facts, machine, environ, log, expected, id=expected[:40])


@pytest.mark.parametrize(
    ("facts", "machine", "environ", "log", "expected"),
    [
        case("note: no GPU: no NVIDIA driver here", machine=WITHOUT),
        case("problem: TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES=''", CUDA_VISIBLE_DEVICES=""),
        case("note: TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES='-1'", machine=WITHOUT, CUDA_VISIBLE_DEVICES="-1"),
        case("CUDA_VISIBLE_DEVICES='7' has no GPU of this machine", machine=HIDDEN, CUDA_VISIBLE_DEVICES="7"),
        case("built without CUDA | pip install 'tensorflow", {**DONE, "built_with_cuda": False}),
        case("loaded: libcudnn.so.9 | pip install", log=MISSING.format("libcudnn.so.9")),
        case("install the NVIDIA driver", log=MISSING.format("libcuda.so.1")),
        case("driver is too old", log="CUDA driver version is insufficient for CUDA runtime version"),
        case("535.1 and its library", log="kernel version 535.1 does not match DSO version 550.2 --"),
        case("its log has no reason"),
        case("fine: TensorFlow sees GPU:0 (Tesla T4)", SEEN),
        case("note: memory growth is off", {**SEEN, "gpus": [{**SEEN["gpus"][0], "growth": False}]}),
        case("note: TF_GPU_ALLOCATOR=cuda_malloc_async", SEEN, TF_GPU_ALLOCATOR="cuda_malloc_async"),
        case("problem: TF_GPU_ALLOCATOR must be cuda_malloc_async or unset; got 'bfc2'", SEEN, TF_GPU_ALLOCATOR="bfc2"),
        case("problem: TF_FORCE_GPU_ALLOW_GROWTH='1' has no effect", SEEN, TF_FORCE_GPU_ALLOW_GROWTH="1"),
        case("note: Keras runs on jax", {**SEEN, "backend": "jax"}),
        case("fine: XLA is on by default", SEEN),
        case("note: kerasmem.fit does not work: keras.src:part is missing", {**SEEN, "lost": [LOST]}),
        case("install it:", {"stage": "import tensorflow"}, log="ModuleNotFoundError: No module named 'tensorflow'"),
    ],
)
def test_the_rules(facts, machine, environ, log, expected):
    found = sentences(facts, machine, environ, log)
    assert any(expected in sentence for sentence in found), found


def test_what_works_is_no_problem():
    found = sentences(SEEN, WITH_CARD, {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, "")
    assert not [sentence for sentence in found if not sentence.startswith("fine")], found


def test_the_real_tensorflow(cli):
    done = cli("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["works"] and not found["sees_gpu"], done.err
    assert found["tensorflow"]["failure"] is None and found["tensorflow"]["jit_compile"] is False
    assert not found["tensorflow"]["lost"]
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert any("CUDA_VISIBLE_DEVICES" in f["what"] or "no GPU" in f["what"] for f in found["findings"])


BODY = {
    "crash": "import os; os.abort()",
    "hang": "import time; time.sleep(600)",
    "broken": "raise ImportError('libtensorflow_cc.so.2: \\x1b[31mcannot open shared object file')",
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("crash", "could not import tensorflow: it crashed (SIGABRT)"),
        ("hang", "could not import tensorflow: it had not ended after 3 s"),
        ("broken", "could not import tensorflow: ImportError: libtensorflow_cc.so.2: \\x1b[31mcannot open"),
    ],
)
def test_a_tensorflow_that_fails_is_reported(cli, monkeypatch, tmp_path, body, expected):
    (tmp_path / "tensorflow.py").write_text(BODY[body])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = cli("doctor", "--timeout", 3 if body == "hang" else 60)
    assert done.code == 1 and "Traceback" not in done.err
    assert done.out.startswith("✘ TensorFlow " + expected), done.out
    assert "\nPROBLEM: TensorFlow " + expected in done.out
    assert "\x1b" not in done.out and "fix: " in done.out


def test_modules_of_the_folder_are_not_run(cli, monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tensorflow.py").write_text(BODY["broken"])
    (tmp_path / "json.py").write_text("open('ran', 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.chdir(tmp_path)
    assert cli("doctor").out.startswith("✘ TensorFlow could not import tensorflow: ImportError")
    assert not (tmp_path / "ran").exists()


def test_wrong_usage(cli):
    done = cli("doctor", "--timeout", "0")
    assert done.code == 2 and "--timeout': 0.0 is not in the range" in done.err
    with pytest.raises(UsageError):
        doctor(timeout=float("nan"))
