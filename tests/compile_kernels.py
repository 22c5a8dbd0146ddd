"""Compiles the Triton kernels for each GPU that Triton's assembler knows, on a machine without one: what the wrappers would launch.

`python -m tests.compile_kernels [CAPABILITY...]` prints for each kernel what the machine code tells: registers of a thread, bytes
of shared memory, spilled bytes, widths of loads and stores, fences, and whether shared memory or a barrier is between a row's
first load and last store.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)  # A100, RTX 30, L4, H100, B200, B300, RTX 50
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


def permutation_calls(permutation_triton):
    """Every launch of the token kernels, with strides that are and are not multiples of 16."""
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
    return calls


def push_calls(push_triton, push_layout_triton):
    """Every launch of an ordered push: every dtype and all kinds of layout."""
    ranks, slots, stages, lanes, top_k = 4, 8, 8, 8, 2
    state_3, told = torch.zeros(3, dtype=torch.int64), 4
    peers = push_triton.Peers(torch.zeros(ranks, dtype=torch.int64), state_3, 1, ranks, slots, stages, lanes, 1000, told)
    table = torch.zeros(lanes, stages, 5, dtype=torch.int32)
    row_of_RX, count_R = torch.zeros(ranks, slots, dtype=torch.int32), torch.zeros(ranks, 1, dtype=torch.int32)
    rank_NK = torch.zeros(slots, top_k, dtype=torch.int64)
    calls = [partial(push_layout_triton.lay_out, rank_NK, ranks, slots)]

    choices = push_layout_triton.PushedChoices(
        *(torch.zeros(9, dtype=torch.int64),) * 2, torch.zeros(slots, top_k), told, row_of_RX, 4
    )
    calls += [partial(push_layout_triton.lay_out, rank_NK, ranks, slots, choices)]
    calls += [partial(push_layout_triton.lay_out, rank_NK.int(), ranks, slots, choices._replace(slot_P=None))]
    tail = torch.zeros(slots, 32, dtype=torch.uint8)
    arrived, counts = torch.zeros(ranks * slots, 4096, dtype=torch.uint8), torch.zeros(ranks, told, dtype=torch.int64)
    places = torch.zeros(ranks * slots, top_k, dtype=torch.int32)
    for dtype in DTYPES:
        packing, expert_map = MessageFormat(512, top_k, dtype), ExpertMap(((0, 1), (2, 3, 4), (5,), (6,)), 1)
        calls.append(partial(push_layout_triton.arrange, arrived, counts, packing, expert_map))
        shapes = (512, dtype), (top_k, torch.float32), (top_k, torch.int32), (14, torch.int32)
        into = push_layout_triton.Unpacked(*(torch.zeros(len(arrived), width, dtype=kind) for width, kind in shapes))
        of_rank = rank_NK[:, 0], 1, rank_NK[0, 0]
        calls.append(partial(push_layout_triton.unpack, arrived, counts[:, 0], packing, *of_rank, into))
        for width in (512, 7168):
            summed = push_triton.Rows(torch.zeros(40, width, dtype=dtype), 1, None, 0, 4 * width, places, places.float())
            calls.append(partial(push_triton.push, peers, table, summed, row_of_RX, counts[:, :1], 1, 4096))
    for dtype in DTYPES:
        for width, top_k, beside in ((7168, 2, tail), (2048, 2, tail), (1031, 1, None)):
            rows = push_triton.Rows(torch.zeros(slots, width).to(dtype), top_k, beside, 4 * width, 4 * width + 32)
            calls.append(partial(push_triton.push, peers, table, rows, row_of_RX, count_R, 1, 4096))
    return calls


def awaited_calls(awaited_triton):
    """Launches of the product whose tiles wait for their rows, with weights of both layouts."""
    words = torch.zeros(4, 8, dtype=torch.int64)
    arrivals = awaited_triton.Arrivals(words, 1, 8, torch.zeros(1, dtype=torch.int64), 1000, torch.arange(4))
    calls = []
    for dtype in DTYPES:
        for weights in (torch.zeros(2, 512, 256, dtype=dtype), torch.zeros(2, 256, 512, dtype=dtype).transpose(1, 2)):
            given = torch.zeros(32, 512, dtype=dtype), torch.zeros(9, dtype=torch.int32), torch.tensor([4, 9]), weights
            calls.append(partial(awaited_triton.awaited_product, *given, arrivals, 16))
    return calls


def facts(kernel):
    """What a compiled kernel's machine code tells, by NVIDIA's disassembler that comes with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used, sass = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    names = re.findall(r"\b((?:LDG|STG|LDS|STS|BAR|MEMBAR)[.\w]*)", sass)
    moves = [at for at, name in enumerate(names) if re.match(r"(LDG|STG)\S*\.128", name)]
    between = names[moves[0] : moves[-1] + 1] if moves else []
    return {
        "warps": kernel.metadata.num_warps,
        "registers": int(re.search(r"REG:(\d+)", used)[1]),
        "shared": kernel.metadata.shared,
        "spilled": kernel.n_spills
        if isinstance(getattr(kernel, "n_spills", None), int)
        else len(re.findall(r"\b(STL|LDL)\b", sass)),
        "loads_of_16_bytes": sum(name.startswith("LDG") for name in names if ".128" in name),
        "stores_of_16_bytes": sum(name.startswith("STG") for name in names if ".128" in name),
        "system_fences": sum(re.match(r"MEMBAR\S*SYS", name) is not None for name in names),
        "shared_in_the_copy": Counter(name.partition(".")[0] for name in between if not name.startswith(("LDG", "STG"))),
    }


@contextmanager
def launching(capability):
    """Context manager in which launches compile for a capability in place of running; yields the list of their kernels."""
    from triton.runtime import driver, jit

    made, run, active = [], jit.JITFunction.run, driver._active
    driver._active = Gpu(capability)
    jit.JITFunction.run = lambda self, *args, warmup, **named: made.append(run(self, *args, warmup=True, **named))
    try:
        yield made
    finally:
        driver._active, jit.JITFunction.run = active, run


def main():
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else a warning
    import triton

    from aurora.moe import awaited_triton, permutation_triton, push_layout_triton, push_triton

    print(f"Triton {triton.__version__}")
    for capability in map(int, sys.argv[1:] or CAPABILITIES):
        calls = [*permutation_calls(permutation_triton), *push_calls(push_triton, push_layout_triton)]
        calls += awaited_calls(awaited_triton)
        with launching(capability) as made:
            for call in calls:
                call()
        for kernel, call in zip(made, calls, strict=True):
            rows = next((each.source for each in call.args if isinstance(each, push_triton.Rows)), None)
            what = "" if rows is None else f" of {rows.shape[1]} x {str(rows.dtype).removeprefix('torch.')}"
            told = ", ".join(
                f"{name} {dict(value) if isinstance(value, Counter) else value}" for name, value in facts(kernel).items()
            )
            print(f"sm_{capability} {kernel.name}{what}: {told}")


if __name__ == "__main__":
    main()
