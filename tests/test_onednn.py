"""Which CPUs the tests that hold oneDNN's figures run on."""

from __future__ import annotations

import onednn
import pytest


@pytest.mark.parametrize("flags", ["fpu avx avx2 fma", "fpu avx avx2 avx512f avx512_vnni"])
def test_a_cpu_with_wide_vectors_runs_its_kernels(flags):
    assert onednn.reason_against("x86_64", f"flags : {flags}\n") is None


def test_another_cpu_is_a_reason():
    assert "aarch64" in onednn.reason_against("aarch64", "")
    assert "AVX2" in onednn.reason_against("x86_64", "flags : fpu sse4_1 avx\n")
