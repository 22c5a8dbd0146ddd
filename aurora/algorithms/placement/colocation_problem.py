"""The colocation problem: assign several models' groups of experts to shared GPUs; and simulated annealing for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from aurora.algorithms.placement.cost_model import GroupCosts
from aurora.algorithms.placement.objective import Formula, Part, formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s
from aurora.types.arrays import FloatArray, IntArray
from aurora.types.compiled import njit


class Arrays(NamedTuple):
    """A colocation problem as arrays, for compiled code.

    Part, term and path are those of `objective.Formula`; a moved term is one that the assignment changes. Index n runs over
    (part, model) pairs, sorted by part.

    Attributes:
        seconds_GNJ: (G, N, J) seconds that group j of the pair's model adds to the pair's part on GPU g.
        model_N: (N,) int64, the model of each pair.
        start_K: (K + 1,) int64; part k has the pairs start_K[k] to start_K[k + 1] - 1.
        term_K: (K,) int64, the moved term of each part.
        base_Z: (Z,) seconds of each path's terms that are not moved.
        count_ZX: (Z, X) float64, how often each moved term occurs in each path.
    """

    seconds_GNJ: FloatArray
    model_N: IntArray
    start_K: IntArray
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
        return np.array([m for m in range(len(self.costs_M)) if self.movable or m not in self.held])

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
        rows: list[tuple[int, FloatArray]] = []
        start_K, term_K = [0], []
        for term, name in enumerate(self.formula.moved):
            for by_model in self._by_model(self.formula.parts[name]):
                rows += by_model.items()
                start_K.append(len(rows))
                term_K.append(term)
        model_N, seconds_NGJ = zip(*rows, strict=True)
        return Arrays(
            np.stack(seconds_NGJ, axis=1),
            np.array(model_N),
            np.array(start_K),
            np.array(term_K),
            self.base_Z,
            np.array(self.count_ZX, dtype=np.float64, order="C"),
        )

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
    group_GM = group_MG.T.copy()
    value_s = problem.value_s(group_MG)
    if problem.gpus > 1 and value_s > 0:
        steps = STEPS_PER_PAIR * problem.gpus**2
        _anneal(problem.arrays, group_GM, problem.movers_M, steps, HOT * value_s, COLD * value_s, rng)
    return group_GM.T.copy()


@njit(cache=True)
def gpu_terms(arrays, g, group_M, out_X):
    """Writes the seconds of each moved term on GPU g, if it holds the groups group_M (M,), to out_X (X,)."""
    out_X[:] = 0.0
    for k in range(len(arrays.term_K)):
        seconds = 0.0
        for n in range(arrays.start_K[k], arrays.start_K[k + 1]):
            seconds += arrays.seconds_GNJ[g, n, group_M[arrays.model_N[n]]]
        out_X[arrays.term_K[k]] = max(out_X[arrays.term_K[k]], seconds)


@njit(cache=True)
def longest_path(arrays, most_X):
    """Returns the seconds of the longest path; most_X (X,) are the seconds of each moved term on its slowest GPU."""
    value = 0.0
    for z in range(len(arrays.base_Z)):
        total = arrays.base_Z[z]
        for x in range(len(most_X)):
            total += arrays.count_ZX[z, x] * most_X[x]
        value = max(value, total)
    return value


@njit(cache=True)
def _anneal(arrays, group_GM, movers_M, steps, hot, cold, rng):
    """Runs simulated annealing from group_GM and writes the best assignment seen into it.

    movers_M: the models whose groups move. hot, cold: first and last temperature in seconds; it falls geometrically.
    """
    gpus, terms = len(group_GM), arrays.term_K.max() + 1
    held_GX, most_X = np.empty((gpus, terms)), np.zeros(terms)
    for g in range(gpus):
        gpu_terms(arrays, g, group_GM[g], held_GX[g])
        most_X = np.maximum(most_X, held_GX[g])
    value = best = longest_path(arrays, most_X)
    best_GM = group_GM.copy()
    at_g, at_h, after_X = np.empty(terms), np.empty(terms), np.empty(terms)
    heat, cooling = hot, (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= cooling
        g = rng.integers(0, gpus)
        h = rng.integers(0, gpus - 1)
        h += h >= g
        mover = rng.integers(0, len(movers_M) + 1) if len(movers_M) > 1 else 0  # the last number: all of them
        _swap(group_GM, movers_M, mover, g, h)
        gpu_terms(arrays, g, group_GM[g], at_g)
        gpu_terms(arrays, h, group_GM[h], at_h)
        _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X)
        after = longest_path(arrays, after_X)
        if after > value and rng.random() >= np.exp((value - after) / heat):
            _swap(group_GM, movers_M, mover, g, h)
            continue
        value = after
        held_GX[g], held_GX[h], most_X[:] = at_g, at_h, after_X
        if value < best:
            best, best_GM[:] = value, group_GM
    group_GM[:] = best_GM


@njit(cache=True)
def _swap(group_GM, movers_M, mover, g, h):
    """Swaps the groups of movers_M[mover] between GPUs g and h; those of all movers_M if there is no such mover."""
    for i in range(len(movers_M)):
        if mover in (i, len(movers_M)):
            m = movers_M[i]
            group_GM[g, m], group_GM[h, m] = group_GM[h, m], group_GM[g, m]


@njit(cache=True)
def _maxima_after(held_GX, most_X, g, h, at_g, at_h, after_X):
    """Writes the maxima after GPUs g and h change to at_g and at_h; looks at other GPUs only where g or h had the maximum."""
    for x in range(len(most_X)):
        top = max(at_g[x], at_h[x])
        if top < most_X[x] and held_GX[g, x] < most_X[x] and held_GX[h, x] < most_X[x]:
            top = most_X[x]
        elif top < most_X[x]:
            for i in range(len(held_GX)):
                if i != g and i != h:
                    top = max(top, held_GX[i, x])
        after_X[x] = top
