from types import SimpleNamespace

import pytest
from aurora_vllm import prompt_steps
from aurora_vllm.prompt_steps import IntervalChanges, IntervalPlanner, MeasuredStep, RankReport, RankSteps, Step


class Rank:
    """A rank's scheduler: steps of 0.5 s, in which prompts are computed as they are asked to be."""

    def __init__(self, **how):
        self.steps, self.requests, self.running, self.now_s, self.number = RankSteps(1000, 64, **how), {}, [], 0.0, 0

    def send(self, name, tokens, arrival_s=0.0):
        self.requests[name] = SimpleNamespace(
            request_id=name, num_prompt_tokens=tokens, num_computed_tokens=0, arrival_time=arrival_s
        )

    def step(self, opens=True, **computed):
        self.steps.look(Step(0, self.number), self.now_s, self.requests, self.running, opens)
        for name, tokens in computed.items():
            of = self.requests[name]
            self.running += [] if of in self.running else [of]
            of.num_computed_tokens += tokens
        self.now_s, self.number = self.now_s + 0.5, self.number + 1


def test_a_rank_counts_its_prompts_and_what_is_left_of_them():
    rank = Rank()
    rank.send("a", 300)
    rank.send("b", 100)
    rank.step(a=200)
    rank.send("c", 50)
    rank.step(a=100, b=100)
    rank.step(a=1, b=1)
    report = rank.steps.latest
    assert (report.prompts_per_s, report.prompt_tokens_per_s) == (3.0, 450.0), "in the first second"
    assert report.prompt_tokens == 50, "c came while the step before was computed, and was not begun in it"
    assert report.generating == 2
    assert report.steps == (MeasuredStep(Step(0, 0), 0.5, 200, 0), MeasuredStep(Step(0, 1), 0.5, 200, 0))
    rank.running.remove(rank.requests.pop("a"))
    rank.send("a2", 7)
    rank.step()
    assert rank.steps.latest.generating == 1
    assert rank.steps.latest.steps[-1] == MeasuredStep(Step(0, 2), 0.5, 0, 2)
    rank.number += 5  # in which it had no requests
    rank.step()
    assert rank.steps.latest.steps[-1].step == Step(0, 2), "a step that does not follow is not timed"


def test_the_tokens_of_a_step_that_is_scheduled_ahead_go_with_its_own_seconds():
    """With one step under way, the time between two looks is that of the step before the one that was scheduled."""
    rank = Rank(lag=1)
    rank.send("a", 300)
    rank.step(a=200)
    rank.step(a=100)
    rank.step(a=1)
    assert [each.prompt_tokens for each in rank.steps.latest.steps] == [0, 200]


def test_requests_that_are_aborted_leave_no_tokens():
    rank = Rank()
    rank.send("a", 300)
    rank.step()
    del rank.requests["a"]
    rank.step()
    assert rank.steps.latest.prompt_tokens == 300, "of the look before"
    rank.step()
    assert rank.steps.latest.prompt_tokens == 0


def test_prompts_that_wait_for_a_step_are_counted_with_their_seconds():
    rank = Rank()
    rank.send("a", 10)
    rank.step(a=10)
    rank.step(a=1)
    rank.send("b", 20)
    rank.step(opens=False, a=1)
    rank.step(opens=True, a=1, b=20)
    rank.send("c", 20)
    rank.step(opens=True, a=1, b=1, c=20)
    rank.step()
    assert (rank.steps.held, rank.steps.held_s) == (1, 1.0)


def test_rates_are_of_the_last_ten_seconds_by_the_times_when_requests_came():
    """Requests that a step of 3 s hid came when they say, or after the look before it, whatever another host's clock says."""
    rank = Rank()
    for name, arrival_s in (("a", 2.0), ("b", 3.0), ("c", -90.0), ("d", 99.0)):
        rank.send(name, 100, arrival_s)
        rank.now_s = {"a": 2.0, "b": 4.0, "c": 6.0, "d": 6.5}[name]
        rank.step()
    assert rank.steps.latest.prompts_per_s == pytest.approx(4 / 4.5)  # in the 4.5 s since the first came, at 2.0
    rates = [rank.steps.idle(now_s) for now_s in (13.5, 14.25, 20.0)]  # since 3.5, 4.25 and 10: "c" came at 4.0, "d" at 6.5
    assert [(each.prompts_per_s, each.prompt_tokens_per_s) for each in rates] == [(0.2, 20.0), (0.1, 10.0), (0.0, 0.0)]


