"""Planning model of the paper, in which a rank's requests move to another GPU with its group of experts."""

import numpy as np

from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.workload.traffic import group_tokens
from aurora.types import Cluster, Profile
from aurora.types.arrays import FloatArray, IntArray


def coupled_s(cluster: Cluster, profile: Profile, layer: int, group_E: IntArray) -> FloatArray:
    """Returns (3, G, J) seconds of Eq. 1's parts if rank j's requests moved to GPU g with group j.

    The parts are gate and dispatch, experts and combine, and aggregation. In serving, requests stay where they are: there
    `LayerCosts` holds.

    Source: Aurora §5 (arXiv:2410.17043).
    """
    tokens_TSE = profile.tokens_TLSE[:, layer]
    n = len(cluster)
    costs = layer_costs(cluster, profile, layer).grouped(group_E)
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
    return np.stack([gate + dispatch, costs.expert_s_WGE[0] + combine, aggregate])
