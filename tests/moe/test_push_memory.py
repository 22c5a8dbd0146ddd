"""The push kernel on a weak memory: stores are kept back for as long as PTX's memory model allows, and each flag is looked behind.

The interpreter runs one program after the other. What a lane stores stays in a list until a release of the same lane, before
which a barrier has come, lets it go: no GPU may keep it longer, and one may keep it so long. Whoever sees a flag then reads the
rows, so at each flag the rows of its lane must be in the peer's memory.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.types import Network, Order

pytest.importorskip("triton", reason="the kernels' interpreter needs triton")

RANKS, TOKENS, TOP_K, WIDTH, LANES, STAGES = 4, 11, 2, 24, 2, 8
ROW, TAIL = 4 * WIDTH + 32, 32  # bytes; weights and such are 32
WORDS, HALF_AT = RANKS * LANES, 1024
FENCED = (0, 400, 1 << 17)  # bytes: a fence for each stage, for some of them, for all


class WeakMemory:
    """Stores of each lane that are on their way, and what was seen behind flags.

    Attributes:
        early: flags that were seen before their rows.
        flags: (lane, address) of each flag.
        fences: how often each lane has released what it had stored.
    """

    def __init__(self, builder, arrived_behind):
        self.builder, self.arrived_behind = builder, arrived_behind
        self.way, self.early, self.flags, self.fences = {}, 0, [], {}

    def patch(self, monkeypatch):
        kind = type(self.builder)
        store, atomic = kind.create_masked_store, kind.create_atomic_rmw

        def own():
            return self.way.setdefault(self.builder.grid_idx[0], [])

        def keep_back(builder, *args):
            own().append([False, lambda: store(builder, *args)])

        def barrier(builder):
            for each in own():
                each[0] = True

        def flag(builder, operation, pointer, value, mask, sem, scope):
            if "XCHG" in str(operation):
                lane = builder.grid_idx[0]
                if "RELEASE" in str(sem).upper():
                    assert "SYSTEM" in str(scope).upper()
                    self.fences[lane] = self.fences.get(lane, 0) + 1
                    for _, write in [each for each in own() if each[0]]:
                        write()
                    self.way[lane] = [each for each in own() if not each[0]]
                for address in pointer.data[mask.data].tolist():
                    self.flags.append((lane, address))
                    self.early += not self.arrived_behind(lane, address)
            return atomic(builder, operation, pointer, value, mask, sem, scope)

        for name, call in (("masked_store", keep_back), ("barrier", barrier), ("atomic_rmw", flag)):
            monkeypatch.setattr(kind, f"create_{name}", call)


def tables(order, rank):
    from aurora.runtime.transports.push import stage_table  # whose own kernels nobody interprets

    return torch.from_numpy(stage_table(order, rank, LANES, STAGES))


def kernels(folder, monkeypatch, *changed):
    """A module of push kernels that Triton interprets, with a part of its source replaced by another."""
    text = Path(importlib.util.find_spec("aurora.moe.push_triton").origin).read_text()
    if changed:
        assert text.count(changed[0]) == 1, changed[0]
        text = text.replace(*changed)
    path = folder / "push_kernels.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("push_kernels", path)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as interpreted:
        interpreted.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    module.TILE_BYTES, module.SUM_ELEMENTS, module.FEW_ROWS = 64, 16, 0
    return module


def exchange(module, order, sums, rank, memory):
    """Pushes one rank's rows of an exchange."""
    rng = torch.Generator().manual_seed(rank)
    chosen_NK = torch.randint(0, RANKS, (TOKENS, TOP_K), generator=rng)
    row_of_RX, count_RT = torch.zeros(RANKS, TOKENS, dtype=torch.int32), torch.zeros(RANKS, 1, dtype=torch.int32)
    for peer in range(RANKS):
        tokens = (chosen_NK == peer).any(1).nonzero()[:, 0]
        choices = TOP_K * tokens + (chosen_NK[tokens] == peer).int().argmax(1)
        row_of_RX[peer, : len(tokens)], count_RT[peer] = choices, len(tokens)
    addresses = torch.tensor([part.data_ptr() for part in memory])
    peers = module.Peers(addresses, torch.zeros(3, dtype=torch.int64), rank, RANKS, TOKENS, STAGES, LANES, 9)
    hidden = torch.rand(TOKENS, WIDTH, generator=rng) + 1
    if sums:
        places = torch.randint(0, TOKENS, (TOKENS * TOP_K, 3), generator=rng, dtype=torch.int32)
        rows = module.Rows(hidden, 1, None, 0, ROW, places, torch.rand(places.shape, generator=rng))
    else:
        tail = torch.randint(1, 99, (TOKENS, TAIL), generator=rng, dtype=torch.uint8)
        rows = module.Rows(hidden, TOP_K, tail, ROW - TAIL, ROW)
    module.push(peers, tables(order, rank), rows, row_of_RX, count_RT, 0, HALF_AT, waits=False)


