"""The colocation problem: assign several models' groups of experts to shared GPUs; and simulated annealing for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from aurora.algorithms.placement import colocation_problem_core as core
from aurora.algorithms.placement.cost_model import GroupCosts
from aurora.algorithms.placement.objective import Formula, Part, formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s
from aurora.types.arrays import FloatArray, IntArray


class Arrays(NamedTuple):
    """A colocation problem as arrays, for compiled code.

    Part, term and path are those of `objective.Formula`; a moved term is one that the assignment changes.

    Attributes:
        seconds_GKMJ: (G, K, M, J) seconds that group j of model m adds to part k on GPU g.
        term_K: (K,) int64, the moved term of each part.
        base_Z: (Z,) seconds of each path's terms that are not moved.
        count_ZX: (Z, X) float64, how often each moved term occurs in each path.
    """

    seconds_GKMJ: FloatArray
    term_K: IntArray
    base_Z: FloatArray
    count_ZX: FloatArray


@dataclass(frozen=True)
class ColocationProblem:
    """One layer of M models that share all GPUs. Each GPU gets one group of experts of each model.

    Attributes:
        costs_M: costs of each model's groups; the first model is model a of Table 2 of Aurora (arXiv:2410.17043).
        held: dict from the index of each model that is placed already to (G,) int64, its group on each GPU.
        movable: whether the models in `held` may still move.
        objective: name of the objective to minimise, one of `objectives`.
    """

    costs_M: tuple[GroupCosts, ...]
    held: Mapping[int, IntArray]
    movable: bool = True
    objective: str = "causal"

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return len(self.costs_M[0].load_J)

    @property
    def movers_M(self) -> IntArray:
        """Indices of the models whose groups may move."""
        return np.array([m for m in range(len(self.costs_M)) if self.movable or m not in self.held], dtype=np.int64)

    @property
    def formula(self) -> Formula:
        """The formula of the objective."""
        return formula(self.objective, len(self.costs_M))

    def value_s(self, group_MG: IntArray) -> float:
        """Returns the objective in seconds; group_MG (M, G) is the group of each model on each GPU."""
        return self.formula.seconds(self._phase_times(group_MG))

    def sequential_s(self, group_MG: IntArray) -> float:
        """Returns the seconds of the layer if the models ran one after the other; group_MG as in `value_s`."""
        return sum(map(exclusive_s, self._phase_times(group_MG)))

    def _phase_times(self, group_MG: IntArray) -> list[PhaseTimes]:
        """The phases of each model."""
        return [costs.phase_times(group_G) for costs, group_G in zip(self.costs_M, group_MG, strict=True)]

    @cached_property
    def arrays(self) -> Arrays:
        """The problem as arrays, for compiled code."""
        parts_X = [self._by_model(self.formula.parts[name]) for name in self.formula.moved]
        seconds_GKMJ = np.zeros((self.gpus, sum(map(len, parts_X)), len(self.costs_M), self.gpus))
        for k, by_model in enumerate(chain.from_iterable(parts_X)):
            for model, seconds_GJ in by_model.items():
                seconds_GKMJ[:, k, model] = seconds_GJ
        term_K = np.repeat(np.arange(len(parts_X)), [len(by_K) for by_K in parts_X])
        return Arrays(seconds_GKMJ, term_K, self.base_Z, np.array(self.count_ZX, dtype=np.float64, order="C"))

    def _by_model(self, parts: tuple[Part, ...]) -> list[dict[int, FloatArray]]:
        """For each part of a term, the seconds (G, J) that each model adds. Parts of a single model become their maximum."""
        by_part: list[dict[int, FloatArray]] = []
        for part in parts:
            by_part.append({})
            for model, phase in part:
                by_part[-1][model] = self.costs_M[model].phase_s_GJ(phase) + by_part[-1].get(model, 0.0)
        if len(models := {model for part in parts for model, _ in part}) > 1:
            return by_part
        return [{model: np.maximum.reduce([by_model[model] for by_model in by_part]) for model in models}]

    @cached_property
    def count_ZX(self) -> IntArray:
        """(Z, X) int64, how often each moved term occurs in each of the objective's paths."""
        return self.formula.count_ZX[:, -len(self.formula.moved) :]

    @cached_property
    def base_Z(self) -> FloatArray:
        """(Z,) seconds of each path's terms that are not moved."""
        fixed = len(self.formula.parts) - len(self.formula.moved)
        times_M = [costs.phase_times() for costs in self.costs_M]
        return np.asarray(self.formula.count_ZX[:, :fixed] @ self.formula.term_XG(times_M)[:fixed].max(axis=1))


STEPS_PER_PAIR = 80  # for every pair of GPUs, 0.2 us each
DRAWS = 1 << 16  # steps whose random numbers are drawn at once
HOT, COLD = 0.03, 0.0003  # first and last temperature, as shares of the start's time


def anneal(problem: ColocationProblem, group_MG: IntArray, rng: np.random.Generator) -> IntArray:
    """Returns the best assignment that simulated annealing visits; never worse than the start.

    A step swaps the groups of one model, or of all models that may move, between two GPUs. A step takes constant time, unless
    it lowers the maximum over GPUs, which is then searched for again.

    Args:
        problem: the models' costs and the objective.
        group_MG: (M, G) int64, the group of each model on each GPU at the start; not changed.
        rng: for the random swaps.

    Returns:
        (M, G) int64, as `group_MG`.
    """
    group_GM, value_s = group_MG.T.copy(), problem.value_s(group_MG)
    if problem.gpus > 1 and value_s > 0:
        steps = STEPS_PER_PAIR * problem.gpus**2
        cooling = (COLD / HOT) ** (1 / steps)
        annealing = core.ColocationAnnealing(problem.arrays, group_GM, problem.movers_M)
        for begin in range(0, steps, DRAWS):
            draws_S4 = rng.random((min(DRAWS, steps - begin), 4))
            group_GM, _ = core.anneal(annealing, draws_S4, HOT * value_s * cooling**begin, cooling)
    return group_GM.T.copy()
