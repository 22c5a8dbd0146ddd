"""Server search: its tables against fresh counts, its result against every placement, and the limits that it keeps."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement import server_search as search
from aurora.algorithms.search import annealing_core as core
from aurora.types import Placement


def routed(rng, tokens, experts, top_k):
    """(tokens, top_k) experts; experts of a pair (2 i, 2 i + 1) often come together."""
    liking_UE = rng.gumbel(size=(tokens, experts)) + np.repeat(2 * rng.random((tokens, experts // 2)), 2, axis=1)
    return np.argsort(-liking_UE, axis=1)[:, :top_k]


def crossing(experts_UK, server_U, server_E):
    """Rows that cross between servers, token by token; a token on no server crosses to each."""
    visits = [set(server_E[chosen].tolist()) - {int(own)} for chosen, own in zip(experts_UK, server_U, strict=True)]
    return sum(map(len, visits))


@st.composite
def problems(draw):
    """(tokens with their servers, limits that hold nothing, a placement) of a few servers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    server_G = np.repeat(np.arange(len(members)), members)
    gpus, experts = len(server_G), 2 * draw(st.integers(1, 5))
    experts_UK = routed(rng, draw(st.sampled_from((1, 40, 64, 150))), experts, min(experts, draw(st.integers(1, 4))))
    server_U = rng.integers(0, len(members), len(experts_UK)) if draw(st.booleans()) else np.full(len(experts_UK), search.NONE)
    gpu_s_GE, server_s_NE = rng.random((gpus, experts)), rng.random((len(members), experts))
    slots_G = np.full(gpus, -(-experts // gpus) + draw(st.integers(0, 2)))
    limits = search.ServerLimits(
        server_G,
        slots_G,
        gpu_s_GE,
        server_s_NE,
        1.5 * experts / gpus,
        1.5 * experts / len(members),
        rng.random(gpus),
        rng.random(len(members)),
    )
    gpu_E = rng.permutation(np.arange(experts) % gpus)
    return (experts_UK, server_U), limits, gpu_E, rng


def above_s(limits, gpu_E):
    """Seconds of all GPUs and servers above their limits."""
    own, server_E = np.arange(len(gpu_E)), limits.server_G[gpu_E]
    gpu_s_G = limits.beside_s_G + np.bincount(gpu_E, limits.gpu_s_GE[gpu_E, own], len(limits.beside_s_G))
    server_s_N = limits.beside_s_N + np.bincount(server_E, limits.server_s_NE[server_E, own], len(limits.beside_s_N))
    return np.maximum(gpu_s_G - limits.most_gpu_s, 0).sum() + np.maximum(server_s_N - limits.most_server_s, 0).sum()


def slots_of(limits, gpu_E):
    """(G, P) the expert in each slot."""
    return Placement.unreplicated(gpu_E, len(limits.slots_G)).held_LGP(int(limits.layer.slots_G.max()))[0]


def gpus_of(held_GP):
    """(E,) the GPU of each expert."""
    gpu_X, slot_X = np.nonzero(held_GP >= 0)
    return gpu_X[np.argsort(held_GP[gpu_X, slot_X])]


@given(problems(), st.sampled_from((0.1, 3.0, 1e9)))
def test_moves_and_swaps_are_priced_and_counted_as_they_are(problem, heat):
    (experts_UK, server_U), limits, gpu_E, rng = problem
    annealing = core.Annealing(limits.layer, slots_of(limits, gpu_E), (experts_UK, server_U), limits, 0.0, 0.0)
    for _ in range(12):
        best_GP, (over_s, rows) = core.anneal(annealing, rng.random((2, 3)), heat, 1.0, 1.0, 1.0)
        now_GP, now_over_s, now_rows = annealing.now
        now_E, best_E = gpus_of(now_GP), gpus_of(best_GP)
        before, after, best = (crossing(experts_UK, server_U, limits.server_G[each_E]) for each_E in (gpu_E, now_E, best_E))
        assert (now_rows, rows) == (after - before, best - before)
        np.testing.assert_allclose((now_over_s, over_s), (above_s(limits, now_E), above_s(limits, best_E)), atol=1e-9)
    assert (np.bincount(now_E, minlength=len(limits.slots_G)) <= limits.slots_G).all()


@given(problems())
def test_levelling_keeps_servers_and_slots_and_never_fills_the_fullest_gpu_further(problem):
    _, limits, gpu_E, _ = problem
    level_E = gpus_of(search.level(limits, slots_of(limits, gpu_E)))
    assert (limits.server_G[level_E] == limits.server_G[gpu_E]).all()
    assert (np.bincount(level_E, minlength=len(limits.slots_G)) <= limits.slots_G).all()
    own = np.arange(len(gpu_E))
    for server in range(limits.server_G.max() + 1):
        of_server = limits.server_G == server
        fullest = [
            (limits.beside_s_G + np.bincount(each_E, weights=limits.gpu_s_GE[each_E, own], minlength=len(of_server)))[
                of_server
            ].max()
            for each_E in (gpu_E, level_E)
        ]
        assert fullest[1] <= fullest[0] * (1 + 1e-9)


@given(st.integers(0, 2**32))
def test_the_best_of_all_placements_of_eight_experts_is_found(seed):
    rng = np.random.default_rng(seed)
    experts_UK, own_U = routed(rng, 60, 8, 3), rng.integers(0, 2, 60)
    load_E = np.bincount(experts_UK.ravel(), minlength=8).astype(np.float64)
    limits = search.ServerLimits(
        np.arange(2),
        np.full(2, 4),
        np.tile(load_E, (2, 1)),
        np.tile(load_E, (2, 1)),
        1.1 * 90.0,
        1.1 * 90.0,
        np.zeros(2),
        np.zeros(2),
    )
    start_E = np.arange(8) % 2
    found_E = search.server_search(experts_UK, own_U, limits, start_E, rng)
    assert np.bincount(found_E).tolist() == [4, 4]
    strict = limits._replace(most_gpu_s=limits.most_gpu_s * (1 - search.MARGIN))
    allowed = []
    for held in combinations(range(8), 4):
        server_E = np.isin(np.arange(8), held).astype(np.int64)
        if np.bincount(server_E, weights=load_E).max() <= strict.most_gpu_s:
            allowed.append(crossing(experts_UK, own_U, server_E))
    if allowed:
        assert np.bincount(found_E, weights=load_E).max() <= limits.most_gpu_s
        assert crossing(experts_UK, own_U, found_E) <= min(allowed)


def test_of_many_tokens_a_sample_tells_the_pairs(monkeypatch):
    """Four pairs of experts: half of the tokens choose both of a pair, the others any two; a sixteenth of the tokens is seen."""
    rng = np.random.default_rng(0)
    pair_U = 2 * rng.integers(0, 4, 8000)[:, None] + np.arange(2)
    experts_UK = np.where(rng.random((8000, 1)) < 0.5, pair_U, np.argsort(rng.random((8000, 8)), axis=1)[:, :2])
    load_E = np.bincount(experts_UK.ravel(), minlength=8).astype(np.float64)
    limits = search.ServerLimits(
        np.arange(2), np.full(2, 4), *[np.tile(load_E, (2, 1))] * 2, *[1.1 * load_E.sum() / 2] * 2, np.zeros(2), np.zeros(2)
    )
    monkeypatch.setattr(search, "MOST_TOKENS", 500)
    found_E = search.server_search(experts_UK, np.full(8000, search.NONE), limits, np.arange(8) % 2, rng)
    assert (found_E[0::2] == found_E[1::2]).all()
