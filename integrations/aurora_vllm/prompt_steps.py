"""Steps in which data-parallel ranks compute prompts: what each rank reports of its steps, and the interval that rank 0 plans.

Reports and plans go through the store that vLLM's engines share, in a thread that no step waits for. A plan names the step from
which it holds, so that all ranks change in the same one. A rank that reads it later is slower until then, and no more.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from aurora.algorithms.requests.steps import RECENT_S, RanksAtStep, planned_interval

POLL_S = 0.1  # between two reports
LEAD = 4  # reports from a plan to the step from which it holds
KEPT = 64  # steps in a report
LEAST_STEPS = 8  # that the seconds of a step are fitted to


class Step(NamedTuple):
    """A step of all ranks: vLLM's number of the wave, and of the step in it."""

    wave: int
    number: int


class MeasuredStep(NamedTuple):
    """A step as one rank saw it: its seconds, this rank's prompt tokens in it, and its requests that generated."""

    step: Step
    seconds: float
    prompt_tokens: int
    generating: int


@dataclass(frozen=True)
class RankReport:
    """The state of one rank.

    Attributes:
        prompts_per_s: prompts that came in a second, over the last RECENT_S seconds.
        prompt_tokens_per_s: tokens of these prompts in a second.
        prompt_tokens: prompt tokens left after the last step in which prompts were computed, of requests that may begin.
        generating: requests that generate.
        steps: the last steps.
    """

    prompts_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    generating: int = 0
    steps: Sequence[MeasuredStep] = ()

    def to_json(self) -> str:
        """Returns the report as text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankReport":
        """Returns the report that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"steps": [MeasuredStep(Step(*step), *rest) for step, *rest in values["steps"]]})


class RankSteps:
    """Watches the steps of one rank's scheduler.

    Args:
        most_tokens: maximum tokens of a step.
        most_requests: maximum requests that have begun.
        lag: steps that are scheduled while a step runs.

    Attributes:
        latest: a report, not older than POLL_S while the rank has requests.
        held: prompts that had to wait for a step in which prompts are computed.
        held_s: seconds that they waited for.
    """

    def __init__(self, most_tokens: int, most_requests: int, lag: int = 0) -> None:
        self.latest, self.held, self.held_s = RankReport(), 0, 0.0
        self._most_tokens, self._most_requests = most_tokens, most_requests
        self._known = set[str]()
        self._left: dict[str, int] = {}  # prompt tokens that are not computed, by request
        self._came_s: dict[str, float] = {}  # of prompts that are held
        self._arrivals = deque[tuple[float, int]]()  # time and tokens of the prompts of the last RECENT_S seconds
        self._first_s: float | None = None
        self._looked_s, self._backlog, self._generating = -math.inf, 0, 0
        self._under_way = deque([(0, 0)] * lag)
        self._recent = deque[MeasuredStep](maxlen=KEPT)
        self._before: tuple[Step, float, bool] | None = None
        self._reported_s = -math.inf

    def look(self, step: Step, now_s: float, requests: dict[str, Any], running: Sequence[Any], opens: bool) -> None:
        """Takes the scheduler's requests right before it schedules a step.

        Args:
            step: the step.
            now_s: the time, in seconds, by the clock of the requests' `arrival_time`.
            requests: all requests by id, in the sequence in which they came.
            running: those that have begun.
            opens: True: prompts are computed in this step.
        """
        computed, generating = self._progress(running, now_s)
        if self._before is not None:
            before, before_s, opened = self._before
            self._under_way.append((min(computed, self._most_tokens), self._generating))
            tokens = self._under_way.popleft()
            if step == (before.wave, before.number + 1):
                self._recent.append(MeasuredStep(before, now_s - before_s, *tokens))
            if opened:
                self._backlog = sum(islice(self._left.values(), max(1, self._most_requests - generating)))
        for name in list(takewhile(lambda name: name not in self._known, reversed(requests))):
            self._left[name] = requests[name].num_prompt_tokens
            self._known.add(name)
            came_s = min(max(requests[name].arrival_time, self._looked_s), now_s)  # whatever clock another host has
            self._first_s = came_s if self._first_s is None else self._first_s
            self._arrivals.append((came_s, self._left[name]))
            if generating and not opens:
                self._came_s[name] = now_s
        self._generating, self._before, self._looked_s = generating, (step, now_s, opens), now_s
        if now_s - self._reported_s >= POLL_S:
            self._reported_s = now_s
            for name in self._known - requests.keys():
                self._known.remove(name)
                self._left.pop(name, None)
                self._came_s.pop(name, None)
            self.latest = RankReport(*self._rates(now_s), self._backlog, generating, tuple(self._recent))

    def idle(self, now_s: float) -> RankReport:
        """Returns the report of the rank while it has no request."""
        prompts_per_s, tokens_per_s = self._rates(now_s)
        return replace(
            self.latest, prompts_per_s=prompts_per_s, prompt_tokens_per_s=tokens_per_s, prompt_tokens=0, generating=0
        )

    def _rates(self, now_s: float) -> tuple[float, float]:
        """Returns prompts, and their tokens, that came in a second. All that came are known right before a step."""
        while self._arrivals and self._arrivals[0][0] < now_s - RECENT_S:
            self._arrivals.popleft()
        seconds = 0.0 if self._first_s is None else min(RECENT_S, now_s - self._first_s)
        if seconds <= 0:
            return 0.0, 0.0
        return len(self._arrivals) / seconds, sum(tokens for _, tokens in self._arrivals) / seconds

    def _progress(self, running: Sequence[Any], now_s: float) -> tuple[int, int]:
        """Returns the prompt tokens that were computed since the last look, and the requests that generate."""
        computed = generating = 0
        for request in running:
            name = request.request_id
            if (before := self._left.get(name)) is None:
                generating += 1
                continue
            left = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            computed += before - left
            self._left[name] = left
            if left < before and name in self._came_s:
                self.held, self.held_s = self.held + 1, self.held_s + now_s - self._came_s.pop(name)
            if left == 0:
                del self._left[name]
                generating += 1
        return computed, generating


