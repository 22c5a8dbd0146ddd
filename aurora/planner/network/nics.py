"""NICs of a fabric of servers, as planning models see them: how much each carries, and how long that takes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.types import Network
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Nics:
    """The NICs by which GPUs reach GPUs of other servers.

    Attributes:
        server_G: (G,) int64, the server of each GPU, numbered from zero.
        Bps_G: (G,) float64, bytes per second, each way, of the NIC that each GPU uses.
        shared: whether the GPUs of a server use one NIC, instead of one each.
    """

    server_G: IntArray
    Bps_G: FloatArray
    shared: bool

    @cached_property
    def members_NG(self) -> FloatArray:
        """(N, G) float64: 1 where a GPU is in a server."""
        return np.asarray(self.server_G == np.arange(self.server_G.max() + 1)[:, None], dtype=np.float64)

    @property
    def size_N(self) -> FloatArray:
        """(N,) float64: GPUs of each server."""
        return np.asarray(self.members_NG.sum(axis=1))

    @property
    def server_Bps_N(self) -> FloatArray:
        """(N,) float64: bytes per second that all NICs of a server send, and receive."""
        total_N = self.members_NG @ self.Bps_G
        return np.asarray(total_N / self.size_N if self.shared else total_N)

    @property
    def as_ports_Bps_G(self) -> FloatArray:
        """(G,) float64: bytes per second of each GPU to all others, if its NIC limits it and all are sent equally much.

        Of a NIC that its server shares, a GPU has an equal part.
        """
        size_G = self.size_N[self.server_G]
        far_G = (len(size_G) - size_G) / (len(size_G) - 1)
        return np.asarray(self.Bps_G / (size_G if self.shared else 1.0) / far_G)

    def across(self, rows_XGG: IntArray) -> IntArray:
        """Returns (X, G, G) int64, the rows from GPU to GPU that go between servers, zero elsewhere."""
        return np.where(self.server_G[:, None] != self.server_G, rows_XGG, 0)

    def seconds(self, bytes_GG: IntArray) -> FloatArray:
        """Returns (G,) float64, the longer of the seconds in which the NIC that each GPU uses sends, and receives, its bytes.

        Args:
            bytes_GG: (G, G) int64, bytes from each GPU to each other.
        """
        (far_GG,) = self.across(bytes_GG[None])
        return np.asarray(np.maximum(self.carried(far_GG.sum(axis=1)), self.carried(far_GG.sum(axis=0))) / self.Bps_G)

    def carried(self, load_XG: IntArray | FloatArray) -> FloatArray:
        """Returns (X, G) float64, what the NIC that each GPU uses carries, from what each GPU sends (or receives) by NIC."""
        return np.asarray((load_XG @ self.members_NG.T)[..., self.server_G] if self.shared else load_XG)


def nics_of(network: Network) -> Nics | None:
    """Returns the NICs of a network with a fabric of two servers or more; None for other networks."""
    fabric = network.fabric
    if fabric is None or fabric.nic_Bps is None or len(set(fabric.server_G)) < 2:
        return None
    return Nics(np.array(fabric.server_G), np.full(network.gpus, fabric.nic_Bps), fabric.shared_nic)
