"""What it costs to put group j of one layer's experts on GPU g: the arrays that ASSIGN and COLOCATE look at."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.planner.placement.coactivation import deduplicated_GG
from aurora.planner.placement.objective import PhaseTimes
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one model's layer over the whole profile.

    load_J (J,) int64 tokens of each group. With the requests' ranks fixed, what GPU g sends and receives depends on the group
    it holds and on nothing else: send_GJ, recv_GJ (G, J) int64 tokens of the dispatch (the combine is its transpose), each of
    dispatch_bytes and combine_bytes. expert_s_GJ (G, J), gate_s_G, aggregate_s_G (G,) seconds; out_Bps, in_Bps (G,).
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

    def terms(self, group_G: IntArray) -> PhaseTimes:
        """The phases' times when GPU g holds group_G[g]."""
        send_G, recv_G, csend_G, crecv_G, expert_G = self.seconds_XGJ[:, np.arange(len(group_G)), group_G]
        return PhaseTimes(self.gate_s_G, send_G, recv_G, csend_G, crecv_G, expert_G, self.aggregate_s_G)

    @cached_property
    def seconds_XGJ(self) -> FloatArray:
        """(5, G, J) seconds of what depends on where group j sits: the dispatch's send and receive, the combine's send and
        receive, and the experts."""
        out, into = self.out_Bps[:, None], self.in_Bps[:, None]
        there = self.send_GJ * self.dispatch_bytes / out, self.recv_GJ * self.dispatch_bytes / into
        back = self.recv_GJ * self.combine_bytes / out, self.send_GJ * self.combine_bytes / into
        return np.stack([*there, *back, self.expert_s_GJ])

    @property
    def port_s_XG(self) -> FloatArray:
        """(4, G) seconds a token: the dispatch's send and receive, the combine's send and receive."""
        return np.stack(
            [size / rate for size in (self.dispatch_bytes, self.combine_bytes) for rate in (self.out_Bps, self.in_Bps)]
        )

    @property
    def dispatch_s_GJ(self) -> FloatArray:
        """(G, J) seconds of GPU g's port in the dispatch when it holds group j."""
        return np.asarray(self.seconds_XGJ[:2].max(axis=0))

    @property
    def combine_s_GJ(self) -> FloatArray:
        return np.asarray(self.seconds_XGJ[2:4].max(axis=0))

    @property
    def alone_s_GJ(self) -> FloatArray:
        """(G, J) seconds of dispatch, experts and combine on GPU g with group j."""
        return self.dispatch_s_GJ + self.expert_s_GJ + self.combine_s_GJ

    @property
    def strongest_first(self) -> IntArray:
        """(G,) int64: GPUs by performance, the time they would take for all experts, then their ports."""
        return np.lexsort((-np.minimum(self.out_Bps, self.in_Bps), self.expert_s_GJ.sum(axis=1)))


def group_tokens(tokens_SE: IntArray, group_E: IntArray, groups: int) -> IntArray:
    """(S, J) int64: tokens from each source to each group."""
    tokens_SJ = np.zeros((len(tokens_SE), groups), dtype=np.int64)
    np.add.at(tokens_SJ.T, group_E, tokens_SE.T)
    return tokens_SJ


def exchanged(tokens_SE: IntArray, split_EG: FloatArray) -> IntArray:
    """(S, G) int64: tokens from each source to each GPU, when split_EG (E, G) says how experts' tokens divide over GPUs."""
    whole_E = (split_EG == 1).any(axis=1)
    tokens_SG = tokens_SE[:, whole_E] @ (split_EG[whole_E] == 1).astype(np.int64)
    for expert in np.flatnonzero(~whole_E).tolist():
        tokens_SG += divided(tokens_SE[:, expert], split_EG[expert])
    return np.asarray(tokens_SG)


def arriving(tokens_SE: IntArray, split_EG: FloatArray, gpu: int) -> IntArray:
    """(E,) int64: each expert's tokens on `gpu`, from all sources, as `exchanged` divides them."""
    tokens_E = np.where(split_EG[:, gpu] == 1, tokens_SE.sum(axis=0), 0)
    for expert in np.flatnonzero((split_EG[:, gpu] > 0) & (split_EG[:, gpu] < 1)).tolist():
        tokens_E[expert] = divided(tokens_SE[:, expert], split_EG[expert])[:, gpu].sum()
    return tokens_E


