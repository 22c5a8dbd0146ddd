"""Compiles the Triton kernels for each GPU that Triton's assembler knows, on a machine without one: what the wrappers would launch."""

import importlib
import sys
from functools import partial

import pytest
import torch

from aurora.moe.expert_map import LocalFirst

triton = pytest.importorskip("triton", reason="compiling the kernels needs triton")

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)  # A100, RTX 30, L4, H100, B200, B300, RTX 50
KERNELS = "aurora.moe.permutation_triton"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gpu:
    """Triton's driver of a GPU that is not here, as far as compiling asks it."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@pytest.mark.parametrize("capability", [pytest.param(c, marks=() if c == 90 else pytest.mark.full) for c in CAPABILITIES])
def test_every_kernel_compiles(capability, monkeypatch, tmp_path):
    """Through the wrappers, with strides that are and are not multiples of 16; every result is machine code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else a warning
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from triton.runtime import driver, jit

    sys.modules.pop(KERNELS, None)  # of tests before, whose kernels may be the interpreter's
    permutation_triton = importlib.import_module(KERNELS)
    compiled, run = [], jit.JITFunction.run

    def compile_only(self, *args, warmup, **named):
        compiled.append(run(self, *args, warmup=True, **named))

    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Gpu(capability))
    places, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    calls = [partial(permutation_triton.local_first, torch.ones(3, 2, dtype=torch.long), LocalFirst(((0, 1), (0,), (1,)), 0))]
    for dtype in DTYPES:
        for width in (1030, 1024):
            rows = torch.zeros(4, width, dtype=dtype)
            calls.append(partial(permutation_triton.gather_rows, rows, places[:, 0], torch.empty_like(rows)))
        calls += [partial(permutation_triton.weighted_sum, rows, places, given) for given in (weights, weights.to(dtype), None)]
    for call in calls:
        call()
    assert len(compiled) == len(calls)
    for kernel in compiled:
        assert kernel.metadata.target.arch == capability
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
