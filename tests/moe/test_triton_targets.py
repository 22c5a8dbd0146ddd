"""Compiles the Triton kernels for each GPU that Triton's assembler knows, on a machine without one: what the wrappers would launch."""

import importlib
import re
import sys
from functools import partial

import pytest
import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat

triton = pytest.importorskip("triton", reason="compiling the kernels needs triton")

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)  # A100, RTX 30, L4, H100, B200, B300, RTX 50
KERNELS = "aurora.moe.permutation_triton"
PUSH = "aurora.moe.push_triton"
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


EVERY_GPU = pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=() if c == 90 else pytest.mark.full) for c in CAPABILITIES]
)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Makes launches compile for a capability instead; what they compile is in the list that is returned."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else a warning
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from triton.runtime import driver, jit

    made, run = [], jit.JITFunction.run

    def compile_only(self, *args, warmup, **named):
        made.append(run(self, *args, warmup=True, **named))

    def compile_for(capability):
        monkeypatch.setattr(jit.JITFunction, "run", compile_only)
        monkeypatch.setattr(driver, "_active", Gpu(capability))
        return made

    return compile_for


def fresh(name):
    """The module with kernels of its own: those of tests before may be the interpreter's."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@EVERY_GPU
def test_every_kernel_compiles(capability, compiled):
    """Through the wrappers, with strides that are and are not multiples of 16; every result is machine code."""
    permutation_triton, made = fresh(KERNELS), compiled(capability)
    places, weights = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    calls = []
    for dtype in DTYPES:
        for width in (1030, 1024):
            rows = torch.zeros(4, width, dtype=dtype)
            calls.append(partial(permutation_triton.gather_rows, rows, places[:, 0], torch.empty_like(rows)))
        calls.append(
            partial(permutation_triton.silu_gate, torch.zeros(4, 2048, dtype=dtype), torch.zeros(3, dtype=torch.int32))
        )
        calls += [partial(permutation_triton.weighted_sum, rows, places, given) for given in (weights, weights.to(dtype), None)]
    for call in calls:
        call()
    check_machine_code(made, len(calls), capability)


@pytest.mark.parametrize("turned", ["rows", "weights"])
def test_sums_of_rows_that_are_not_contiguous_are_refused(turned):
    """Their columns would be read from other rows."""
    module = fresh(KERNELS)
    given = {"rows": torch.zeros(4, 4), "weights": torch.ones(2, 2)}
    given[turned] = given[turned].T
    with pytest.raises(AssertionError, match="expected rows that are contiguous"):
        module.weighted_sum(given["rows"], torch.zeros(2, 2, dtype=torch.long), given["weights"])


def check_machine_code(made, calls, capability):
    assert len(made) == calls
    for kernel in made:
        assert kernel.metadata.target.arch == capability
        assert kernel.asm["cubin"].startswith(b"\x7fELF")


def push_calls(push_triton):
    """Every launch of an ordered push: every dtype and all kinds of layout."""
    ranks, slots, stages, lanes, top_k = 4, 8, 8, 8, 2
    state_3, told = torch.zeros(3, dtype=torch.int64), 4
    peers = push_triton.Peers(torch.zeros(ranks, dtype=torch.int64), state_3, 1, ranks, slots, stages, lanes, 1000, told)
    table = torch.zeros(lanes, stages, 6, dtype=torch.int32)
    row_of_RX, count_R = torch.zeros(ranks, slots, dtype=torch.int32), torch.zeros(ranks, 1, dtype=torch.int32)
    rank_NK = torch.zeros(slots, top_k, dtype=torch.int64)
    calls = [partial(push_triton.lay_out, rank_NK, ranks, slots)]

    choices = push_triton.PushedChoices(
        *(torch.zeros(9, dtype=torch.int64),) * 2, torch.zeros(slots, top_k), told, row_of_RX, 4
    )
    calls += [partial(push_triton.lay_out, rank_NK, ranks, slots, choices)]
    tail = torch.zeros(slots, 32, dtype=torch.uint8)
    arrived, counts = torch.zeros(ranks * slots, 4096, dtype=torch.uint8), torch.zeros(ranks, told, dtype=torch.int64)
    places = torch.zeros(ranks * slots, top_k, dtype=torch.int32)
    for dtype in DTYPES:
        packing, expert_map = MessageFormat(512, top_k, dtype), ExpertMap(((0, 1), (2, 3, 4), (5,), (6,)), 1)
        calls.append(partial(push_triton.arrange, arrived, counts, packing, expert_map))
        summed = push_triton.Rows(torch.zeros(40, 512, dtype=dtype), 1, None, 0, 2048, places, places.float())
        calls.append(partial(push_triton.push, peers, table, summed, row_of_RX, counts[:, :1], 1, 4096))
    for dtype in DTYPES:
        for width, top_k, beside in ((7168, 2, tail), (1031, 1, None)):
            rows = push_triton.Rows(torch.zeros(slots, width).to(dtype), top_k, beside, 4 * width, 4 * width + 32)
            calls.append(partial(push_triton.push, peers, table, rows, row_of_RX, count_R, 1, 4096))
    return calls


@EVERY_GPU
def test_ordered_push_compiles_to_the_memory_model(capability, compiled):
    """Flags are set with release, after a barrier of the lane's rows, and read with acquire, before a barrier; all at system scope."""
    made = compiled(capability)
    calls = push_calls(push_triton := fresh(PUSH))
    for call in calls:
        call()
    check_machine_code(made, len(calls), capability)
    for kernel, call in zip(made, calls, strict=True):
        ptx = kernel.asm["ptx"]
        check_memory_model(ptx, sets=call.func is push_triton.push, waits=call.func is push_triton.push)