class IntervalPlanner:
    """Plans the interval between steps in which prompts are computed, from the reports of all ranks.

    The seconds of a step are fitted to those of the last seconds: a + b x prompt tokens of its busiest rank. The requests that
    generate are in `a`.

    Args:
        max_num_batched_tokens: maximum tokens of a rank in a step.
        ttft_s: as in `planned_interval`.

    Attributes:
        without_s: seconds of a step without prompts; 0: not known.
        busiest: tokens of the busiest rank, summed over steps.
        mean: mean tokens of the ranks, summed over steps.
    """

    def __init__(self, max_num_batched_tokens: int, ttft_s: float | None = None) -> None:
        self.without_s, self.busiest, self.mean = 0.0, 0, 0.0
        self._most_tokens, self._ttft_s = max_num_batched_tokens, ttft_s
        self._token_s = 0.0
        self._open: dict[Step, dict[int, MeasuredStep]] = {}  # steps that other ranks may still report
        self._done = self._newest = Step(-1, -1)
        self._fitted = deque[tuple[float, float, int]]()  # time of the plan, seconds, prompt tokens of the busiest rank

    def plan(self, reports: Sequence[RankReport], now_s: float) -> int:
        """Returns the interval for the present load; 1: prompts are computed in every step.

        Args:
            reports: the ranks' latest reports.
            now_s: the time, in seconds.
        """
        self._take_steps(reports, now_s)
        if self.without_s <= 0 or self._token_s <= 0:
            return 1
        ranks = RanksAtStep(
            0, now_s, [each.prompt_tokens for each in reports], [0] * len(reports), [each.generating for each in reports]
        )
        rates = sum(each.prompts_per_s for each in reports), sum(each.prompt_tokens_per_s for each in reports)
        return planned_interval(ranks, *rates, self._most_tokens, self._step_s, self._ttft_s)

    def _step_s(self, prompt_tokens: int, _generating: int) -> float:
        return self.without_s + self._token_s * prompt_tokens

    def _take_steps(self, reports: Sequence[RankReport], now_s: float) -> None:
        """Takes reported steps, once all ranks have had time to report them, and fits the seconds of a step to them."""
        for rank, report in enumerate(reports):
            for each in report.steps:
                if each.step > self._done:
                    self._open.setdefault(each.step, {})[rank] = each
        for step in [step for step in self._open if step <= self._newest]:
            seen = list(self._open.pop(step).values())
            tokens = [each.prompt_tokens + each.generating for each in seen]
            self.busiest, self.mean = self.busiest + max(tokens), self.mean + sum(tokens) / len(reports)
            self._fitted.append((now_s, max(each.seconds for each in seen), max(each.prompt_tokens for each in seen)))
        self._done, self._newest = self._newest, max(self._open, default=self._newest)
        while self._fitted and self._fitted[0][0] < now_s - RECENT_S:
            self._fitted.popleft()
        _, seconds_N, tokens_N = np.array(self._fitted).reshape(-1, 3).T
        if len(seconds_N) >= LEAST_STEPS and np.ptp(tokens_N) > 0:
            token_s, without_s = np.polyfit(tokens_N, seconds_N, 1)
            if token_s > 0 and without_s > 0:
                self._token_s, self.without_s = float(token_s), float(without_s)


