"""Cost model of one MoE layer: tokens and seconds of each expert, or group of experts, on each GPU.

Placement reads profiles only through this module: `scenario_costs` turns them into LayerCosts, expert by expert, and
`LayerCosts.grouped` sums these into GroupCosts for strategies that place whole groups of experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aurora.planner.network.lower_bounds import spread, spread_split
from aurora.planner.placement.objective import PhaseTimes, exclusive
from aurora.planner.workload.traffic import deduplicated_tokens
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one model's layer when its experts are placed as J groups, one group per GPU.

    Requests stay on their ranks, so what GPU g sends and receives depends only on the group it holds.

    Args:
        load_J: (J,) int64 tokens of each group.
        send_GJ: (G, J) int64 tokens that GPU g sends in the dispatch, and receives in the combine, if it holds group j.
        recv_GJ: (G, J) int64 tokens that GPU g receives in the dispatch, and sends in the combine, if it holds group j.
        dispatch_bytes: bytes a token in the dispatch.
        combine_bytes: bytes a token in the combine.
        expert_s_GJ: (G, J) seconds of group j's experts on GPU g.
        gate_s_G: (G,) seconds of the gate.
        aggregate_s_G: (G,) seconds of the aggregation.
        out_Bps: (G,) bytes per second of each sending port.
        in_Bps: (G,) bytes per second of each receiving port.
    """

    load_J: IntArray
    send_GJ: IntArray
    recv_GJ: IntArray
    dispatch_bytes: int
    combine_bytes: int
    expert_s_GJ: FloatArray
    gate_s_G: FloatArray
    aggregate_s_G: FloatArray
    out_Bps: FloatArray
    in_Bps: FloatArray

    def phase_times(self, group_G: IntArray) -> PhaseTimes:
        """Returns the seconds of each phase on each GPU.

        Args:
            group_G: (G,) int64, the group on each GPU.
        """
        send_G, recv_G, csend_G, crecv_G, expert_G = self.seconds_XGJ[:, np.arange(len(group_G)), group_G]
        return PhaseTimes(self.gate_s_G, send_G, recv_G, csend_G, crecv_G, expert_G, self.aggregate_s_G)

    @cached_property
    def seconds_XGJ(self) -> FloatArray:
        """(5, G, J) seconds of the phases that depend on which GPU holds group j.

        The rows: sent and received in the dispatch, sent and received in the combine, experts.
        """
        out, into = self.out_Bps[:, None], self.in_Bps[:, None]
        there = self.send_GJ * self.dispatch_bytes / out, self.recv_GJ * self.dispatch_bytes / into
        back = self.recv_GJ * self.combine_bytes / out, self.send_GJ * self.combine_bytes / into
        return np.stack([*there, *back, self.expert_s_GJ])

    @property
    def port_s_XG(self) -> FloatArray:
        """(4, G) seconds per token: sent and received in the dispatch, sent and received in the combine."""
        return np.stack(
            [size / rate for size in (self.dispatch_bytes, self.combine_bytes) for rate in (self.out_Bps, self.in_Bps)]
        )

    @property
    def dispatch_s_GJ(self) -> FloatArray:
        """(G, J) seconds of GPU g's busier port in the dispatch if it holds group j."""
        return np.asarray(self.seconds_XGJ[:2].max(axis=0))

    @property
    def combine_s_GJ(self) -> FloatArray:
        """(G, J) seconds of GPU g's busier port in the combine if it holds group j."""
        return np.asarray(self.seconds_XGJ[2:4].max(axis=0))

    @property
    def exclusive_s_GJ(self) -> FloatArray:
        """(G, J) seconds of dispatch, experts and combine on GPU g if it holds group j and no other model runs."""
        return self.dispatch_s_GJ + self.expert_s_GJ + self.combine_s_GJ

    @property
    def strongest_first(self) -> IntArray:
        """(G,) int64, GPUs from strongest to weakest: by their time for all experts, ties by their slower port."""
        return np.lexsort((-np.minimum(self.out_Bps, self.in_Bps), self.expert_s_GJ.sum(axis=1)))


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one model's layer, expert by expert, in each of W scenarios (windows or domains). Source rank g sits on GPU g.

    Args:
        own_WGE: (W, G, E) tokens that rank g sends to expert e; float64 where experts are split into replicas.
        expert_s_WGE: (W, G, E) seconds of expert e on GPU g.
        gate_s_WG: (W, G) seconds of the gate.
        aggregate_s_WG: (W, G) seconds of the aggregation.
        dispatch_bytes: bytes a token in the dispatch.
        combine_bytes: bytes a token in the combine.
        out_Bps: (G,) bytes per second of each sending port.
        in_Bps: (G,) bytes per second of each receiving port.
    """

    own_WGE: IntArray | FloatArray
    expert_s_WGE: FloatArray
    gate_s_WG: FloatArray
    aggregate_s_WG: FloatArray
    dispatch_bytes: int
    combine_bytes: int
    out_Bps: FloatArray
    in_Bps: FloatArray

    @cached_property
    def load_WE(self) -> FloatArray:
        """(W, E) tokens of each expert."""
        return np.asarray(self.own_WGE.sum(axis=1))

    @property
    def send_s_G(self) -> FloatArray:
        """(G,) seconds of GPU g's port for each token sent in the dispatch."""
        return self.dispatch_bytes / self.out_Bps

    @property
    def recv_s_G(self) -> FloatArray:
        """(G,) seconds of GPU g's port for each token received in the dispatch."""
        return self.dispatch_bytes / self.in_Bps

    @property
    def csend_s_G(self) -> FloatArray:
        """(G,) seconds of GPU g's port for each token sent in the combine."""
        return self.combine_bytes / self.out_Bps

    @property
    def crecv_s_G(self) -> FloatArray:
        """(G,) seconds of GPU g's port for each token received in the combine."""
        return self.combine_bytes / self.in_Bps

    @property
    def token_s_G(self) -> FloatArray:
        """(G,) cost of computing and moving a token on each GPU, relative to their mean; all 1 if a GPU's cost is zero."""
        tokens = max(1, int(self.load_WE.sum()))
        token_s_G = self.expert_s_WGE.sum(axis=(0, 2)) / tokens + self.recv_s_G + self.csend_s_G
        return np.asarray(token_s_G / token_s_G.mean()) if token_s_G.all() else np.ones(len(token_s_G))

    @property
    def summed(self) -> "LayerCosts":
        """The costs of a single scenario that is the sum of all scenarios."""
        return replace(
            self,
            own_WGE=self.own_WGE.sum(axis=0, keepdims=True),
            expert_s_WGE=self.expert_s_WGE.sum(axis=0, keepdims=True),
            gate_s_WG=self.gate_s_WG.sum(axis=0, keepdims=True),
            aggregate_s_WG=self.aggregate_s_WG.sum(axis=0, keepdims=True),
        )

    def of_replicas(self, expert_P: IntArray, share_P: FloatArray) -> "LayerCosts":
        """Returns the costs of P replicas in place of experts.

        Args:
            expert_P: (P,) int64, the expert of each replica.
            share_P: (P,) float64, the share of its expert's tokens and seconds that each replica takes.
        """
        return replace(
            self, own_WGE=self.own_WGE[:, :, expert_P] * share_P, expert_s_WGE=self.expert_s_WGE[:, :, expert_P] * share_P
        )

    def grouped(self, group_E: IntArray, tokens_SJ: IntArray | None = None) -> GroupCosts:
        """Returns the costs of groups of experts, for a single scenario.

        Args:
            group_E: (E,) int64, the group of each expert, one group for each GPU.
            tokens_SJ: (S, J) int64 tokens from each source to each group; by default those of its experts, summed.
        """
        (own_GE,), (expert_s_GE,), n = self.own_WGE, self.expert_s_WGE, len(self.out_Bps)
        if tokens_SJ is None:
            tokens_SJ = group_tokens(own_GE, group_E, n)
        return GroupCosts(
            load_J=tokens_SJ.sum(axis=0),
            send_GJ=tokens_SJ.sum(axis=1)[:, None] - tokens_SJ,
            recv_GJ=tokens_SJ.sum(axis=0)[None, :] - tokens_SJ,
            dispatch_bytes=self.dispatch_bytes,
            combine_bytes=self.combine_bytes,
            expert_s_GJ=np.stack([np.bincount(group_E, weights=expert_s_E, minlength=n) for expert_s_E in expert_s_GE]),
            gate_s_G=self.gate_s_WG[0],
            aggregate_s_G=self.aggregate_s_WG[0],
            out_Bps=self.out_Bps,
            in_Bps=self.in_Bps,
        )

    def seconds(self, split_EG: FloatArray) -> FloatArray:
        """Returns the seconds of Eq. 1 in each scenario.

        Args:
            split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.

        Returns:
            (W,) float64.

        Source:
            Aurora (arXiv:2410.17043) Eq. 1.
        """
        return np.array([exclusive(self.phase_times(scenario, split_EG)) for scenario in range(len(self.own_WGE))])

    def phase_times(self, scenario: int, split_EG: FloatArray) -> PhaseTimes:
        """Returns the seconds of each phase on each GPU; a share of an expert's tokens takes that share of its seconds.

        Args:
            scenario: which of the W scenarios.
            split_EG: as in `seconds`.
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
        """Returns a lower bound on Eq. 1 in each scenario that no placement beats.

        Args:
            replicated: whether the bound covers placements with replicas, which divide experts over GPUs.

        Returns:
            (W,) float64 seconds.
        """
        below = spread_split if replicated else spread
        return np.array([self._bound(scenario, below) for scenario in range(len(self.own_WGE))])

    def _bound(self, w: int, below: Callable[[FloatArray], float]) -> float:
        """The bound of scenario w; `below` bounds the largest sum of any GPU from (G, E) seconds of each expert."""
        arriving_GE = self.load_WE[w] - self.own_WGE[w]  # tokens that start on GPU g are not sent to experts there
        dispatch_GE, combine_GE = arriving_GE * self.recv_s_G[:, None], arriving_GE * self.csend_s_G[:, None]
        gate_G = self.gate_s_WG[w]
        first = max(float(gate_G.max()), float(gate_G.min()) + below(dispatch_GE))
        return first + below(self.expert_s_WGE[w] + combine_GE) + float(self.aggregate_s_WG[w].max())


def scenario_costs(cluster: Cluster, parts: Sequence[tuple[Profile, int, slice]]) -> LayerCosts:
    """Returns the LayerCosts of several scenarios.

    Args:
        cluster: the GPUs.
        parts: (profile, layer, windows) of each scenario; the tokens of its windows are summed. All profiles are of one model.
    """
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
    return LayerCosts(
        own_WGE=np.array(own),
        expert_s_WGE=np.array(expert),
        gate_s_WG=np.array(phases["gate"]),
        aggregate_s_WG=np.array(phases["aggregate"]),
        dispatch_bytes=first.dispatch_bytes,
        combine_bytes=first.combine_bytes,
        out_Bps=cluster.out_Bps_G,
        in_Bps=cluster.in_Bps_G,
    )


def layer_costs(cluster: Cluster, profile: Profile, layer: int) -> LayerCosts:
    """Returns the LayerCosts of one layer with the whole profile as a single scenario.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        layer: which MoE layer.
    """
    return scenario_costs(cluster, [(profile, layer, slice(None))])


def group_costs(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray, deduplicated: bool = False) -> GroupCosts:
    """Returns the GroupCosts of one layer over the whole profile.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        layer: which MoE layer.
        group_E: (E,) int64, the group of each expert, one group for each GPU.
        deduplicated: whether a token is counted once for a group that holds several of its experts.

    Raises:
        BadInput: with `deduplicated`, if the profile holds no token-level routing.
    """
    costs = layer_costs(cluster, profile, layer)
    if not deduplicated:
        return costs.grouped(group_E)
    tokens_SJ = deduplicated_tokens(*profile.required_routing.layer(layer), group_E, len(cluster))
    return replace(costs, dispatch_bytes=profile.row_bytes(deduplicated)).grouped(group_E, tokens_SJ)


def group_tokens(tokens_SE: IntArray, group_E: IntArray, groups: int) -> IntArray:
    """Sums tokens over the experts of each group.

    Args:
        tokens_SE: (S, E) int64, tokens from each source to each expert.
        group_E: (E,) int64, the group of each expert.
        groups: number of groups J.

    Returns:
        (S, J) int64.
    """
    tokens_SJ = np.zeros((len(tokens_SE), groups), dtype=np.int64)
    np.add.at(tokens_SJ.T, group_E, tokens_SE.T)
    return tokens_SJ