def check_memory_model(ptx, sets, waits):
    """Between the rows that a lane writes and each flag that it sets is a barrier, and every flag is of the right kind."""
    lines = [line.strip() for line in ptx.splitlines()]
    releases = [index for index, line in enumerate(lines) if re.search(r"\batom\S*\.exch", line)]
    acquires = [index for index, line in enumerate(lines) if re.search(r"\b(atom\S*\.add|ld\S*\.acquire)", line)]
    assert len(releases) == sets
    assert bool(acquires) == bool(waits)
    for semantics, found in (("release", releases), ("acquire", acquires)):
        assert all({"sys", semantics} <= set(re.split(r"[.\s]", lines[index])) for index in found)
    for index in releases:
        before = next((line for line in reversed(lines[:index]) if re.match(r"(@\S+ )?(st\.|bar\.)", line)), "nothing")
        assert "bar" in before, f"a flag is set after {before!r}, without a barrier"
    for index in acquires:  # the other threads go on when the flag has been seen
        after = next(line for line in lines[index + 1 :] if re.match(r"(@\S+ )?((ld|st)\.global|bar\.)", line))
        assert "bar" in after, f"{after!r} comes after a flag is read, without a barrier"


MUTANTS = {
    "no barrier": (r"bar\.sync\s+0;", ""),
    "no release": (r"\.release\b", ".relaxed"),
    "no acquire": (r"\.acquire\b", ".relaxed"),
    "one GPU": (r"\.sys\b", ".gpu"),
}


def test_mutants_of_the_memory_model_are_caught(compiled):
    """Of the machine code, as Triton adds barriers of its own. An x86 machine shows none of these in a run."""
    made, push_triton = compiled(90), fresh(PUSH)
    next(call for call in push_calls(push_triton) if call.func is push_triton.push)()
    check_memory_model(ptx := made[0].asm["ptx"], sets=1, waits=True)
    for mutant, (line, changed) in MUTANTS.items():
        mutated = re.sub(line, changed, ptx)
        assert mutated != ptx, mutant
        with pytest.raises(AssertionError):
            check_memory_model(mutated, sets=1, waits=True)


def test_another_order_needs_no_other_kernel(compiled):
    """The order is data: a captured graph takes a new one as it is."""
    made, push_triton = compiled(90), fresh(PUSH)
    first = next(call for call in push_calls(push_triton) if call.func is push_triton.push)
    first()
    peers, table, *others = first.args
    first.func(peers, torch.ones_like(table), *others)
    assert made[0] is made[1]
