"""Token permutation, messages, sums and dispatch layouts, against the plain sum over a token's experts."""

import importlib
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.algorithms.workload.serving_gpus import serving_gpus, tokens_to_gpus
from aurora.moe import permutation as token_permutation
from aurora.moe.expert_map import ExpertMap, LocalFirst
from aurora.moe.layouts import RowPerExpert, RowPerRank
from aurora.moe.permutation import (
    MessageFormat,
    gather_rows,
    needed_by_piece,
    permutation_by_expert,
    permutation_by_rank,
    weighted_sum,
)
from aurora.moe.server_layout import RowPerServer
from aurora.runtime.distributed.launcher import launch_threads
from aurora.types import Curve, Hierarchy, Profile
from aurora.types.profile import ALIGNED_BYTES
from tests.moe.reference_token_split import local_first
from tests.without_compiler import printed

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = (RowPerExpert, RowPerRank, RowPerServer)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FLOAT8, torch.float64)


class Linear:
    """Experts that are one matrix each: what the plain sum is computed with."""

    def __init__(self, weight_EHH):
        self.weight_EHH = weight_EHH

    def __call__(self, rows, index, weights):
        return torch.einsum("nh,nho,nk->no", rows, self.weight_EHH[index[:, 0]], weights)


def drawn(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def hierarchies(draw, ranks):
    """Servers of any sizes, of any ranks, and any number of chunks, levelled or not."""
    server_G = draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=ranks))
    server_G = np.unique(server_G, return_inverse=True)[1]
    return Hierarchy(server_G, draw(st.integers(1, 4)), draw(st.sampled_from((None, 1))))


@st.composite
def layers(draw):
    """Slots of each rank (some hold none), for each rank its tokens' routing and mask, a seed, and servers."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    everywhere = draw(st.one_of(st.none(), st.integers(0, ranks - 1)))  # or all experts on one rank
    home = [draw(st.integers(0, ranks - 1)) if everywhere is None else everywhere for _ in range(experts)]
    slots_G = tuple(tuple(e for e in draw(st.permutations(range(experts))) if home[e] == rank) for rank in range(ranks))
    top_k, seed = draw(st.integers(1, experts)), draw(st.integers(0, 10**6))
    tokens_G = [draw(st.integers(0, 5)) for _ in range(ranks)]
    routing_G = []
    for rank, tokens in enumerate(tokens_G):
        scores = torch.rand(experts, tokens, generator=drawn(seed + rank)).T
        mask = torch.rand(tokens, generator=drawn(seed + 9 + rank)) < 0.7 if draw(st.booleans()) else None
        routing_G.append((scores.topk(top_k).indices, torch.rand(tokens, top_k, generator=drawn(seed + 5 + rank)), mask))
    return slots_G, routing_G, seed, draw(hierarchies(ranks))


def drawn_weights(experts, width, routing_G, seed):
    """(E, H, H) weights of experts, and the hidden states of each rank's tokens."""
    hidden_G = [torch.randn(len(index), width, generator=drawn(seed + rank)) for rank, (index, _, _) in enumerate(routing_G)]
    return torch.randn(experts, width, width, generator=drawn(seed)), hidden_G


def performed(layout_G, answers_of):
    """Performs the operations of all ranks, whose experts answer what arrived by `answers_of`, a function of the rank and of that.

    Returns each rank's outputs, and the rows that it sent in each exchange.
    """
    ranks, counts = len(layout_G), torch.stack([layout.counts for layout in layout_G])
    sent_G, barrier = [None] * ranks, threading.Barrier(ranks, timeout=120)

    def of_rank(rank_info):
        rank, layout, rows_XG = rank_info.rank, layout_G[rank_info.rank], []

        def exchange(sends, recvs):
            rows_XG.append([len(each) for each in sends])
            sent_G[rank] = sends
            barrier.wait()
            for peer, into in enumerate(recvs):
                assert into.is_contiguous()
                assert into.shape == sent_G[peer][rank].shape
                if peer != rank:
                    into.copy_(sent_G[peer][rank])
            barrier.wait()

        layout.gathered(counts)
        answers = layout.combine(answers_of(rank, layout.dispatch(exchange)), exchange)
        return layout.aggregate(answers), rows_XG

    return launch_threads(of_rank, ranks)