@dataclass
class IntervalChanges:
    """Exchanges reports and plans of one rank's engine with the others, through a store.

    Args:
        rank: this data-parallel rank.
        ranks: number of them.
        steps: the rank's steps.
        planner: sees the ranks' reports; None: another rank does.
        plans: True: the interval is planned.

    Attributes:
        plan: the newest plan: its interval, and the step from which it holds, in which prompts are computed.
    """

    rank: int
    ranks: int
    steps: RankSteps
    planner: IntervalPlanner | None = None
    plans: bool = True
    plan: tuple[int, Step] = (1, Step(-1, -1))
    _before: tuple[int, Step] = (1, Step(-1, -1))
    _there: set[int] = field(default_factory=set)

    def exchange(self, store: Any, now: Step, busy: Callable[[], bool], now_s: float) -> None:
        """Reports this rank, plans if it does, and reads the newest plan. Called every POLL_S seconds.

        Args:
            store: a store of torch.distributed.
            now: this rank's step.
            busy: returns whether this rank has requests.
            now_s: the time, in seconds.
        """
        report = self.steps.latest if busy() else self.steps.idle(now_s)
        store.set(f"aurora-steps-{self.rank}", report.to_json())
        if self.planner is not None:
            self._there |= {rank for rank in range(self.ranks) if rank not in self._there and self._has(store, rank)}
            reports = [
                RankReport.from_json(store.get(f"aurora-steps-{rank}")) if rank in self._there else RankReport()
                for rank in range(self.ranks)
            ]
            interval = self.planner.plan(reports, now_s)
            if self.plans and interval != self.plan[0] and now >= self.plan[1]:
                lead = math.ceil(LEAD * POLL_S / self.planner.without_s) if self.planner.without_s > 0 else KEPT
                number = now.number + 1 + lead
                number += -self._since_open(Step(now.wave, number), self.plan) % self.plan[0]  # the next one with prompts
                store.set("aurora-interval", json.dumps([interval, now.wave, number]))
        if store.check(["aurora-interval"]):
            interval, *begins = json.loads(store.get("aurora-interval"))
            if (plan := (interval, Step(*begins))) != self.plan:
                self._before, self.plan = self.plan, plan

    def opens(self, step: Step) -> bool:
        """Returns whether prompts are computed in a step: in the first of the plan, and in every interval-th after it."""
        plan = self.plan
        plan = plan if step >= plan[1] else self._before
        return self._since_open(step, plan) % plan[0] == 0

    @staticmethod
    def _since_open(step: Step, plan: tuple[int, Step]) -> int:
        """Returns the steps since one with prompts by a plan; the first step of each wave is one."""
        return step.number - plan[1].number if step.wave == plan[1].wave else step.number

    @staticmethod
    def _has(store: Any, rank: int) -> bool:
        return bool(store.check([f"aurora-steps-{rank}"]))
