"""Exceptions of any kind are read, with their causes, and never raise."""

from __future__ import annotations

from pathlib import Path

import pytest

import kerasmem
from kerasmem.diagnosis.diagnosis import Diagnosis, Suggestion
from kerasmem.errors import InputError

OOM = "OOM when allocating tensor with shape[256,28,28,96] and type float on /device:GPU:0 by allocator GPU_0_bfc"


class ResourceExhaustedError(Exception):
    """Has what TensorFlow's has."""

    def __init__(self, message, op=None):
        super().__init__(message)
        self.op = op


class Op:
    name = "gradient_tape/net_1/mixed_4_1/Conv2D"


class Hostile(Exception):
    def __str__(self):
        raise ValueError("no")

    @property
    def message(self):
        raise KeyError("no")


def raised(error, cause=None):
    try:
        try:
            raise cause or ValueError("before")
        except Exception as first:
            raise error from (first if cause else None)
    except Exception as second:
        return second


def test_message_and_operation_of_tensorflow():
    found = kerasmem.explain_oom(ResourceExhaustedError(OOM, Op()))
    assert (found.layer, found.pass_, found.device) == ("mixed_4", "backward", "GPU:0")
    assert kerasmem.explain_oom(ResourceExhaustedError("Received message larger than max (9 vs. 4)")).family == "limit"


def test_the_call_in_the_traceback_has_the_batch_size():
    class Model:
        def fit(self, x, batch_size):
            raise ResourceExhaustedError(OOM.replace("256", str(len(x))))

    try:
        Model().fit([0] * 60000, batch_size=32)
    except ResourceExhaustedError as error:
        found = kerasmem.explain_oom(error)
    assert "whole arrays" in found.summary and "Stream" in found.suggestions[0].what


class JaxRuntimeError(RuntimeError):
    """Named as JAX names it."""

    __module__ = "jax.errors"


def test_an_exception_of_jax_says_what_its_text_says():
    message = (
        "RESOURCE_EXHAUSTED: Failed to get configs for: 17 out of 106 instructions. Example failure: \n"
        "Out of memory while trying to allocate 2.02GiB with allocator GPU_0_bfc on device 0."
    )  # a step of batch 8192 on an H100
    found = kerasmem.explain_oom(JaxRuntimeError(message))
    assert found == kerasmem.explain_oom(f"jax.errors.JaxRuntimeError: {message}")
    assert (found.family, found.warnings) == ("jax", ())
    assert "autotuning" in found.summary


def test_causes_are_read():
    found = kerasmem.explain_oom(raised(RuntimeError("the trial failed"), ResourceExhaustedError(OOM)))
    assert found.out_of_memory and found.tensor_shape == (256, 28, 28, 96)
    assert kerasmem.explain_oom(raised(RuntimeError("the trial failed"), KeyError("x"))).out_of_memory is False


def test_a_memory_error_needs_no_message():
    assert kerasmem.explain_oom(MemoryError()).family == "host"


@pytest.mark.parametrize("error", [Hostile(), ValueError(), KeyError(b"\xff"), OSError(28, "No space left on device")])
def test_odd_exceptions_are_no_out_of_memory(error):
    assert kerasmem.explain_oom(error).out_of_memory is False


def test_a_ring_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert kerasmem.explain_oom(first).out_of_memory is False


def test_groups():
    group = pytest.importorskip("builtins")
    if not hasattr(group, "ExceptionGroup"):
        pytest.skip("Python 3.11 has groups")
    assert kerasmem.explain_oom(group.ExceptionGroup("two", [ValueError("x"), RuntimeError(OOM)])).out_of_memory


def test_paths_and_wrong_things(tmp_path):
    (tmp_path / "train.log").write_text(OOM)
    assert kerasmem.explain_oom(tmp_path / "train.log").lines == (1, 1)
    assert kerasmem.explain_oom(str(tmp_path / "train.log")).lines == (1, 1)
    for wrong in (tmp_path / "none.log", tmp_path, Path("a\0b"), "mistyped.log"):
        with pytest.raises(InputError):
            kerasmem.explain_oom(wrong)
    with pytest.raises(TypeError, match="got int"):
        kerasmem.explain_oom(7)


def test_round_trip():
    found = kerasmem.explain_oom(OOM)
    data = found.to_dict()
    assert data["format_version"] == 1 and data["pass"] is None and data["tensor_shape"] == [256, 28, 28, 96]
    assert Diagnosis.from_dict({**data, "later_field": 1}) == found
    assert isinstance(found.suggestions[0], Suggestion)
    for wrong in ({**data, "format_version": 2}, {}, {"format_version": 1}, {**data, "suggestions": [3]}):
        with pytest.raises(InputError):
            Diagnosis.from_dict(wrong)


def test_tensorflow_is_not_loaded(program):
    script = (
        "import kerasmem, sys; kerasmem.explain_oom('OOM'); print('tensorflow' in sys.modules, 'numpy' in sys.modules)"
    )
    assert program("-c", script).out.split() == ["False", "False"]