def checked_sizes(layout_G, held_G, weight_EHH, hidden_G, routing_G):
    """(S, R, R) rows that each rank (row) sends to each (column) in each exchange of a dispatch, once all have travelled, been
    worked on by those who hold the experts, come back in the reverse exchanges and been found to be the plain sums."""
    found_G = performed(layout_G, lambda rank, arrived: layout_G[rank].compute(arrived, Linear(weight_EHH[list(held_G[rank])])))
    for hidden, (index, weights, mask), (out, _) in zip(hidden_G, routing_G, found_G, strict=True):
        wanted = torch.einsum("nh,nkho,nk->no", hidden, weight_EHH[index], weights)
        if mask is not None:
            wanted[~mask] = 0
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    there_SRR, back_SRR = np.split(np.stack([rows_XG for _, rows_XG in found_G], axis=1), 2)
    assert (there_SRR == back_SRR[::-1].swapaxes(1, 2)).all()
    return there_SRR


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=25)
@given(layer=layers())
def test_layouts_give_the_plain_sum_over_a_tokens_experts(kind, layer):
    slots_G, routing_G, seed, hierarchy = layer
    ranks, experts, width = len(slots_G), sum(map(len, slots_G)), 5
    weight_EHH, hidden_G = drawn_weights(experts, width, routing_G, seed)
    map_G = [ExpertMap(slots_G, rank, hierarchy=hierarchy) for rank in range(ranks)]
    layout_G = [
        kind(expert_map, hidden, *routing) for expert_map, hidden, routing in zip(map_G, hidden_G, routing_G, strict=True)
    ]
    sizes_SRR = checked_sizes(layout_G, slots_G, weight_EHH, hidden_G, routing_G)
    # What travels: every choice, or every (token, rank) once, or what the planner counts.
    homes = torch.empty(experts, dtype=torch.long)
    for rank, slots in enumerate(slots_G):
        homes[list(slots)] = rank
    kept_G = [index if mask is None else index[mask] for index, _, mask in routing_G]
    if kind is RowPerServer:
        source_U = np.repeat(np.arange(ranks), [len(kept) for kept in kept_G])
        planned_SRR = step_rows(hierarchical_rows(homes[torch.cat(kept_G)].numpy(), source_U, hierarchy), hierarchy)
        np.testing.assert_array_equal(np.where(np.eye(ranks), 0, sizes_SRR), planned_SRR)
        return
    for rank, kept in enumerate(kept_G):
        goes = [homes[row].tolist() if kind is RowPerExpert else set(homes[row].tolist()) for row in kept]
        assert sizes_SRR[0, rank].tolist() == [sum(list(homes_of).count(r) for homes_of in goes) for r in range(ranks)]


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=25)
@given(layer=layers(), seed=st.integers(0, 10**6), over_servers=st.booleans())
def test_replicas_take_their_shares_as_the_planner_counts_them(kind, layer, seed, over_servers):
    """Every rank holds its experts and some of the others; sums stay the same, rows go where `exchanged` says."""
    slots_G, routing_G, _, hierarchy = layer
    ranks, experts, width = len(slots_G), sum(map(len, slots_G)), 3
    rng = np.random.default_rng(seed)
    share_EG = rng.random((experts, ranks)) * (rng.random((experts, ranks)) < 0.4)
    for rank, held in enumerate(slots_G):
        share_EG[list(held), rank] += 0.5
    split_EG = share_EG / share_EG.sum(axis=1, keepdims=True)
    copies_G = tuple(tuple(np.flatnonzero(split_EG[:, rank]).tolist()) for rank in range(ranks))
    weight_EHH, hidden_G = drawn_weights(experts, width, routing_G, seed)
    hierarchy = hierarchy if over_servers else None
    map_G = [ExpertMap(copies_G, rank, split_EG, hierarchy=hierarchy) for rank in range(ranks)]
    layout_G = [kind(map_G[rank], hidden_G[rank], *routing) for rank, routing in enumerate(routing_G)]
    sizes_SRR = checked_sizes(layout_G, copies_G, weight_EHH, hidden_G, routing_G)
    kept_G = [index if mask is None else index[mask] for index, _, mask in routing_G]
    if kind is RowPerExpert and not over_servers:
        tokens_SE = np.stack([np.bincount(kept.flatten().numpy(), minlength=experts) for kept in kept_G])
        assert sizes_SRR[0].tolist() == tokens_to_gpus(tokens_SE, split_EG).tolist()
    if kind is RowPerServer and over_servers:
        source_U, experts_UK = np.repeat(np.arange(ranks), [len(kept) for kept in kept_G]), torch.cat(kept_G).numpy()
        rank_UK = serving_gpus(experts_UK, source_U, split_EG, hierarchy.server_G)
        planned_SRR = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)
        np.testing.assert_array_equal(np.where(np.eye(ranks), 0, sizes_SRR), planned_SRR)


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=25)
@given(layer=layers(), seed=st.integers(0, 10**6))
def test_local_first_as_the_plan_divides_them(kind, layer, seed):
    """Sums stay the same, and every physical expert gets what `dispatch` says, whether shares are equal or not."""
    slots_G, routing_G, _, hierarchy = layer
    ranks, experts, width = len(slots_G), sum(map(len, slots_G)), 3
    rng = np.random.default_rng(seed)
    held_EG = rng.random((experts, ranks)) < 0.4
    for rank, held in enumerate(slots_G):
        held_EG[list(held), rank] = True
    split_EG = held_EG * (rng.random(held_EG.shape) + 0.1 if seed % 2 else 1.0)
    split_EG /= split_EG.sum(axis=1, keepdims=True)
    copies_G = tuple(tuple(np.flatnonzero(held_EG[:, rank]).tolist()) for rank in range(ranks))
    map_G = [ExpertMap(copies_G, rank, split_EG, True, hierarchy) for rank in range(ranks)]
    tokens_SE = torch.stack(
        [expert_map.count(index, mask) for expert_map, (index, _, mask) in zip(map_G, routing_G, strict=True)]
    )
    weight_EHH, hidden_G = drawn_weights(experts, width, routing_G, seed)
    layout_G = [kind(map_G[rank], hidden_G[rank], *routing, tokens_SE) for rank, routing in enumerate(routing_G)]
    checked_sizes(layout_G, copies_G, weight_EHH, hidden_G, routing_G)
    if kind is RowPerExpert and map_G[0].max_replicas > 1:
        rule = LocalFirst(copies_G, 0, split_EG)
        rows_SEM = local_first(tokens_SE.numpy(), rule)
        for (expert, replica), holder in np.ndenumerate(rule.rank_EM.numpy()):
            if expert in copies_G[holder]:
                physical = sum(map(len, copies_G[:holder])) + copies_G[holder].index(expert)
                assert [int(layout.counts[physical]) for layout in layout_G] == rows_SEM[:, expert, replica].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levelling_changes_who_carries_rows_and_no_sum(dtype):
    """Two servers of three ranks: ranks 0 and 4 have prompts, and the others decode."""
    slots_G, server_G, width = tuple((2 * rank, 2 * rank + 1) for rank in range(6)), np.array([0, 0, 0, 1, 1, 1]), 5
    tokens_G, sums, carried = (48, 2, 3, 1, 40, 0), [], []
    index_G = [torch.rand(tokens, 12, generator=drawn(rank)).topk(4).indices for rank, tokens in enumerate(tokens_G)]
    hidden_G = [torch.randn(tokens, width, generator=drawn(rank)).to(dtype) for rank, tokens in enumerate(tokens_G)]
    for level_from in (None, 1):
        map_G = [ExpertMap(slots_G, rank, hierarchy=Hierarchy(server_G, 3, level_from)) for rank in range(6)]
        layout_G = [
            RowPerServer(expert_map, hidden, index, torch.full(index.shape, 0.25), None)
            for expert_map, hidden, index in zip(map_G, hidden_G, index_G, strict=True)
        ]

        def doubled(rank, arrived, layout_G=layout_G):
            rows, _, slots_XK = layout_G[rank].received(arrived)
            return rows.clone() * 2 ** (1 + slots_XK.clamp(min=0).sum(dim=1, keepdim=True)).to(dtype)

        sums.append([out for out, _ in performed(layout_G, doubled)])
        across_SGG = np.where(server_G[:, None] == server_G, 0, layout_G[0].sizes_SRR)
        carried.append(across_SGG.sum(axis=(0, 2)))
    assert all(torch.equal(plain, levelled) for plain, levelled in zip(*sums, strict=True))
    assert carried[0].sum() == carried[1].sum()
    assert carried[1].max() < 0.5 * carried[0].max()


