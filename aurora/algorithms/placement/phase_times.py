"""Seconds of a layer's phases on each GPU, and the layer's time by Aurora's Eq. 1."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from aurora.types.arrays import FloatArray

SIDES = ("send", "recv", "csend", "crecv")  # what ports and NICs do in the dispatch, and in the combine
STEPS = ("steps", "csteps")  # of a dispatch and of a combine


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one model's phases on each GPU.

    Attributes:
        gate_G: (G,) seconds of the gate.
        port_4G: (4, G) seconds for which each GPU's port sends and receives in the dispatch, sends and receives in the combine.
        expert_G: (G,) seconds of the experts.
        aggregate_G: (G,) seconds of the aggregation.
        nic_4G: (4, G) seconds of the NIC that each GPU uses, as port_4G, if the GPUs are in servers; else (4, 1) zeros.
        steps_2G: (2, G) seconds of the steps of a hierarchical dispatch and combine, each as long as its busiest port or NIC;
            (2, 1) zeros if all-to-alls are flat.
    """

    gate_G: FloatArray
    port_4G: FloatArray
    expert_G: FloatArray
    aggregate_G: FloatArray
    nic_4G: FloatArray = field(default_factory=lambda: np.zeros((4, 1)))
    steps_2G: FloatArray = field(default_factory=lambda: np.zeros((2, 1)))

    def of(self, phase: str) -> FloatArray:
        """Returns (G,) seconds of a phase: "gate", "expert", "aggregate", one of SIDES, "nic_" + one of SIDES, or of STEPS."""
        if phase in STEPS:
            return np.asarray(self.steps_2G[STEPS.index(phase)])
        if (side := phase.removeprefix("nic_")) in SIDES:
            return np.asarray((self.port_4G if side == phase else self.nic_4G)[SIDES.index(side)])
        return np.asarray(getattr(self, f"{phase}_G"))

    @property
    def dispatch_G(self) -> FloatArray:
        """(G,) seconds of the dispatch on each GPU: the longest of sending, receiving and steps, on its port and its NIC."""
        return longest_of((*self.port_4G[:2], *self.nic_4G[:2], self.steps_2G[0]))

    @property
    def combine_G(self) -> FloatArray:
        """(G,) seconds of the combine on each GPU: the longest of sending, receiving and steps, on its port and its NIC."""
        return longest_of((*self.port_4G[2:], *self.nic_4G[2:], self.steps_2G[1]))


def exclusive_s(a: PhaseTimes) -> float:
    """Returns the seconds of a layer of one model, max(gate + dispatch) + max(experts + combine) + max(aggregate).

    Source:
        Aurora (arXiv:2410.17043) Eq. 1.
    """
    return float(exclusive_XG(a).max(axis=1, initial=0.0).sum())


def exclusive_XG(a: PhaseTimes) -> FloatArray:
    """Returns (3, G) seconds of the terms of Aurora's Eq. 1 on each GPU: gate + dispatch, experts + combine, aggregation."""
    return np.stack([a.gate_G + a.dispatch_G, a.expert_G + a.combine_G, a.aggregate_G])


def longest_of(seconds: Iterable[FloatArray]) -> FloatArray:
    """Returns (G,) the elementwise maximum of several (G,) seconds."""
    return reduce(np.maximum, seconds)
