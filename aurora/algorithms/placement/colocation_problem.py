"""The colocation problem: assign several models' groups of experts to shared GPUs; and simulated annealing for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.placement.objective import Formula, formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s
from aurora.algorithms.search.phase_sums import PARTS, PhaseSums
from aurora.algorithms.search.slot_search import slot_search
from aurora.types.arrays import IntArray

KICKS = 512  # restarts at most, until EFFORT is used up
EFFORT = 4000  # changes times columns that are priced for each pair of GPUs


@dataclass(frozen=True)
class ColocationProblem:
    """One layer of M models that share all GPUs. Each GPU gets one group of experts of each model.

    Attributes:
        costs_M: costs of each model's groups; the first model is model a of Table 2 of Aurora (arXiv:2410.17043).
        held: dict from the index of each model that is placed already to (G,) int64, its group on each GPU.
        movable: whether the models in `held` may still move.
    """

    costs_M: tuple[LayerCosts, ...]
    held: Mapping[int, IntArray]
    movable: bool = True

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return len(self.costs_M[0].out_Bps)

    @property
    def movers_M(self) -> IntArray:
        """Indices of the models whose groups may move."""
        return np.array([m for m in range(len(self.costs_M)) if self.movable or m not in self.held], dtype=np.int64)

    @property
    def formula(self) -> Formula:
        """The formula of the objective to minimise."""
        return formula(len(self.costs_M))

    def value_s(self, group_MG: IntArray) -> float:
        """Returns the objective in seconds; group_MG (M, G) is the group of each model on each GPU."""
        return self.formula.seconds(self._phase_times(group_MG))

    def sequential_s(self, group_MG: IntArray) -> float:
        """Returns the seconds of the layer if the models ran one after the other; group_MG as in `value_s`."""
        return sum(map(exclusive_s, self._phase_times(group_MG)))

    def _phase_times(self, group_MG: IntArray) -> list[PhaseTimes]:
        """The phases of each model."""
        return [costs.times_alone(group_G) for costs, group_G in zip(self.costs_M, group_MG, strict=True)]

    @cached_property
    def layer(self) -> PhaseSums:
        """The problem as a slot search sees it: a GPU has a slot for each model that may move, and the rest is fixed.

        Group j of the i-th such model is its expert i * G + j.
        """
        of, gpus, movers = self.formula, self.gpus, self.movers_M.tolist()
        columns = -(-len(of.moved) // 2)
        part_s_GEXW, base_s_GXW = np.zeros((gpus, len(movers) * gpus, PARTS, columns)), np.zeros((gpus, PARTS, columns))
        for x, name in enumerate(of.moved):
            y, w = divmod(x, columns)
            for k, part in enumerate(of.parts[name]):
                for model, phase in part:
                    seconds_GJ = self.costs_M[model].alone_s_GE(phase)
                    if model in movers:
                        first = movers.index(model) * gpus
                        part_s_GEXW[:, first : first + gpus, 2 * y + k, w] += seconds_GJ
                    else:
                        base_s_GXW[:, 2 * y + k, w] += seconds_GJ[np.arange(gpus), self.held[model]]
        count_ZX = np.zeros((len(of.paths), 2 * columns))
        count_ZX[:, : len(of.moved)] = of.count_ZX[:, -len(of.moved) :]
        fixed = len(of.parts) - len(of.moved)
        times_M = [costs.times_alone(np.arange(gpus)) for costs in self.costs_M]
        fixed_s_Z = of.count_ZX[:, :fixed] @ of.term_XG(times_M)[:fixed].max(axis=1)
        count_ZYW = count_ZX.reshape(-1, 2, columns)
        return PhaseSums(part_s_GEXW, base_s_GXW, fixed_s_Z, np.full(gpus, len(movers)), 1, count_ZYW, gpus)


def search(problem: ColocationProblem, group_MG: IntArray, rng: np.random.Generator) -> IntArray:
    """Returns the best assignment that a slot search finds by swaps of one model's groups; never worse than the start.

    Args:
        problem: the models' costs and the objective.
        group_MG: (M, G) int64, the group of each model on each GPU at the start; not changed.
        rng: for the restarts.
    """
    movers_M, found_MG = problem.movers_M, group_MG.copy()
    first_M = np.arange(len(movers_M)) * problem.gpus
    held_GM = group_MG[movers_M].T + first_M
    found_GM, _ = slot_search(problem.layer, held_GM, rng, KICKS, replicas=False, effort=EFFORT * problem.gpus**2)
    found_MG[movers_M] = (found_GM - first_M).T
    return found_MG
