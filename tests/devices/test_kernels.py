"""Which kernels TensorFlow will run on a CPU, by its features and the environment."""

from __future__ import annotations

import os

import pytest

from kerasmem.devices import kernels
from kerasmem.devices.kernels import EIGEN, ONEDNN, cpu_kernels, kernel_variables

OLD = frozenset({"fpu", "avx", "avx2", "fma"})
NEW = OLD | {"avx512f", "avx512_vnni"}


def test_this_process_is_asked(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "3")
    for wrong in ("--5", "\N{SUPERSCRIPT TWO}", "no number"):
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", wrong)
        here = cpu_kernels()
    assert here.kind in (ONEDNN, EIGEN) and (here.dtypes == ()) == (here.kind == EIGEN)
    assert here.inter_op_threads == 3
    assert here.intra_op_threads == len(os.sched_getaffinity(0))
    assert kernels.TITLES[here.kind] == here.title


def test_the_dtypes_of_onednn_follow_the_features_of_the_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "onednn_is_on", lambda: True)
    monkeypatch.setattr(kernels, "cpu_flags", lambda: OLD)
    assert (cpu_kernels().kind, cpu_kernels().dtypes) == (ONEDNN, ("float32",))
    monkeypatch.setattr(kernels, "cpu_flags", lambda: NEW | {"avx512_fp16"})
    assert cpu_kernels().dtypes == ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("limit", "copied", "converted"),
    [
        ("", ("bfloat16", "float16"), ()),
        ("unknown", ("bfloat16", "float16"), ()),
        ("AVX512_CORE_AMX", ("bfloat16", "float16"), ()),
        ("AVX512_CORE_FP16", ("float16",), ()),
        ("avx512_core_bf16", (), ()),
        ("AVX512_CORE_VNNI", (), ("bfloat16",)),
        ("AVX2", (), ()),
    ],
)
def test_onednn_uses_the_instructions_that_the_environment_allows(monkeypatch, limit, copied, converted):
    monkeypatch.setattr(kernels, "onednn_is_on", lambda: True)
    monkeypatch.setattr(kernels, "cpu_flags", lambda: NEW | {"avx512_bf16", "avx512_fp16", "amx_bf16"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert (cpu_kernels().copied, cpu_kernels().converted) == (copied, converted)


def test_a_cpu_without_bfloat16_instructions_converts_it(monkeypatch):
    monkeypatch.setattr(kernels, "onednn_is_on", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for flags, converted in ((NEW, ("bfloat16",)), (OLD, ()), (NEW | {"avx512_bf16"}, ())):
        monkeypatch.setattr(kernels, "cpu_flags", lambda flags=flags: flags)
        assert cpu_kernels().converted == converted


def test_threads_are_one_for_each_core_that_taskset_leaves():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        here = cpu_kernels()
    finally:
        os.sched_setaffinity(0, cores)
    assert (here.inter_op_threads, here.intra_op_threads) == (1, 1)


@pytest.mark.parametrize("kind", [ONEDNN, EIGEN])
def test_named_kernels_do_not_depend_on_the_machine(monkeypatch, kind):
    seen = set()
    for flags, cores, cache, is_on in ((OLD, 2, 2**20, False), (NEW | {"amx_bf16", "avx512_fp16"}, 64, 2**28, True)):
        monkeypatch.setattr(kernels, "cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr(kernels, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(kernels, "last_cache_bytes", lambda cache=cache: cache)
        monkeypatch.setattr(kernels, "onednn_is_on", lambda is_on=is_on: is_on)
        seen.add(cpu_kernels(kind, 4))
    (named,) = seen
    assert named.profile == {"kernels": kind, "threads": 4}


def test_kernels_alone_keep_the_threads_of_the_process(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "3")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert cpu_kernels(EIGEN).profile == {"kernels": EIGEN, "threads": 3, "intra_op_threads": 5}
    assert cpu_kernels(threads=4).profile == {"kernels": cpu_kernels().kind, "threads": 4}


def test_variables_give_a_process_the_named_kernels():
    threads = {"TF_NUM_INTEROP_THREADS": "4", "TF_NUM_INTRAOP_THREADS": "4"}
    assert kernel_variables(EIGEN, 4) == {"TF_ENABLE_ONEDNN_OPTS": "0", **threads}
    assert kernel_variables(ONEDNN) == {"TF_ENABLE_ONEDNN_OPTS": "1"} and kernel_variables() == {}
