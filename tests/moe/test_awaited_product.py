"""The grouped product whose tiles wait for their rows: in Triton's interpreter, with rows that arrive while it runs."""

import importlib
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' interpreter needs triton")
NAME = "aurora.moe.awaited_triton"


@pytest.fixture
def awaited(monkeypatch):
    """The kernel, run by Triton's interpreter, with small tiles."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    for name in ("TILE_ROWS", "TILE_COLUMNS", "TILE_DEPTH"):
        monkeypatch.setattr(module, name, 16)
    yield module
    sys.modules.pop(NAME)


def case(dtype):
    """Three senders, of which one sends nothing for some experts; an expert without rows; widths that tiles do not divide."""
    torch.manual_seed(0)
    slots, lanes, counts_RE = 40, 2, torch.tensor([[3, 0, 20, 1], [0, 0, 17, 9], [5, 0, 2, 0]])
    slot_of = [torch.randperm(slots)[: int(counts_E.sum())] + sender * slots for sender, counts_E in enumerate(counts_RE)]
    parts_RE = [places.split(counts_E.tolist()) for places, counts_E in zip(slot_of, counts_RE, strict=True)]
    place_X = torch.cat([parts_RE[sender][expert] for expert in range(4) for sender in range(3)]).int()
    rows, weights = torch.randn(3 * slots, 40).to(dtype), torch.randn(4, 40, 24).to(dtype)
    return slots, lanes, rows, place_X, counts_RE.sum(dim=0).cumsum(0), weights


def reference(rows, place_X, ends_E, weights):
    expert_X = torch.searchsorted(ends_E, torch.arange(len(place_X)), right=True)
    return torch.einsum("xh,xhf->xf", rows[place_X.long()].double(), weights[expert_X].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies the bits of bfloat16
def test_tiles_wait_for_rows_that_arrive_one_sender_after_the_other(awaited, dtype):
    """Slots hold NaN until their sender has written them, last sender first; a tile that did not wait would show it."""
    slots, lanes, rows, place_X, ends_E, weights = case(dtype)
    arrived, words, turn_R = torch.full_like(rows, torch.nan), torch.zeros(3, lanes, dtype=torch.int64), torch.tensor([2, 1, 0])

    def push():
        for sender in (2, 1, 0):
            time.sleep(0.05)
            for lane in range(lanes):
                mine = slice(sender * slots + lane, (sender + 1) * slots, lanes)
                arrived[mine] = rows[mine]
                words[sender, lane] = 7

    arrivals = awaited.Arrivals(words, 7, slots, lost := torch.zeros(1, dtype=torch.int64), 1 << 40, turn_R)
    pushing = threading.Thread(target=push)
    pushing.start()
    found = awaited.awaited_product(arrived, place_X, ends_E, weights.transpose(1, 2).contiguous().transpose(1, 2), arrivals, 3)
    pushing.join()
    wanted = reference(rows, place_X, ends_E, weights)
    assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()
    assert not lost.any()


def test_tiles_come_in_the_turns_of_their_senders_and_cover_each_row_once(awaited):
    slots, lanes, _, place_X, ends_E, _ = case(torch.float32)
    for turn_R in ([0, 1, 2], [2, 1, 0]):
        arrivals = awaited.Arrivals(torch.zeros(3, lanes), 1, slots, torch.zeros(1), 1, torch.tensor(turn_R))
        tiles = awaited.tile_table(ends_E, place_X, arrivals).tolist()
        used = [(expert, begin, end) for expert, begin, end in tiles if begin < end]
        assert sorted(row for _, begin, end in used for row in range(begin, end)) == list(range(len(place_X)))
        expert_of = torch.searchsorted(ends_E, torch.arange(len(place_X)), right=True)
        assert all((expert_of[begin:end] == expert).all() for expert, begin, end in used)
        turns = [max(turn_R[place // slots] for place in place_X[begin:end].tolist()) for _, begin, end in used]
        assert turns == sorted(turns)


def test_a_silent_sender_is_named_and_nobody_waits_for_ever(awaited):
    slots, _, rows, place_X, ends_E, weights = case(torch.float32)
    words = torch.tensor([[3, 3], [3, 2], [3, 3]])
    arrivals = awaited.Arrivals(words, 3, slots, lost := torch.zeros(1, dtype=torch.int64), 4, torch.arange(3))
    awaited.awaited_product(rows, place_X, ends_E, weights, arrivals, 2)
    assert lost.tolist() == [2]