@given(st.integers(0, 40), st.integers(1, 4), st.data())
def test_permutation_by_expert(num_physical, top_k, data):
    """Choices of no physical expert are left out, and the first token of an expert has its first row."""
    physical_NK = data.draw(st.lists(st.lists(st.integers(0, num_physical), min_size=top_k, max_size=top_k)))
    physical = [p for physical_K in physical_NK for p in physical_K]
    index = torch.tensor(physical_NK, dtype=torch.long).view(-1, top_k)
    counts_P, token_X, row_NK = permutation_by_expert(index, num_physical)
    assert counts_P.tolist() == [physical.count(p) for p in range(num_physical)]
    choice_X = [choice for p in range(num_physical) for choice, own in enumerate(physical) if own == p]
    assert token_X.tolist() == [choice // top_k for choice in choice_X]
    assert row_NK.flatten().tolist() == [
        choice_X.index(choice) if own < num_physical else -1 for choice, own in enumerate(physical)
    ]


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_permutation_by_rank(ranks, top_k, data):
    """A token's rows are its ranks, each once; as compiled for the CPU and as other devices do it, with and without waiting."""
    rank_NK = data.draw(st.lists(st.lists(st.integers(0, ranks), min_size=top_k, max_size=top_k)))
    choices = torch.tensor(rank_NK, dtype=torch.long).view(-1, top_k)
    found = permutation_by_rank(choices, ranks)
    for pairs in (None, len(found[1])):
        for one, other in zip(found, token_permutation._permutation_by_rank(choices, ranks, pairs), strict=True):
            assert torch.equal(one, other)
    counts_R, token_X, row_NK = found
    pairs = [(rank, token) for rank in range(ranks) for token, own in enumerate(rank_NK) if rank in own]
    assert token_X.tolist() == [token for _, token in pairs]
    assert counts_R.tolist() == [sum(rank == own for own, _ in pairs) for rank in range(ranks)]
    for token, rows in enumerate(row_NK.tolist()):
        own = [row for row in range(len(pairs)) if pairs[row][1] == token]
        assert rows == own[::-1] + [-1] * (min(ranks, top_k) - len(own))


@given(st.integers(1, 6).flatmap(hierarchies), st.integers(1, 4), st.data())
def test_pieces_need_what_their_tokens_need(hierarchy, top_k, data):
    """As the planner counts it."""
    ranks, server_G = hierarchy.ranks, torch.from_numpy(hierarchy.server_G.copy())
    rank_NK = data.draw(st.lists(st.lists(st.integers(0, ranks - 1), min_size=top_k, max_size=top_k)))
    choices = torch.tensor(rank_NK, dtype=torch.long).view(-1, top_k)
    sent_N, token_X, _ = permutation_by_rank(server_G[choices], hierarchy.servers)
    planned = hierarchical_rows(choices.numpy(), np.zeros(len(choices), dtype=np.int64), hierarchy)
    np.testing.assert_array_equal(sent_N, planned.sent_GN[0])
    found_CR = needed_by_piece(choices, server_G, sent_N, token_X, hierarchy.pieces)
    np.testing.assert_array_equal(found_CR, planned.needed_GCG[0])


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 6))
def test_a_packed_row_holds_what_was_put_in(width, top_k, dtype, rows):
    packing = MessageFormat(width, top_k, dtype)
    assert packing.row_bytes % ALIGNED_BYTES == packing.weights_at % ALIGNED_BYTES == packing.physical_at % ALIGNED_BYTES == 0
    message = torch.empty(rows, packing.row_bytes, dtype=torch.uint8)
    hidden, weights, experts = packing.parts(message)
    wanted = torch.randn(rows, width).to(dtype), torch.rand(rows, top_k).to(weights.dtype), torch.arange(rows * top_k)
    hidden.copy_(wanted[0])
    weights.copy_(wanted[1])
    experts.copy_(wanted[2].view(rows, top_k))
    found = packing.parts(message.clone())
    assert torch.equal(found[0].float(), wanted[0].float())
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[2].long(), wanted[2].view(rows, top_k))


