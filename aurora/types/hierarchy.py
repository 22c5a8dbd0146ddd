"""Hierarchy: an all-to-all over servers in two hops, in steps that overlap the hops."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import BoolArray, IntArray, counts, locked
from aurora.types.value import Value

MOST_CHUNKS = 1024  # each costs a start-up


@dataclass(frozen=True, eq=False, repr=False)
class Hierarchy(Value):
    """An all-to-all in which a token travels once to each server that needs it, and from there once to each GPU.

    The dispatch has two hops. A rank sends a token to one rank of each other server that holds experts of it, its gateway
    there. The gateway sends it to the ranks of its server that hold them. Tokens for the rank's own server take the second hop
    alone. The combine goes the same way back: a gateway adds up what its server computed for a token, and sends one row back.

    The rows from a rank to a server are cut into chunks. An all-to-all has `steps`, each one exchange between all ranks: step s
    of a dispatch carries chunk s between servers, chunk s of what stays inside a server, and to its ranks what their gateways
    have received in the step before. So both networks are busy at the same time. A combine has the dispatch's steps backwards.

    Args:
        server_G: (G,) int64, the server of each rank, numbered from zero.
        chunks: how many chunks; more of them overlap the hops better, and cost more start-ups.

    Raises:
        BadInput: if a server has no rank, or the number of chunks is out of range.
    """

    server_G: IntArray
    chunks: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_G", counts("hierarchy, server_G", self.server_G, 1))
        if not 1 <= self.chunks <= MOST_CHUNKS:
            raise BadInput(f"hierarchy: expected from one to {MOST_CHUNKS} chunks, found {self.chunks}")
        if self.server_G.max(initial=0) >= max(len(self.server_G), 1):
            raise BadInput(f"hierarchy: expected servers from 0 to {len(self.server_G) - 1}, found {self.server_G.max()}")
        if len(lacking := np.setdiff1d(np.arange(self.servers), self.server_G)):
            raise BadInput(f"hierarchy: expected a rank on each of {self.servers} servers, found none on server {lacking[0]}")

    @property
    def ranks(self) -> int:
        """Number of ranks, G."""
        return len(self.server_G)

    @property
    def servers(self) -> int:
        """Number of servers, N."""
        return 1 + int(self.server_G.max(initial=-1))

    @property
    def steps(self) -> int:
        """Number of exchanges of one all-to-all."""
        return self.chunks + 1

    @cached_property
    def gateway_GN(self) -> IntArray:
        """(G, N) int64: the rank that receives what each rank sends to each server, itself on its own.

        The i-th rank of a server has the i-th ranks of the others as gateways, so that with as many ranks everywhere each NIC
        sends to one NIC of a server. Ranks of larger servers begin again with the first.
        """
        members_N = [np.flatnonzero(self.server_G == server) for server in range(self.servers)]
        local_G = np.zeros(self.ranks, dtype=np.int64)
        for members in members_N:
            local_G[members] = np.arange(len(members))
        return locked(np.stack([members[local_G % len(members)] for members in members_N], axis=1))

    def among(self, alive_G: BoolArray) -> Self:
        """Returns the hierarchy of some ranks alone, renumbered; servers without any are left out."""
        return replace(self, server_G=np.unique(self.server_G[alive_G], return_inverse=True)[1])

    def chunk_starts(self, rows: IntArray) -> IntArray:
        """Returns where the chunks of each entry's rows begin, and their end: (..., chunks + 1) int64 for rows of any shape."""
        return np.asarray(rows[..., None] * np.arange(self.chunks + 1) // self.chunks)
