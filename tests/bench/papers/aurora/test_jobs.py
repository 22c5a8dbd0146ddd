"""What a job takes, by hand and from first principles."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.placement.colocation import COLOCATE
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.types import Cluster, Curve, Gpu, Profile
from bench.papers.aurora.jobs import PRICINGS, job, lina_all, lina_half
from bench.papers.aurora.studies import StudySetting
from bench.papers.aurora.traffic import profile
from tests.conftest import cluster

pytestmark = pytest.mark.full


def tiny(tokens_SE, expert=0.0):
    """One layer, tokens of one byte each way, `expert` seconds a token."""
    curves = {
        p: Curve(np.array([1.0, 2.0]), np.array([s, 2 * s])) for p, s in (("gate", 0), ("expert", expert), ("aggregate", 0))
    }
    return Profile("tiny", "", np.array(tokens_SE)[None, None], 1, 1, 1, 0, 0, {"reference": curves})


def mixed(*rates):
    return Cluster("mixed", tuple(Gpu(f"g{i}", f"k{r}", 0, r, r, 10**9, r, 0.0) for i, r in enumerate(rates)))


def setting(jobs, pricing):
    return StudySetting(None, jobs[0].cluster, PRICINGS[pricing], np.random.default_rng(0))


@st.composite
def cases(draw):
    """A mixed cluster, tokens with equal row sums, an assignment."""
    n = draw(st.integers(2, 5))
    rates = draw(st.lists(st.sampled_from((1.0, 2.0, 4.0)), min_size=n, max_size=n))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return mixed(*rates), rng.multinomial(40, rng.dirichlet(np.ones(n), size=n)), np.array(draw(st.permutations(range(n))))


@given(cases(), st.booleans())
def test_costs_are_those_of_the_traffic_as_placed(case, coupled):
    machines, tokens_SE, held_G = case
    one = job(machines, tiny(tokens_SE, 0.5), 0, coupled)
    placed = layer_costs(machines, one.placed(held_G), 0).grouped(np.arange(len(held_G)))
    expected, found = placed.phase_times(np.arange(len(held_G))), one.costs.phase_times(held_G)
    for phase in ("gate", "send", "recv", "csend", "crecv", "expert", "aggregate"):
        assert found.of(phase) == pytest.approx(expected.of(phase))


def test_a_shard_moves_with_its_expert_where_coupled():
    """0 sends 4, 1 sends 2, on ports of 4 and 1 B/s. Swapped and coupled the slow GPU sends the 4; else it still sends 2 of its
    own, now to the other expert: everything is local."""
    machines, swapped = mixed(4.0, 1.0), np.array([1, 0])
    tokens = [[0, 4], [4, 0]]
    moves = {coupled: job(machines, tiny(tokens), 0, coupled) for coupled in (True, False)}
    assert PRICINGS["printed"].price([moves[True]], [swapped]).seconds == pytest.approx(8)
    assert PRICINGS["printed"].price([moves[False]], [swapped]).seconds == 0


@pytest.mark.parametrize("pricing", ["printed", "simulated"])
def test_one_model_by_hand(pricing):
    """Dispatch of 4 B against 2 B at 2 B/s takes 2 s, as does the combine; each expert works on 5 tokens of 0.1 s."""
    one = job(cluster(2.0, 2.0), tiny([[1, 4], [4, 1]], 0.1), 0, True)
    outcome = PRICINGS[pricing].price([one], [np.arange(2)])
    assert outcome.seconds == pytest.approx(2 + 0.5 + 2)
    assert outcome.utilisation == pytest.approx(0.5 / 4.5)


def test_two_models_by_hand():
    """Expert 1 of each receives 6 B and expert 0 2 B, of other shards than their own, at 1 B/s, without computation. As
    printed 2 |N_a + N_b|: 24 s side by side, and 16 s where popular meets unpopular, which the matching finds."""
    jobs = [job(cluster(1.0, 1.0), tiny([[0, 6], [2, 4]]), 0, True) for _ in range(2)]
    price = PRICINGS["printed"].price
    assert price(jobs, [np.array([0, 1]), np.array([0, 1])]).seconds == pytest.approx(24)
    found = setting(jobs, "printed").colocate(jobs, "matching")
    assert price(jobs, found).seconds == pytest.approx(16)


def test_orders_are_timed_to_their_last_transfer():
    """Aurora's Fig. 4: GPUs 0 and 1 each send one unit to both others. Both smallest-first ties begin with the lower rank, so
    they meet at GPU 2: 1 + 2/1 with the shared port, against 2 for the best order, in both directions of the round."""
    one = job(cluster(1.0, 1.0, 1.0), tiny([[0, 1, 1], [1, 0, 1], [0, 0, 2]]), 0, True)
    held_G = np.arange(3)
    assert PRICINGS["printed"].price([one], [held_G], "birkhoff").seconds == pytest.approx(4)
    assert PRICINGS["printed"].price([one], [held_G], "sjf").seconds > 4


TOKENS = np.array([[1, 2, 3, 4], [5, 0, 7, 8], [9, 1, 3, 2], [4, 4, 4, 4]])  # columns sum to 19, 7, 17, 18


def test_lina_on_half_folds_most_with_least_and_their_shards():
    """Pairs (0, 1) and (2, 3): 19 with 7, 18 with 17."""
    packed = lina_half(job(cluster(1.0, 2.0, 3.0, 4.0), tiny(TOKENS), 0, True))
    assert packed.profile.tokens_TLSE[0, 0].tolist() == [[1 + 2 + 5 + 0, 3 + 4 + 7 + 8], [9 + 1 + 4 + 4, 3 + 2 + 4 + 4]]
    assert [gpu.out_Bps for gpu in packed.cluster.gpus] == [1.0, 3.0]


def test_lina_on_all_halves_each_pairs_tokens():
    shared = lina_all(job(cluster(1.0, 1.0, 1.0, 1.0), tiny(TOKENS), 0, True)).profile.tokens_TLSE[0, 0]
    assert shared[:, :2].tolist() == [[2, 1], [3, 2], [5, 5], [4, 4]]
    assert shared[:, 2:].tolist() == [[4, 3], [8, 7], [3, 2], [4, 4]]


@settings(max_examples=5)
@given(st.sampled_from(["printed", "causal"]), st.integers(0, 10**6))
def test_no_colocation_beats_every_arrangement_tried(name, seed):
    """Four mixed GPUs, by both readings of Table 2: the minimum over all 24 x 24 arrangements."""
    rng = np.random.default_rng(seed)
    pair = [tiny(rng.multinomial(40, rng.dirichlet(np.ones(4), size=4)), 0.3) for _ in range(2)]
    jobs = [job(mixed(4.0, 4.0, 2.0, 1.0), one, 0, True) for one in pair]
    pricing, searched = PRICINGS[name], setting(jobs, name)
    orders = [np.array(p) for p in permutations(range(4))]
    best = min(pricing.price(jobs, [a, b]).seconds for a in orders for b in orders)
    for maker in COLOCATE:
        assert pricing.price(jobs, searched.colocate(jobs, maker)).seconds >= best * (1 - 1e-9)
    assert pricing.price(jobs, searched.colocate(jobs, "exact")).seconds == pytest.approx(best)


def test_the_papers_models_compute_in_proportion_to_tokens():
    one = profile("m", np.ones((1, 8, 8), dtype=np.int64))
    gpu = Gpu("g", "half", 0, 1.0, 1.0, 1, 0.5, 0.0)
    assert one.seconds("expert", gpu, [1000]) == pytest.approx(2000 * 4 * 768 * 3072 / 100e12)
