"""Compiles the Triton kernels for each GPU that Triton's assembler knows, on a machine without one: what the wrappers would launch."""

import importlib
import re
import sys
from contextlib import ExitStack

import pytest
import torch

from tests.compile_kernels import CAPABILITIES, awaited_calls, facts, launching, permutation_calls, push_calls

triton = pytest.importorskip("triton", reason="compiling the kernels needs triton")

KERNELS = "aurora.moe.permutation_triton"
PUSH, LAYOUT = "aurora.moe.push_triton", "aurora.moe.push_layout_triton"


EVERY_GPU = pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=() if c == 90 else pytest.mark.full) for c in CAPABILITIES]
)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Makes launches compile for a capability instead; what they compile is in the list that is returned."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else a warning
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ExitStack() as stack:
        yield lambda capability: stack.enter_context(launching(capability))


def fresh(name):
    """The module with kernels of its own: those of tests before may be the interpreter's."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@EVERY_GPU
def test_every_kernel_compiles(capability, compiled):
    """Through the wrappers; every result is machine code."""
    permutation_triton, made = fresh(KERNELS), compiled(capability)
    calls = permutation_calls(permutation_triton)
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


@EVERY_GPU
def test_ordered_push_compiles_to_the_memory_model(capability, compiled):
    """Flags are set with release, after a barrier of the lane's rows, and read with acquire, before a barrier; all at system scope."""
    made = compiled(capability)
    calls = push_calls(push_triton := fresh(PUSH), fresh(LAYOUT))
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
        after = next(line for line in lines[index + 1 :] if re.match(r"(@\S+ )?((ld|st)\.global|cp\.async|bar\.)", line))
        assert "bar" in after, f"{after!r} comes after a flag is read, without a barrier"


@EVERY_GPU
def test_tiles_acquire_the_flags_of_their_rows_before_they_read_them(capability, compiled):
    """Every expert in one launch, by tensor cores in half precision; a GPU's shared memory holds the tiles."""
    made = compiled(capability)
    calls = awaited_calls(fresh("aurora.moe.awaited_triton"))
    for call in calls:
        call()
    check_machine_code(made, len(calls), capability)
    for kernel, call in zip(made, calls, strict=True):
        check_memory_model(kernel.asm["ptx"], sets=False, waits=True)
        assert kernel.metadata.shared <= 99 << 10
        assert ("mma" in kernel.asm["ptx"]) or call.args[0].dtype == torch.float32


@EVERY_GPU
def test_rows_are_copied_by_whole_vectors_without_shared_memory(capability, compiled):
    """One fence a launch, no spilled registers; a thread of a full block has 64."""
    made, push_triton = compiled(capability), fresh(PUSH)
    for call in push_calls(push_triton, fresh(LAYOUT)):
        if call.func is push_triton.push and call.args[2].source.shape[1] in (2048, 7168):
            call()
    assert len(made) == 9
    for found in map(facts, made):
        assert (found["system_fences"], found["spilled"], found["shared_in_the_copy"]) == (1, 0, {})
        assert found["stores_of_16_bytes"] > 0
        assert found["loads_of_16_bytes"] % found["stores_of_16_bytes"] == 0
        assert found["warps"] * 32 * found["registers"] <= 65536


MUTANTS = {
    "no barrier": (r"bar\.sync\s+0;", ""),
    "no release": (r"\.release\b", ".relaxed"),
    "no acquire": (r"\.acquire\b", ".relaxed"),
    "one GPU": (r"\.sys\b", ".gpu"),
}


def test_mutants_of_the_memory_model_are_caught(compiled):
    """Of the machine code, as Triton adds barriers of its own. An x86 machine shows none of these in a run."""
    made, push_triton = compiled(90), fresh(PUSH)
    next(call for call in push_calls(push_triton, fresh(LAYOUT)) if call.func is push_triton.push)()
    check_memory_model(ptx := made[0].asm["ptx"], sets=1, waits=True)
    for mutant, (line, changed) in MUTANTS.items():
        mutated = re.sub(line, changed, ptx)
        assert mutated != ptx, mutant
        with pytest.raises(AssertionError):
            check_memory_model(mutated, sets=1, waits=True)


def test_another_order_needs_no_other_kernel(compiled):
    """The order is data: a captured graph takes a new one as it is."""
    made, push_triton = compiled(90), fresh(PUSH)
    first = next(call for call in push_calls(push_triton, fresh(LAYOUT)) if call.func is push_triton.push)
    first()
    peers, table, *others = first.args
    first.func(peers, torch.ones_like(table), *others)
    assert made[0] is made[1]
