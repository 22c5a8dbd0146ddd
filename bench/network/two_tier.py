"""A bound on deduplicated dispatches over servers, which benches of such all-to-alls compare with."""

import numpy as np

from aurora.types.arrays import IntArray


def deduplicated_two_tier_bound(
    sent_GN: IntArray, needed_GG: IntArray, server_G: IntArray, nic_Bps: float, inside_Bps: float, shared_nic: bool = False
) -> float:
    """Returns a lower bound in seconds on a deduplicated dispatch over servers, or on the combine that goes the same way back.

    It holds for every execution in which tokens go from their server to each other server that needs them, in any number of
    copies and by any of its NICs, and in which GPUs forward inside their servers. The largest of these times:

    - Of a server, the tokens that leave for other servers, or that come, once for each server, over all of its NICs.
    - Of a GPU, the tokens of its own server that it needs, over its inside port.
    - Of a GPU, all tokens of others that it needs, over its inside port and a NIC together; and of all GPUs of a server, over
      all of their ports.

    Start-ups do not count. The ports inside and the NICs are taken to be apart.

    Args:
        sent_GN: (G, N) int64, bytes of the tokens of each GPU that each server needs.
        needed_GG: (G, G) int64, bytes of the tokens of each GPU (row) that each GPU needs.
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        nic_Bps: bytes per second of a NIC.
        inside_Bps: bytes per second that a GPU sends, and receives, inside its server.
        shared_nic: whether a server has one NIC, instead of one for each GPU.
    """
    servers = sent_GN.shape[1]
    size_N = np.bincount(server_G, minlength=servers)
    nics_Bps_N = nic_Bps * (np.ones(servers) if shared_nic else size_N)
    between_NN = np.stack([sent_GN[server_G == server].sum(axis=0) for server in range(servers)])
    np.fill_diagonal(between_NN, 0)
    foreign_GG = needed_GG * ~np.eye(len(server_G), dtype=np.bool_)
    own_G = np.where(server_G[:, None] == server_G[None, :], foreign_GG, 0).sum(axis=0)
    needed_G = foreign_GG.sum(axis=0)
    needed_N = np.bincount(server_G, needed_G, minlength=servers)
    seconds = (
        np.maximum(between_NN.sum(axis=0), between_NN.sum(axis=1)) / nics_Bps_N,
        own_G / inside_Bps,
        needed_G / (inside_Bps + nic_Bps),
        needed_N / (size_N * inside_Bps + nics_Bps_N),
    )
    return float(max(each.max(initial=0.0) for each in seconds))
