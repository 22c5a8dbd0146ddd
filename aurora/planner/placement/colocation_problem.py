"""The colocation problem: one layer of two models that share the GPUs, as COLOCATE strategies see it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.planner.placement.cost_model import GroupCosts
from aurora.planner.placement.objective import FIXED, OBJECTIVE, path_counts
from aurora.types.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class ColocationProblem:
    """One layer of models a and b, which share every GPU.

    Attributes:
        a: costs of model a's groups.
        b: costs of model b's groups.
        held_G: (G,) int64, the group of model a on each GPU.
        movable: whether model a's groups may still move.
        objective: the function to minimise, a name of OBJECTIVE.
        leads: whether a is the model that Table 2 of Aurora (arXiv:2410.17043) starts with; otherwise b is.
        clock: returns seconds.
        until_s: searches end when the clock returns more.
    """

    a: GroupCosts
    b: GroupCosts
    held_G: IntArray
    movable: bool = True
    objective: str = "causal"
    leads: bool = True
    clock: Callable[[], float] = time.monotonic
    until_s: float = np.inf

    def value_s(self, a_G: IntArray, b_G: IntArray) -> float:
        """Returns the seconds of the layer with the groups a_G and b_G (G,) on the GPUs."""
        a, b = self.a.phase_times(a_G), self.b.phase_times(b_G)
        return OBJECTIVE[self.objective](a, b) if self.leads else OBJECTIVE[self.objective](b, a)

    @cached_property
    def seconds_MXGJ(self) -> FloatArray:
        """(2, 5, G, J) seconds of each model's group j on GPU g, in the rows of GroupCosts.seconds_XGJ."""
        return np.stack([self.a.seconds_XGJ, self.b.seconds_XGJ])

    @cached_property
    def count_PX(self) -> FloatArray:
        """(P, 8) float64, how often each of the objective's paths holds each of MOVED."""
        return path_counts(self.objective, self.leads)[:, len(FIXED) :].astype(np.float64)

    @cached_property
    def base_P(self) -> FloatArray:
        """(P,) seconds of each path's FIXED terms."""
        fixed = self.a.gate_s_G, self.b.gate_s_G, self.a.aggregate_s_G, self.b.aggregate_s_G
        return np.asarray(path_counts(self.objective, self.leads)[:, : len(FIXED)] @ [each.max() for each in fixed])

    @cached_property
    def open_MGJ(self) -> BoolArray:
        """(2, G, J) bool, whether model m's group j may sit on GPU g."""
        n = len(self.held_G)
        open_MGJ = np.ones((2, n, n), dtype=np.bool_)
        if not self.movable:
            open_MGJ[0] = np.arange(n)[None, :] == self.held_G[:, None]
        return open_MGJ