def written_by(lane, order, sums, rank, folder, monkeypatch):
    """What a lane of the unchanged kernel writes into each rank's memory; other bytes are zero."""
    memory = [torch.zeros(HALF_AT + RANKS * TOKENS * ROW, dtype=torch.uint8) for _ in range(RANKS)]
    module = kernels(folder, monkeypatch)
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def only(builder, *args):
        if builder.grid_idx[0] == lane:
            store(builder, *args)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_store", only)
        exchange(module, order, sums, rank, memory)
    return memory


def seen(order, sums, fenced, folder, monkeypatch, *changed):
    """How many flags came before their rows, how many were set, and the fences of each lane, of one rank's exchange."""
    rank, size = 1, HALF_AT + RANKS * TOKENS * ROW
    expected_L = [written_by(lane, order, sums, rank, folder, monkeypatch) for lane in range(LANES)]
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(RANKS)]

    def arrived_behind(lane, address):
        (peer,) = (n for n, part in enumerate(memory) if 0 <= address - part.data_ptr() < size)
        assert (address - memory[peer].data_ptr()) == 8 * (rank * LANES + lane)
        written = expected_L[lane][peer][8 * WORDS :]
        return torch.equal(memory[peer][8 * WORDS :][written > 0], written[written > 0])

    module = kernels(folder, monkeypatch, *changed)
    module.FENCED_BYTES = fenced
    from triton.runtime.interpreter import interpreter_builder

    weak = WeakMemory(interpreter_builder, arrived_behind)
    with monkeypatch.context() as patched:
        weak.patch(patched)
        exchange(module, order, sums, rank, memory)
    return weak.early, len(set(weak.flags)), weak.fences


def orders():
    bytes_GG = 1 + np.random.default_rng(3).integers(0, 9, (RANKS, RANKS)) * (1 - np.eye(RANKS, dtype=int))
    np.fill_diagonal(bytes_GG, 0)
    return {
        "one partner at a time": ORDER["openshop"](bytes_GG, Network.equal(RANKS), rng=np.random.default_rng(0)),
        "in parts": ORDER["birkhoff"](bytes_GG, Network.equal(RANKS), rng=np.random.default_rng(0)),
        "all at once": Order.all_at_once(RANKS),
    }


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("name", ["one partner at a time", "in parts", "all at once"])
def test_no_flag_is_seen_before_its_rows(name, sums, tmp_path, monkeypatch):
    """However many stages share a fence: all at once always takes one."""
    order, fences = orders()[name], []
    monkeypatch.setattr(f"{__name__}.STAGES", 40)
    for fenced in FENCED:
        early, flags, by_lane = seen(order, sums, fenced, tmp_path, monkeypatch)
        assert (early, flags) == (0, RANKS * LANES)
        fences.append(max(by_lane.values()))
    assert fences[-1] == 1
    assert fences == sorted(fences, reverse=True)
    assert (fences[0] > 1) == (name != "all at once")


MUTANTS = {
    "no fence": ('sem="release"', 'sem="relaxed"'),
    "no barrier": ("    tl.debug_barrier()\n    tl.atomic_xchg(", "    tl.atomic_xchg("),
    "barrier after the words": (
        "    tl.debug_barrier()\n    tl.atomic_xchg(words, tl.full((STAGES,), 0, tl.int64) + done, mask=due, "
        'sem="release", scope="sys")\n',
        "    tl.atomic_xchg(words, tl.full((STAGES,), 0, tl.int64) + done, mask=due, "
        'sem="release", scope="sys")\n    tl.debug_barrier()\n',
    ),
    "word of the next stage": ("done, unset, stage, STAGES)", "done, unset, stage + 1, STAGES)"),
    "word of a stage forgotten": ("unset, written = stage, 0", "unset, written = stage + 1, 0"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_order_of_rows_fence_and_words_is_seen(mutant, tmp_path, monkeypatch):
    early, flags, _ = seen(orders()["one partner at a time"], False, 0, tmp_path, monkeypatch, *MUTANTS[mutant])
    assert (flags < RANKS * LANES) if mutant.endswith("forgotten") else early > 0
