"""Continuous batching by hand, and what always holds of it: budgets, first come first served, every token once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.simulator.requests import drawn_requests
from aurora.simulator.serving import serve, serve_evenly
from aurora.types import RequestOptions, Requests


def limits(tokens, requests=None):
    return RequestOptions(max_num_batched_tokens=tokens, max_num_seqs=requests or min(tokens, 256))


def made(*rows):
    """Requests of (arrival, input, output)."""
    arrivals, inputs, outputs = zip(*rows, strict=True)
    return Requests(np.array(arrivals, dtype=float), np.array(inputs), np.array(outputs))


def by_tokens(prompt_G, generating_G):
    """A step of 10 s, and 1 s more for each token of the busiest rank."""
    return 10.0 + float(np.maximum(prompt_G + generating_G, 1).max())


def one_second(_prompt_G, _generating_G):
    return 1.0


def test_one_request_by_hand():
    """10 tokens in steps of 4: 4, 4, 2, the last of which gives the first token; then two steps of one token.

    They take 14, 14, 12, 11 and 11 s, from the arrival after 5 s on.
    """
    seen = []
    served = serve(made((5, 10, 3)), 2, by_tokens, limits(4), lambda *step: seen.append((step[0].tolist(), *step[1:])))
    assert seen == [([4, 0], 1, 14.0), ([4, 0], 1, 14.0), ([2, 0], 1, 12.0), ([1, 0], 2, 11.0)]
    assert (served.ttft_s_Q.tolist(), served.tpot_s_X.tolist(), served.steps) == ([40.0], [11.0], 5)
    assert served.last_s_Q.tolist() == [67.0]
    assert served.tokens_per_s == 3 / 62


def test_a_request_that_generates_goes_on_beside_a_prompt():
    """On one rank, 6 tokens a step: A (4 in, 3 out) from 0 s, B (8 in, 1 out) from 1 s.

    A's prompt: 14 s. Then A's second token and 5 of B: 16 s. Then A's third and B's other 3: 14 s, which ends both.
    """
    served = serve(made((0, 4, 3), (1, 8, 1)), 1, by_tokens, limits(6))
    assert served.first_s_Q.tolist() == [14.0, 44.0]
    assert served.last_s_Q.tolist() == [44.0, 44.0]
    assert served.tpot_s_X.tolist() == [15.0]


def test_requests_go_to_the_least_loaded_rank():
    """Of three at once two ranks get one each, the first the third; the second has answered its own when the fourth comes."""
    served = serve(made((0, 4, 9), (0, 4, 1), (0, 4, 1), (25, 4, 1)), 2, by_tokens, limits(4))
    assert served.rank_Q.tolist() == [0, 1, 0, 1]


def test_a_service_of_fixed_length_waits_as_queueing_theory_says():
    """M/D/1: one request at a time, one step each. The mean wait is rho * service / (2 * (1 - rho)): Pollaczek and Khinchine."""
    requests, rho = drawn_requests(RequestOptions(rate=0.5, isl=1, osl=1, duration_s=100_000)), 0.5
    served = serve(requests, 1, one_second, limits(1, 1))
    assert served.ttft_s_Q.mean() == pytest.approx(1 + rho / (2 * (1 - rho)), rel=0.04)
    assert not served.queue_grows


def test_a_queue_that_grows_is_noticed():
    def at(rate):
        return serve(drawn_requests(RequestOptions(rate=rate, isl=1, osl=1, duration_s=2000)), 1, one_second, limits(1, 1))

    assert [at(rate).queue_grows for rate in (0.8, 1.5)] == [False, True]
    assert serve(made((3, 1, 1)), 1, one_second).waiting(0, 1) == 0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=25),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_what_holds_for_all_requests(rows, ranks, tokens, at_once):
    requests, at_once = made(*sorted(rows)), min(tokens, at_once)
    seen = []
    served = serve(requests, ranks, by_tokens, limits(tokens, at_once), lambda *step: seen.append(step))
    assert all(tokens_G.max() <= tokens for tokens_G, _, _ in seen)
    computed = sum(tokens_G * steps for tokens_G, steps, _ in seen)
    expected = Counter()  # each token of a prompt once, and of the answer each but the last, which nothing follows
    for rank, prompt, answer in zip(served.rank_Q, requests.input_tokens_Q, requests.output_tokens_Q, strict=True):
        expected[int(rank)] += int(prompt + answer - 1)
    assert computed.tolist() == [expected[rank] for rank in range(ranks)]
    assert serve_evenly(requests, ranks, by_tokens, limits(tokens, at_once)).rank_Q.tolist() == [0] * len(requests)
    assert served.steps == sum(steps for _, steps, _ in seen)
    for rank in range(ranks):  # first come, first served
        assert (np.diff(served.first_s_Q[served.rank_Q == rank]) >= 0).all()
        own = served.rank_Q == rank
        for begin in served.first_s_Q[own]:  # those that generate in the step after
            assert ((served.first_s_Q[own] <= begin) & (served.last_s_Q[own] > begin)).sum() <= at_once
    busy_s = sum(steps * seconds for _, steps, seconds in seen)
    assert served.last_s_Q.max() <= requests.arrival_s_Q[-1] + busy_s + 1e-6
    assert (served.ttft_s_Q >= 10).all()
    assert (served.tpot_s_X >= 11 - 1e-9).all()


def test_steps_that_are_alike_are_counted_as_if_one_by_one():
    """The same times, whether steps between arrivals and ends are jumped over or each has an arrival that changes nothing."""
    rows = [(0, 3, 40), (7, 5, 25), (300, 2, 2)]
    alone = serve(made(*rows), 1, one_second, limits(8))
    other = [(at, 1, 1) for at in range(1, 100) if at != 7]
    among = serve(made(*sorted(rows + other)), 2, one_second, limits(100))
    at_Q = among.requests.output_tokens_Q
    assert among.last_s_Q[at_Q == 40] == alone.last_s_Q[0] == 40
    assert alone.last_s_Q.tolist() == [40, 32, 302]


def test_the_busiest_rank_by_hand():
    """8000, 500, 8000 and 500 tokens at once on two ranks: 16,000 and 1000 by requests, 8500 each by tokens."""
    requests = made(*((0, tokens, 1) for tokens in (8000, 500, 8000, 500)))
    by_requests = serve(requests, 2, by_tokens, limits(1 << 15))
    assert (by_requests.rank_Q.tolist(), by_requests.seconds) == ([0, 1, 0, 1], 16_010)
    assert by_requests.busiest == by_requests.busiest_p99 == pytest.approx(16_000 / 8500)
    even = serve(requests, 2, by_tokens, RequestOptions(max_num_batched_tokens=1 << 15, dispatch="tokens"))
    assert (even.rank_Q.tolist(), even.seconds, even.busiest) == ([0, 1, 1, 0], 8510, 1.0)
    assert serve_evenly(requests, 2, by_tokens, limits(1 << 15)).seconds == 8510


def test_p99_of_the_busiest_rank_is_of_the_time():
    """One step of 30 s on one of two ranks, then 89 steps of 11 s: 3 % of 1009 s."""
    served = serve(made((0, 20, 90), (30, 1, 90)), 2, by_tokens, limits(64))
    assert served.busiest_X.tolist() == [2.0, 1.0, 1.0, 2.0]
    assert served.seconds_X.tolist() == [30.0, 11.0, 88 * 11.0, 11.0]
    assert served.busiest == pytest.approx((2 * 41 + 89 * 11) / (41 + 89 * 11))
    assert served.busiest_p99 == 2.0


def test_all_prompts_wait_for_the_same_step():
    """Two ranks, a prompt of 100 each, one step apart; both generate before. In every second step both are computed at once."""
    rows = [(0, 1, 9), (0, 1, 9), (15, 100, 1), (25, 100, 1)]
    apart = serve(made(*rows), 2, by_tokens, RequestOptions(max_num_batched_tokens=256, dispatch="tokens"))
    together = serve(made(*rows), 2, by_tokens, RequestOptions(max_num_batched_tokens=256, dispatch="interval:4"))
    assert apart.first_s_Q[2:].tolist() == [22 + 111, 22 + 222]
    assert together.first_s_Q[2:].tolist() == [44 + 111] * 2  # the step that ends at 11 s is the first


def test_requests_of_equal_size_lose_nothing():
    """With prompts of one size all ways take equally long, within 1 %."""
    requests = drawn_requests(RequestOptions(rate=4, isl=1000, osl=50, duration_s=120))

    def linear(prompt_G, generating_G):
        return 0.02 + 1e-4 * float((prompt_G + generating_G).max())

    seconds = {
        way: serve(requests, 4, linear, RequestOptions(dispatch=way)).seconds for way in ("requests", "tokens", "cadence")
    }
    assert max(seconds.values()) <= 1.01 * seconds["requests"]


def test_a_prefix_is_computed_once():
    """Blocks of four tokens. The second prompt shares two with the first, on one rank; the third ends with a shared block."""
    requests = Requests([0, 0, 50], [10, 10, 8], [1, 1, 1], blocks_Q=((1, 2, 3), (1, 2, 4), (1, 2)), block_tokens=4)
    priced = []
    served = serve(requests, 1, lambda prompt_G, _: priced.append(prompt_G.tolist()) or 20.0, limits(16))
    assert priced == [[12], [4]]  # 10 and 2; then one block of two, as the last token is always computed
    assert served.cached_tokens == 8 + 4
    later = Requests([0, 50], [10, 10], [1, 1], blocks_Q=((1, 2, 3), (1, 2, 4)), block_tokens=4)
    ways = [serve(later, 2, one_second, RequestOptions(dispatch=way)) for way in ("tokens", "prefix")]
    assert [(way.rank_Q.tolist(), way.cached_tokens) for way in ways] == [([0, 1], 0), ([0, 0], 8)]


def test_a_later_turn_is_sent_once_the_one_before_is_answered():
    """Steps of one second: the first turn takes 3, the second is sent 2 s after, the third 0.5 s after its end; one arrives alone."""
    requests = Requests([0, 0, 0, 4], [5, 5, 5, 5], [3, 2, 1, 1], [7, 7, 7, 8], [0, 2, 0.5, 0])
    served = serve(requests, 1, one_second)
    assert (served.arrival_s_Q.tolist(), served.first_s_Q.tolist()) == ([0, 5, 7.5, 4], [1, 6, 8.5, 5])
    assert served.last_s_Q.tolist() == [3, 7, 8.5, 5]
    assert requests.until(1) == Requests([0, 0, 0], [5, 5, 5], [3, 2, 1], [7, 7, 7], [0, 2, 0.5])


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: RequestOptions(max_num_batched_tokens=4, max_num_seqs=5), "`max_num_seqs`: expected at most the 4 of"),
        (lambda: RequestOptions(dispatch="tokens", ttft_s=1.0), "`ttft_s`: expected with `dispatch` cadence, found tokens"),
        (lambda: drawn_requests(RequestOptions(rate=1, isl=1)), "`osl`: expected a number, or a trace"),
        (lambda: drawn_requests(RequestOptions(rate=1e6, isl=1, osl=1)), "`rate`: expected at most 1000000 requests, found 1e"),
        (lambda: drawn_requests(RequestOptions(rate=0.001, isl=1, osl=1, duration_s=1)), r"found none at 0\.001/s in 1 s"),
        (lambda: made((1, 1, 1), (0, 1, 1)), "never fall"),
        (lambda: made((0, 1, 0)), "output_tokens: expected one or more"),
        (lambda: made((2, 1, 1)).until(1), "`duration_s`: expected requests in the first 1 seconds"),
        (lambda: Requests([0], [1], [1], [0], [-1.0]), "delay_s: expected zero or more seconds, found -1"),
        (lambda: Requests([0], [1], [1], blocks_Q=((1,),)), "blocks: expected blocks for each of 1 requests"),
    ],
)
def test_options_and_requests_that_are_refused(refused, said):
    with pytest.raises(BadInput, match=said):
        refused()


def test_requests_are_cut_and_sped_up():
    assert len(made((0, 1, 1), (2, 1, 1)).until(1)) == 1
    assert made((0, 1, 1), (2, 1, 1)).at_rate(4).arrival_s_Q.tolist() == [0, 0.5]
