"""Headlines of the papers: prices, replays and expectations by hand."""

import numpy as np
import pytest

from aurora.algorithms.network.switch import timed
from aurora.types import Curve, Network, Profile
from bench.papers import bcc, lazarus
from bench.papers.algorithm_1 import aurora_alg1
from bench.papers.aurora import LayerJob, colocated, lina_half, price
from bench.papers.lazarus import SYSTEMS, Job, Replay
from tests.conftest import cluster

pytestmark = pytest.mark.full

TOKENS = np.array([[1, 2, 3, 4], [5, 0, 7, 8], [9, 1, 3, 2], [4, 4, 4, 4]])  # columns sum to 19, 7, 17, 18


def tiny(tokens_SE, expert_s=0.0):
    """One layer, tokens of one byte each way, `expert_s` seconds a token."""
    seconds = {"gate": 0.0, "expert": expert_s, "aggregate": 0.0}
    curves = {phase: Curve(np.array([1.0, 2.0]), np.array([s, 2 * s])) for phase, s in seconds.items()}
    return Profile("tiny", "", np.array(tokens_SE)[None, None], 1, 1, 1, 0, 0, {"reference": curves})


def test_algorithm_1_keeps_its_bottleneck_busy():
    """The busiest GPU's transfers follow each other without a gap, whatever comes after."""
    bytes_GG = np.array([[0, 9, 9, 9], [1, 0, 2, 1], [1, 1, 0, 2], [2, 1, 1, 0]])
    made = timed(aurora_alg1(bytes_GG, Network.equal(4), rng=np.random.default_rng(0)), bytes_GG, Network.equal(4))
    assert made.start_s_X[made.src_X == 0].tolist() == [0, 9, 18]
    assert made.makespan_s == 27


def test_one_model_by_hand():
    """Dispatch of 4 B against 2 B at 2 B/s takes 2 s, as does the combine; each expert works on 5 tokens of 0.1 s."""
    seconds, utilisation = price([LayerJob.of(cluster(2.0, 2.0), tiny([[1, 4], [4, 1]], 0.1))], [np.arange(2)])
    assert seconds == pytest.approx(2 + 0.5 + 2)
    assert utilisation == pytest.approx(0.5 / 4.5)


def test_two_models_by_hand():
    """Expert 1 of each receives 6 B and expert 0 2 B, of other shards than their own, at 1 B/s, without computation. As
    printed 2 |N_a + N_b|: 24 s side by side, and 16 s where popular meets unpopular, which the matching finds."""
    jobs = [LayerJob.of(cluster(1.0, 1.0), tiny([[0, 6], [2, 4]])) for _ in range(2)]
    assert price(jobs, [np.array([0, 1]), np.array([0, 1])])[0] == pytest.approx(24)
    assert price(jobs, [np.array([0, 1]), np.array([1, 0])])[0] == pytest.approx(16)


def test_the_matching_finds_the_best_pairs():
    jobs = [LayerJob.of(cluster(*[1.0] * 8), tiny(np.diag([8] * 8) + np.arange(8))) for _ in range(2)]
    found = colocated(jobs, "matching", np.random.default_rng(0))
    assert price(jobs, found)[0] <= min(price(jobs, [np.arange(8), np.roll(np.arange(8), n)])[0] for n in range(8))


def test_orders_are_timed_to_their_last_transfer():
    """Aurora's Fig. 4: GPUs 0 and 1 each send one unit to both others. Both smallest-first ties begin with the lower rank, so
    they meet at GPU 2: 1 + 2/1 with the shared port, against 2 for the best order, in both directions of the round."""
    one = LayerJob.of(cluster(1.0, 1.0, 1.0), tiny([[0, 1, 1], [1, 0, 1], [0, 0, 2]]))
    assert price([one], [np.arange(3)], "birkhoff")[0] == pytest.approx(4)
    assert price([one], [np.arange(3)], "sjf")[0] > 4


def test_lina_on_half_folds_most_with_least_and_their_shards(monkeypatch):
    """Pairs (0, 1) and (2, 3): 19 with 7, 18 with 17."""
    monkeypatch.setattr("bench.papers.aurora.EXPERTS", 4)
    packed = lina_half(LayerJob.of(cluster(1.0, 2.0, 3.0, 4.0), tiny(TOKENS)))
    assert packed.profile.tokens_TLSE[0, 0].tolist() == [[1 + 2 + 5 + 0, 3 + 4 + 7 + 8], [9 + 1 + 4 + 4, 3 + 2 + 4 + 4]]
    assert [gpu.out_Bps for gpu in packed.cluster.gpus] == [1.0, 3.0]


def test_a_failure_loses_what_was_not_saved_unless_another_node_holds_it(monkeypatch):
    """Balanced loads on four nodes, steps of 1 s, 4 samples each: DS saves after 50 s, for 10 s. At 110 s 50 s are unsaved."""
    monkeypatch.setattr(lazarus, "GPT_M_STEP_S", 1.0)
    monkeypatch.setattr(lazarus, "STORAGE_BPS", 1.3e9 * 1.6)
    monkeypatch.setattr(lazarus, "LAYERS", 1)
    job = Job(np.ones((1, 4)), 2, 1.3e9, 1)
    left = {}
    for name, system in SYSTEMS.items():
        run = Replay(job, system, nodes=4)
        run.advance(110.0)
        before = run.samples
        run.fail(0)
        left[name] = (round(before), round(run.samples), run.restarts)
        run.advance(25.0)
        assert run.samples == pytest.approx(left[name][1])  # a pause of 30 s and more
    assert left == {"aurora": (1760, 1760, 0), "DS": (1600, 800, 1), "DS(FT)": (1760, 1760, 0)}


def test_expected_seconds_of_results_are_those_of_draws():
    workers, load_W = bcc.MixedWorkers(np.array([1.0, 0.5, 2.0]), np.array([1.0, 2.0, 4.0])), np.array([2, 3, 1])
    rng = np.random.default_rng(0)
    drawn_XW = workers.shift_W * load_W + rng.exponential(size=(20_000, 3)) * load_W / workers.rate_W
    for results in (1, 3, 6):
        order_XW = np.argsort(drawn_XW, axis=1)
        come_XW = np.cumsum(load_W[order_XW], axis=1) >= results
        ended_X = np.take_along_axis(drawn_XW, order_XW, axis=1)[np.arange(len(drawn_XW)), come_XW.argmax(axis=1)]
        error = ended_X.std() / np.sqrt(len(ended_X))
        assert abs(bcc.results_s(workers, load_W, results) - ended_X.mean()) < 4 * error + 1e-3
    pace = bcc.seconds_a_batch(workers) * workers.rate_W
    assert pace - np.log1p(pace) == pytest.approx(workers.shift_W * workers.rate_W)