@pytest.fixture
def interpreted(monkeypatch):
    """The Triton kernels, run by Triton's interpreter on the CPU."""
    pytest.importorskip("triton", reason="the kernels' interpreter needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "aurora.moe.permutation_triton", raising=False)
    yield importlib.import_module("aurora.moe.permutation_triton")
    sys.modules.pop("aurora.moe.permutation_triton")


@pytest.fixture(params=["torch", "triton"])
def implementation(request):
    if request.param == "torch":
        return token_permutation
    if request.getfixturevalue("dtype") in FLOAT8:
        pytest.skip("float8 is not for Triton's kernels")
    return request.getfixturevalue("interpreted")


@pytest.mark.parametrize("dtype", DTYPES)
def test_permuting_there_and_back_changes_nothing(implementation, dtype):
    rows = torch.randn(11, 1030, generator=drawn(1)).to(dtype)
    index = torch.randperm(11, generator=drawn(2))
    wide = torch.zeros(11, 1040, dtype=dtype)
    implementation.gather_rows(rows, index, wide[:, :1030])
    assert torch.equal(wide[:, :1030].float(), rows[index].float())
    assert not wide[:, 1030:].float().any()
    back = torch.empty_like(rows)
    implementation.gather_rows(wide[:, :1030], index.argsort(), back)
    assert torch.equal(back.float(), rows.float())
    none = torch.empty(0, 1030, dtype=dtype)
    implementation.gather_rows(rows, index[:0], none)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_weighted_sums_skip_what_is_not_there(implementation, dtype, weighted):
    """Against the sum written out; a row that nobody points at may hold anything."""
    rows = torch.randn(7, 1030, generator=drawn(1)).to(dtype)
    rows[0] = torch.nan
    place = torch.tensor([[1, 6, -1], [-1, -1, -1], [2, 2, 3], [-1, 4, 5]])
    weights = torch.rand(4, 3, generator=drawn(2)) if weighted else None
    found = implementation.weighted_sum(rows, place, weights)
    for token, places in enumerate(place.tolist()):
        terms = [
            rows[p].double() * (1 if weights is None else float(weights[token, k])) for k, p in enumerate(places) if p >= 0
        ]
        wanted = sum(terms, torch.zeros(1030, dtype=torch.float64))
        torch.testing.assert_close(
            found[token], wanted.float().to(dtype), **({"rtol": 0, "atol": 0} if dtype in FLOAT8 else {})
        )
    assert not implementation.weighted_sum(rows[:0], torch.full((2, 3), -1), None).float().any()


def test_the_torch_versions_work_without_triton(monkeypatch):
    monkeypatch.setattr(token_permutation, "_has_triton", lambda: False)
    out = torch.empty(2, 3)
    gather_rows(torch.eye(3), torch.tensor([2, 0]), out)
    assert out.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert weighted_sum(torch.eye(3), torch.tensor([[2, 0]])).tolist() == [[1, 0, 1]]


@given(st.integers(1, 99), st.integers(2, 9), st.sampled_from(DTYPES[:-1]))
def test_plans_count_the_bytes_of_a_packed_row(width, top_k, dtype):
    packing = MessageFormat(width, top_k, dtype)
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), Curve([1.0], [0.0]))}
    size = width * dtype.itemsize
    assert Profile("m", "", [[[[0] * 9]]], top_k, size, size, 1, 1, curves).row_bytes(deduplicated=True) == packing.row_bytes


def test_permutations_are_the_same_without_a_compiler():
    code = (
        "import numpy as np; from aurora.moe import permutation_core as core;"
        "chosen_NK = np.random.default_rng(0).integers(0, 6, (9, 3));"
        "sorted_by = core.permutation_by_expert(chosen_NK, 5), core.permutation_by_rank(chosen_NK, 5);"
        "print([[each.tolist() for each in found] for found in sorted_by]);"
        "print(core.sum_by_rank(np.ascontiguousarray(chosen_NK.T), np.array([0, 4, 4, 9])).tolist())"
    )
    compiled, plain = printed(code)
    assert compiled == plain
