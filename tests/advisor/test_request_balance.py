"""Balance of requests over ranks: seconds of uneven steps by hand, and what is advised."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.engine import Layout
from aurora.advisor.request_balance import MOST_SIMULATED, UnevenSteps, balance_of_requests, heavy_tailed
from aurora.advisor.served_ways import compare_ways_of_serving
from aurora.advisor.step_time import SchedulerStep, step_seconds
from aurora.types import RequestLoad, Requests
from tests.advisor.test_served_ways import CONFIG, H100, ONE_SERVER, traffic

RATIOS = 1.5, 1.25


def parts(way, prompts, generating, context=600, isl=512):
    """Parts of a step of even ranks."""
    step = SchedulerStep(prompts, generating, generating * context, 0, -(-prompts // isl) or 1)
    return step_seconds(CONFIG, H100, way.layout, step, exchange=way.exchange, ratio=RATIOS[0 if prompts else 1])


@pytest.mark.parametrize("exchange", ["allgather", "deepep-ht"])
def test_the_busiest_rank_delays_its_own_work_and_the_mean_that_of_experts(exchange):
    """1024 prompt tokens and 16 requests on one of two ranks, 0 and 16 on the other: points of the grid, and their mean."""
    way = replace(SERVING_ENGINES["vllm"].default(2, 8), exchange=exchange)
    steps = UnevenSteps(ONE_SERVER, way, RATIOS, context=600, isl=512)
    busiest, mean, other = parts(way, 1024, 16), parts(way, 512, 16), parts(way, 0, 16)
    own = busiest.total - busiest.host_s - busiest.experts_s - busiest.collectives_s
    hidden_s = parts(way, 8192, 16).host_s  # of a step so long that the host is done before the GPU
    launched = busiest.total - hidden_s if busiest.host_s > hidden_s else 0.0
    sent = busiest.collectives_s if exchange == "deepep-ht" else mean.collectives_s  # an allgather's bytes are those of all
    assert steps(np.array([1024, 0]), np.array([16, 16])) == pytest.approx(
        hidden_s + max(own + sent + mean.experts_s, launched)
    )
    assert steps(np.array([0, 0]), np.array([16, 16])) == pytest.approx(other.total)
    between = steps(np.array([768, 768]), np.array([16, 16]))
    assert between == pytest.approx((parts(way, 512, 16).total + parts(way, 1024, 16).total) / 2)
    end, before = parts(way, 8192, 0).total, parts(way, 4096, 0).total
    assert steps(np.array([12_288, 12_288]), np.array([0, 0])) == pytest.approx(end + (end - before), rel=1e-3)


def test_all_ranks_leave_their_graphs_where_one_has_prompts():
    steps = UnevenSteps(ONE_SERVER, SERVING_ENGINES["vllm"].default(2, 8), RATIOS, context=600, isl=512)
    some = np.array([16, 16])
    assert steps(np.array([0, 0]), some) < steps(np.array([1, 0]), some) <= steps(np.array([1, 1]), some)


@pytest.fixture(scope="module")
def compared():
    return compare_ways_of_serving(traffic(), ONE_SERVER, "vllm", 8)


def alternating(count=400):
    """Prompts of 8000 and 500 tokens in turn, which equal counts put on different halves of the ranks."""
    return Requests(np.arange(count) / 10, np.where(np.arange(count) % 2, 500, 8000), np.full(count, 32))


def test_long_and_short_prompts_in_turn(compared):
    spread = balance_of_requests(ONE_SERVER, compared, None, alternating())
    assert (spread.requests, spread.drawn, spread.ranks) == (400, False, 8)
    assert spread.worth
    chosen = spread.flags[spread.best]
    assert spread.default.tokens_per_s < chosen.tokens_per_s < spread.even.tokens_per_s * 1.01
    assert spread.default.busiest > 2 > spread.even.busiest == 1
    assert spread.experts.tokens_per_s > spread.default.tokens_per_s
    assert spread.both.tokens_per_s > chosen.tokens_per_s
    assert spread.expert_way == "perfect balance of experts"


def test_load_is_arrivals_over_what_even_ranks_take(compared):
    """Twice as fast arrivals are twice the load; what is advised stays."""
    slow, fast = (balance_of_requests(ONE_SERVER, compared, None, alternating().at_rate(rate)) for rate in (1, 2))
    assert fast.load == pytest.approx(2 * slow.load)
    assert (fast.best, fast.default.tokens_per_s) == (slow.best, pytest.approx(slow.default.tokens_per_s))


def test_one_rank_has_nothing_to_spread(compared):
    one = replace(compared, default=replace(compared.default, way=SERVING_ENGINES["vllm"].default(1, 8)))
    assert balance_of_requests(ONE_SERVER, one, None, alternating()) is None


def test_a_planned_placement_counts_by_its_share_of_the_ceiling(compared):
    best = next(other for other in compared.others if other.share and other.way.layout == Layout(data=8, expert=8))
    spread = balance_of_requests(ONE_SERVER, compared, best, alternating())
    perfect = balance_of_requests(ONE_SERVER, compared, None, alternating())
    assert spread.expert_way == best.name
    assert spread.default.tokens_per_s <= spread.experts.tokens_per_s <= perfect.experts.tokens_per_s


def test_drawn_lengths():
    requests = heavy_tailed(RequestLoad(isl=1000, osl=100))
    assert requests == heavy_tailed(RequestLoad(isl=1000, osl=100))
    assert requests.input_tokens_Q.mean() == pytest.approx(1000, rel=0.15)
    assert np.percentile(requests.input_tokens_Q, 99) / np.median(requests.input_tokens_Q) == pytest.approx(
        np.exp(2.326), rel=0.25
    )
    assert len(requests.first(MOST_SIMULATED)) == len(requests)
