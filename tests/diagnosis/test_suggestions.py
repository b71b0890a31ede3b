"""What is suggested fits the case, and its code names what there is."""

from __future__ import annotations

import ast
import re

import keras
import pytest
from corpus import POSITIVE

import kerasmem
from kerasmem.diagnosis.causes import Figures
from kerasmem.diagnosis.wording import smaller_batch

FOUND = [(name, kerasmem.explain_oom(text)) for name, text, _ in POSITIVE]


@pytest.mark.parametrize(("name", "found"), FOUND, ids=[name for name, _ in FOUND])
def test_code_names_what_exists(name, found):
    for each in found.suggestions:
        assert each.what[0].isupper() and not each.what.endswith(".") and each.why and each.code
        for public in re.findall(r"kerasmem\.(\w+)", each.code):
            assert public in kerasmem.__all__, each.code
        for path in re.findall(r"keras\.((?:\w+\.)*\w+)\(", each.code.replace("kerasmem.", "")):
            value = keras
            for part in path.split("."):
                value = getattr(value, part)
        if each.code.startswith(("model", "kerasmem.", "keras.", "x =", "with")):
            ast.parse(each.code)


def test_the_case_decides():
    found = dict(FOUND)

    def told(name):
        return " ".join(each.what + " " + each.code for each in found[name].suggestions)

    assert "cuda_malloc_async" in told("bfc fragmented, units") and "cuda_malloc_async" not in told(
        "bfc capacity, units"
    )
    assert "nvidia-smi" in told("bfc other process") and "enable_memory_growth" in told("cudnn")
    assert "H5ChunkSequence" in told("numpy") and "float32" in told("numpy") and "astype" in told("tf double")
    assert "jit_compile=False" in told("xla today") and "jit_compile" not in told("tf op")
    assert "mixed_bfloat16" in told("tpu hbm") and "mixed_float16" in told("tf op")
    assert "optimizers" in told("optimizer") and "instead of" not in told("optimizer")
    assert "batches of 16 instead of 48" in told("tf op")
    assert "--mem" in told("slurm") and "dmesg" in told("killed")
    assert "kerasmem.fit(model, x, y, batch_size=48)" in told("tf op") and "kerasmem.fit" in told("xla today")
    assert "kerasmem.fit" not in told("tpu hbm") and "kerasmem.advise" in told("optimizer")


@pytest.mark.parametrize(
    ("batch", "limit", "used", "asked", "smaller"),
    [
        (64, 8, 8, 1, 32),
        (64, 8, 8, 60, 4),
        (48, None, None, 1, 16),
        (3, 8, 8, 1, 1),
        (1, 8, 8, 1, 1),
        (1000, 10, 5, 6, 256),
    ],
)
def test_a_smaller_batch(batch, limit, used, asked, smaller):
    assert smaller_batch(batch, Figures(asked, None, None, limit, used, None, None, "capacity")) == smaller


def test_a_batch_of_one_is_not_divided():
    text = (
        "OOM when allocating tensor with shape[1,512,512,32] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n"
        "\t [[{{node functional_1/conv2d_1/Conv2D}}]] [Op:__inference_one_step_on_iterator_1]"
    )
    told = [each.code for each in kerasmem.explain_oom(text).suggestions]
    assert told[1] == "model = kerasmem.recompute(model)"
    assert not any("kerasmem.fit" in each for each in told)