def divided(tokens_S: IntArray, split_G: FloatArray) -> IntArray:
    """(S, G) int64: each source's tokens for one expert over the GPUs that share it by split_G (G,).

    Cut at the running sum of shares, rounded up or down by the source's number: so every rank, computing apart, agrees, all are
    sent, and sources with few tokens do not all choose one GPU.
    """
    upto_G = split_G.cumsum()
    rounding_S = (np.arange(len(tokens_S)) + 0.5) / len(tokens_S)
    upto_SG = np.floor(tokens_S[:, None] * (upto_G / upto_G[-1]) + rounding_S[:, None]).astype(np.int64)
    return np.asarray(np.diff(upto_SG, axis=1, prepend=0))


def expert_seconds(cluster: Cluster, profile: Profile, layer: int) -> FloatArray:
    """(G, E) seconds of each expert of `layer` on each GPU, the profile's windows summed."""
    tokens_TE = profile.tokens_TLSE[:, layer].sum(axis=1)
    return np.stack([profile.seconds("expert", gpu, tokens_TE).sum(axis=0) for gpu in cluster.gpus])


def group_costs(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray, deduplicated: bool = False) -> GroupCosts:
    """GroupCosts of `layer`, its experts grouped by group_E (E,). Source rank s sits on GPU s.

    once: a token counts once for a group that holds several of its experts; BadInput where the profile holds no choices.
    """
    n = len(cluster)
    tokens_TSE = profile.tokens_TLSE[:, layer]
    if deduplicated:
        tokens_SJ = deduplicated_GG(*profile.required_routing.layer(layer), group_E, n)
    else:
        tokens_SJ = group_tokens(tokens_TSE.sum(axis=0), group_E, n)
    send_GJ = tokens_SJ.sum(axis=1)[:, None] - tokens_SJ
    recv_GJ = tokens_SJ.sum(axis=0)[None, :] - tokens_SJ
    own_TG = tokens_TSE.sum(axis=2) // profile.top_k
    expert_s_GE = expert_seconds(cluster, profile, layer)
    expert_s_GJ: FloatArray = np.stack([np.bincount(group_E, weights=expert_s_E, minlength=n) for expert_s_E in expert_s_GE])
    own = {
        phase: np.array([profile.seconds(phase, gpu, own_TG[:, g]).sum() for g, gpu in enumerate(cluster.gpus)])
        for phase in ("gate", "aggregate")
    }
    return GroupCosts(
        tokens_SJ.sum(axis=0),
        send_GJ,
        recv_GJ,
        profile.row_bytes(deduplicated),
        profile.combine_bytes,
        expert_s_GJ,
        own["gate"],
        own["aggregate"],
        cluster.out_Bps_G,
        cluster.in_Bps_G,
    )


def coupled_s(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray) -> FloatArray:
    """(3, G, J) seconds of Eq. 1's parts, gate and dispatch, experts and combine, aggregation, if rank j's requests moved to
    GPU g together with group j. Source: the model of Aurora §5; in serving the requests stay where they are."""
    tokens_TSE = profile.tokens_TLSE[:, layer]
    n = len(cluster)
    costs = group_costs(cluster, profile, layer, group_E)
    tokens_SJ = group_tokens(tokens_TSE.sum(axis=0), group_E, n)
    stay_J = np.diag(tokens_SJ)
    send_J, recv_J = tokens_SJ.sum(axis=1) - stay_J, tokens_SJ.sum(axis=0) - stay_J
    own_TS = tokens_TSE.sum(axis=2) // profile.top_k
    gate, aggregate = (
        np.stack([profile.seconds(phase, gpu, own_TS).sum(axis=0) for gpu in cluster.gpus]) for phase in ("gate", "aggregate")
    )
    out, into = cluster.out_Bps_G[:, None], cluster.in_Bps_G[:, None]
    dispatch = np.maximum(send_J / out, recv_J / into) * profile.dispatch_bytes
    combine = np.maximum(recv_J / out, send_J / into) * profile.combine_bytes
    return np.stack([gate + dispatch, costs.expert_s_GJ + combine, aggregate])
