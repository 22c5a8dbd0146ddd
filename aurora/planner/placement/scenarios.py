"""One model's layer in one or many scenarios (domains, windows): its time under any placement, and below every placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.planner.network.lower_bounds import spread, spread_split
from aurora.planner.placement.objective import PhaseTimes, exclusive
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Scenarios:
    """What a layer costs in each of W scenarios, expert by expert. Source rank g sits on GPU g.

    own_WGE (W, G, E): tokens that rank g sends to expert e, whole or, of `divided` ones, parts. expert_s_WGE (W, G, E): seconds
    of expert e on GPU g. gate_s_WG, aggregate_s_WG (W, G) seconds. send_s_G, recv_s_G, csend_s_G, crecv_s_G (G,): seconds a
    token on each port, dispatch and combine.
    """

    own_WGE: IntArray | FloatArray
    expert_s_WGE: FloatArray
    gate_s_WG: FloatArray
    aggregate_s_WG: FloatArray
    send_s_G: FloatArray
    recv_s_G: FloatArray
    csend_s_G: FloatArray
    crecv_s_G: FloatArray

    @property
    def load_WE(self) -> FloatArray:
        return np.asarray(self.own_WGE.sum(axis=1))

    @property
    def summed(self) -> "Scenarios":
        """All of them as one."""
        return replace(
            self,
            own_WGE=self.own_WGE.sum(axis=0, keepdims=True),
            expert_s_WGE=self.expert_s_WGE.sum(axis=0, keepdims=True),
            gate_s_WG=self.gate_s_WG.sum(axis=0, keepdims=True),
            aggregate_s_WG=self.aggregate_s_WG.sum(axis=0, keepdims=True),
        )

    def divided(self, expert_P: IntArray, share_P: FloatArray) -> "Scenarios":
        """The same in terms of P replicas, of which replica p takes share_P[p] of expert expert_P[p]'s tokens and time."""
        return replace(
            self, own_WGE=self.own_WGE[:, :, expert_P] * share_P, expert_s_WGE=self.expert_s_WGE[:, :, expert_P] * share_P
        )

    def seconds(self, split_EG: FloatArray) -> FloatArray:
        """(W,) seconds of Eq. 1 in each scenario. Source: Aurora Eq. 1."""
        return np.array([exclusive(self.terms(scenario, split_EG)) for scenario in range(len(self.own_WGE))])

    def terms(self, scenario: int, split_EG: FloatArray) -> PhaseTimes:
        """The phases' times when split_EG (E, G) says which part of each expert's tokens each GPU takes.

        A part of an expert's tokens takes that part of its time.
        """
        own_GE, at_GE = self.own_WGE[scenario], split_EG.T
        local_G = (own_GE * at_GE).sum(axis=1)
        send_G, recv_G = own_GE.sum(axis=1) - local_G, at_GE @ own_GE.sum(axis=0) - local_G
        return PhaseTimes(
            self.gate_s_WG[scenario],
            send_G * self.send_s_G,
            recv_G * self.recv_s_G,
            recv_G * self.csend_s_G,
            send_G * self.crecv_s_G,
            (self.expert_s_WGE[scenario] * at_GE).sum(axis=1),
            self.aggregate_s_WG[scenario],
        )

    def bounds(self, replicated: bool) -> FloatArray:
        """(W,) seconds below every placement of each scenario; replicated: experts may be divided over GPUs."""
        below = spread_split if replicated else spread
        return np.array([self._bound(scenario, below) for scenario in range(len(self.own_WGE))])

    def _bound(self, w: int, below: Callable[[FloatArray], float]) -> float:
        arriving_GE = self.load_WE[w] - self.own_WGE[w]  # an expert on GPU g spares the tokens that start there
        dispatch_GE, combine_GE = arriving_GE * self.recv_s_G[:, None], arriving_GE * self.csend_s_G[:, None]
        gate_G = self.gate_s_WG[w]
        first = max(float(gate_G.max()), float(gate_G.min()) + below(dispatch_GE))
        return first + below(self.expert_s_WGE[w] + combine_GE) + float(self.aggregate_s_WG[w].max())


def scenarios(cluster: Cluster, parts: Sequence[tuple[Profile, int, slice]]) -> Scenarios:
    """Scenarios of one model on `cluster`, each a (profile, layer, windows), the windows summed."""
    first = parts[0][0]
    own, expert = [], []
    phases: dict[str, list[list[float]]] = {"gate": [], "aggregate": []}
    for profile, layer, windows in parts:
        tokens_TSE = profile.tokens_TLSE[windows, layer]
        tokens_TE, own_TG = tokens_TSE.sum(axis=1), tokens_TSE.sum(axis=2) // profile.top_k
        own.append(tokens_TSE.sum(axis=0))
        expert.append([profile.seconds("expert", gpu, tokens_TE).sum(axis=0) for gpu in cluster.gpus])
        for phase, found in phases.items():
            found.append([float(profile.seconds(phase, gpu, own_TG[:, g]).sum()) for g, gpu in enumerate(cluster.gpus)])
    return Scenarios(
        np.array(own),
        np.array(expert),
        np.array(phases["gate"]),
        np.array(phases["aggregate"]),
        first.dispatch_bytes / cluster.out_Bps_G,
        first.dispatch_bytes / cluster.in_Bps_G,
        first.combine_bytes / cluster.out_Bps_G,
        first.combine_bytes / cluster.in_Bps_G,
    )


def by_aim(cluster: Cluster, profile: Profile, domains: Sequence[Profile], layer: int, aim: str) -> tuple[Scenarios, int]:
    """A layer's scenarios and how many of them count: each profile one, or without domains each window; "sum": all as one."""
    if domains:
        found = scenarios(cluster, [(each, layer, slice(None)) for each in (profile, *domains)])
    elif aim in AIMS:
        found = scenarios(cluster, [(profile, layer, slice(t, t + 1)) for t in range(profile.windows)])
    else:
        found = scenarios(cluster, [(profile, layer, slice(None))])
    return (found, AIMS[aim](len(found.own_WGE))) if aim in AIMS else (found.summed, 1)


def tail_mean(seconds_W: FloatArray, worst: int) -> float:
    """The mean of the `worst` largest: the mean of all, a conditional value at risk, or with 1 the worst case."""
    return float(np.sort(seconds_W)[-worst:].mean())


AIMS: dict[str, Callable[[int], int]] = {  # how many of W scenarios count, worst first
    "mean": lambda scenarios: scenarios,
    "cvar": lambda scenarios: -(-scenarios // 2),  # the worse half
    "worst": lambda scenarios: 1,
}