def reports(numbers, tokens_of, prompts_per_s, ranks=2, generating=10, left=0, fixed=0.02):
    """Reports of ranks of which the last has twice the prompt tokens of the others."""
    busiest = {number: 2 * tokens_of(number) for number in numbers}
    return [
        RankReport(
            prompts_per_s, prompts_per_s * 1250, left, generating,
            [
                MeasuredStep(Step(0, n), fixed + 1e-4 * busiest[n], busiest[n] if rank == ranks - 1 else busiest[n] // 2, 10)
                for n in numbers
            ],
        )
        for rank in range(ranks)
    ]  # fmt: skip


def planned(planner, **how):
    """The plan after ten seconds with two prompts of 1250 tokens for each rank in every second."""
    interval = 1
    for second in range(11):
        numbers = range(10 * second, 10 * second + 10)
        interval = planner.plan(reports(numbers, lambda n: 500 * (n % 5 == 0), 2.0, **how), float(second))
    return interval


def test_the_interval_is_planned_from_the_fitted_seconds_of_a_step_and_the_arrivals():
    """Steps of 20 ms and 0.1 ms a prompt token of the busiest rank, and 5,000 tokens a second of two ranks."""
    planner = IntervalPlanner(1010)
    interval = planned(planner)
    assert planner.without_s == pytest.approx(0.02)
    assert interval == 12  # prompts of 2 x 850 tokens come in 0.34 s, in which a step of 0.105 s and 11 of 0.02 s fit
    assert planner.busiest / planner.mean == pytest.approx(1.3125)  # 1010 + 4 x 10 over half of 1010 + 510 + 8 x 10


def test_a_bound_on_the_first_token_shortens_the_interval():
    assert planned(IntervalPlanner(1010, ttft_s=0.3)) == 5  # 0.3 s less twice 0.105 s for the two steps with prompts


def test_prompts_are_computed_in_every_step_where_all_ranks_are_full_or_prompts_are_rare():
    assert planned(IntervalPlanner(1010), left=1000) == IntervalPlanner(1010).plan([RankReport()], 0.0) == 1
    planner = IntervalPlanner(1010)
    for second in range(30):
        few = reports(range(10 * second, 10 * second + 10), lambda n: 500 * (n % 5 == 0), 0.1, fixed=0.001)
        assert planner.plan(few, float(second)) == 1


class Store(dict):
    """A store of torch.distributed."""

    def check(self, keys):
        return all(key in self for key in keys)

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key].encode()


class Planned:
    """A planner that wants these intervals, one after the other."""

    without_s = 0.1

    def __init__(self, *intervals):
        self.intervals = list(intervals)

    def plan(self, reports, now_s):
        self.seen = reports
        return self.intervals.pop(0)


def test_all_ranks_change_their_interval_at_the_same_step():
    store, planner = Store(), Planned(1, 5, 7, 7)
    ranks = [IntervalChanges(rank, 2, RankSteps(100, 64), planner if rank == 0 else None) for rank in range(2)]

    def exchange(rank, step):
        ranks[rank].exchange(store, step, lambda: True, 0.0)

    exchange(0, Step(3, 10))
    exchange(1, Step(3, 10))
    assert [rank.plan for rank in ranks] == [(1, Step(-1, -1))] * 2
    exchange(0, Step(3, 20))
    exchange(1, Step(3, 22))
    begins = Step(3, 20 + 1 + prompt_steps.LEAD)
    assert [rank.plan for rank in ranks] == [(5, begins)] * 2
    for rank in ranks:
        assert [number for number in range(20, 40) if rank.opens(Step(3, number))] == [20, 21, 22, 23, 24, 25, 30, 35]
    exchange(0, Step(3, 21))
    assert ranks[0].plan == (5, begins), "one plan begins before the next is made"
    exchange(0, Step(3, 26))
    assert ranks[0].plan == (7, Step(3, 35)), "the next step with prompts that is not too near"
    assert [number for number in range(26, 50) if ranks[0].opens(Step(3, number))] == [30, 35, 42, 49]
    assert [number for number in range(9) if ranks[0].opens(Step(4, number))] == [0, 7]
    assert ranks[1].plan == (5, begins), "a rank that has not heard of it"


def test_ranks_that_have_no_requests_are_idle_to_the_planner():
    store, planner = Store(), Planned(1, 1)
    first = IntervalChanges(0, 3, RankSteps(100, 64), planner)
    first.exchange(store, Step(0, 0), lambda: False, 0.0)
    assert planner.seen == [RankReport(steps=[])] + [RankReport()] * 2
    other = IntervalChanges(2, 3, RankSteps(100, 64))
    other.steps.latest = RankReport(4, 400, 100, 3, (MeasuredStep(Step(0, 1), 0.5, 9, 1),))
    other.exchange(store, Step(0, 2), lambda: True, 0.0)
    first.exchange(store, Step(0, 2), lambda: False, 0.0)
    assert planner.seen[2] == RankReport(4, 400, 100, 3, [MeasuredStep(Step(0, 1), 0.5, 9, 1)])
    other.exchange(store, Step(0, 2), lambda: False, 0.0)
    assert RankReport.from_json(store.get("aurora-steps-2")).generating == 0


def test_ranks_are_only_watched_where_no_interval_is_planned():
    store = Store()
    rank = IntervalChanges(0, 1, RankSteps(100, 64), Planned(9), plans=False)
    rank.exchange(store, Step(0, 0), lambda: True, 0.0)
    assert rank.plan[0] == 1
    assert "aurora-interval" not in store
