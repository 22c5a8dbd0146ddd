"""What it costs to put group j of one layer's experts on GPU g: the arrays that ASSIGN and COLOCATE look at."""

from dataclasses import dataclass

import numpy as np

from aurora.plan.objective import Terms
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class GroupCosts:
    """Costs of one model's layer, in seconds over the whole profile.

    load_J (J,) int64 tokens of each group. power_G (G,): GPUs by performance, larger is better. With the requests'
    ranks fixed, what GPU g sends and receives depends on the group it holds and on nothing else:
    send_bytes_GJ, recv_bytes_GJ (G, J) int64 of the dispatch (the combine is its transpose);
    expert_s_GJ (G, J); gate_s_G, aggregate_s_G (G,); out_Bps, in_Bps (G,).
    """

    load_J: IntArray
    power_G: FloatArray
    send_bytes_GJ: IntArray
    recv_bytes_GJ: IntArray
    combine_per_dispatch: float
    expert_s_GJ: FloatArray
    gate_s_G: FloatArray
    aggregate_s_G: FloatArray
    out_Bps: FloatArray
    in_Bps: FloatArray

    def terms(self, group_G: IntArray) -> Terms:
        """The phases' times when GPU g holds group_G[g]."""
        gpus = np.arange(len(group_G))
        send, recv = self.send_bytes_GJ[gpus, group_G], self.recv_bytes_GJ[gpus, group_G]
        return Terms(
            self.gate_s_G,
            send / self.out_Bps,
            recv / self.in_Bps,
            recv * self.combine_per_dispatch / self.out_Bps,
            send * self.combine_per_dispatch / self.in_Bps,
            self.expert_s_GJ[gpus, group_G],
            self.aggregate_s_G,
        )

    @property
    def alone_s_GJ(self) -> FloatArray:
        """(G, J) seconds of dispatch, experts and combine on GPU g with group j."""
        out, into = self.out_Bps[:, None], self.in_Bps[:, None]
        dispatch = np.maximum(self.send_bytes_GJ / out, self.recv_bytes_GJ / into)
        combine = np.maximum(self.recv_bytes_GJ / out, self.send_bytes_GJ / into) * self.combine_per_dispatch
        return np.asarray(dispatch + self.expert_s_GJ + combine)


def group_tokens(tokens_SE: IntArray, group_E: IntArray, groups: int) -> IntArray:
    """(S, J) int64: tokens from each source to each group."""
    tokens_SJ = np.zeros((len(tokens_SE), groups), dtype=np.int64)
    np.add.at(tokens_SJ.T, group_E, tokens_SE.T)
    return tokens_SJ


def group_costs(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray) -> GroupCosts:
    """GroupCosts of `layer`, its experts grouped by group_E (E,). Source rank s sits on GPU s."""
    n = len(cluster)
    tokens_TSE = profile.tokens_TLSE[:, layer]
    tokens_SJ = group_tokens(tokens_TSE.sum(axis=0), group_E, n)
    send_GJ = tokens_SJ.sum(axis=1)[:, None] - tokens_SJ
    recv_GJ = tokens_SJ.sum(axis=0)[None, :] - tokens_SJ
    tokens_TE = tokens_TSE.sum(axis=1)
    own_TG = tokens_TSE.sum(axis=2) // profile.top_k
    expert_s_GJ = np.zeros((n, n))
    for g, gpu in enumerate(cluster.gpus):
        expert_s_E = profile.seconds("expert", gpu, tokens_TE).sum(axis=0)
        expert_s_GJ[g] = np.bincount(group_E, weights=expert_s_E, minlength=n)
    own = {
        phase: np.array([profile.seconds(phase, gpu, own_TG[:, g]).sum() for g, gpu in enumerate(cluster.gpus)])
        for phase in ("gate", "aggregate")
    }
    speed_G = np.array([gpu.speed for gpu in cluster.gpus])
    port_G = np.minimum(cluster.out_Bps_G, cluster.in_Bps_G)
    power_G = np.empty(n)
    power_G[np.lexsort((-np.arange(n), port_G, speed_G))] = np.arange(n)
    return GroupCosts(
        tokens_SJ.sum(axis=0),
        power_G,
        send_GJ * profile.dispatch_bytes,
        recv_GJ * profile.dispatch_bytes,
        profile.combine_bytes / profile.dispatch_bytes if profile.dispatch_bytes else 0.0,
        expert_s_GJ,
        own["gate"],
        own["aggregate"],
        cluster.out_Bps_G,
        cluster.in_Bps_G,
    )
