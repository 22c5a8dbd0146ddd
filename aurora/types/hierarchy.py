"""Hierarchy: an all-to-all over servers in two hops, in steps that overlap the hops."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import BoolArray, IntArray, counts, locked
from aurora.types.value import Value

MOST_CHUNKS = 1024  # each costs a start-up
MOST_ROWS = 1 << 40  # that a rank needs for levelling: sums of rows fit into 64 bits
MOST_PARTS = 8  # of a chunk: ranks tell each other the rows of each


@dataclass(frozen=True, eq=False, repr=False)
class Hierarchy(Value):
    """An all-to-all in which a token travels once to each server that needs it, and from there once to each GPU.

    The dispatch has two hops. A rank sends a token to one rank of each other server that holds experts of it, its gateway
    there. The gateway sends it to the ranks of its server that hold them. Tokens for the rank's own server take the second hop
    alone. The combine goes the same way back: a gateway adds up what its server computed for a token, and sends one row back.

    The rows from a rank to a server are cut into chunks. An all-to-all has `steps`, each one exchange between all ranks: step s
    of a dispatch carries chunk s between servers, chunk s of what stays inside a server, and to its ranks what their gateways
    have received in the step before. So both networks are busy at the same time. A combine has the dispatch's steps backwards.

    A levelled all-to-all also evens out what the NICs of a server carry. Chunks are cut into parts. A rank that has many more
    rows for a server than its peers hands them parts, inside the server; in the step after, the peers send these rows to their
    own gateways, as they do their own rows. So there is one step more.

    Args:
        server_G: (G,) int64, the server of each rank, numbered from zero.
        chunks: how many chunks; more of them overlap the hops better, and cost more start-ups.
        level_from: how many rows more than the mean of its server's ranks a rank has for another server when it begins to hand
            parts to them; None: never.

    Raises:
        BadInput: if a server has no rank, or the number of chunks or of rows is out of range.
    """

    server_G: IntArray
    chunks: int = 4
    level_from: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "server_G", counts("hierarchy, server_G", self.server_G, 1))
        if not 1 <= self.chunks <= MOST_CHUNKS:
            raise BadInput(f"hierarchy: expected from one to {MOST_CHUNKS} chunks, found {self.chunks}")
        if self.level_from is not None and not 1 <= self.level_from <= MOST_ROWS:
            raise BadInput(f"hierarchy: expected to level from one row to {MOST_ROWS} on, found {self.level_from}")
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
        return self.chunks + 1 + (self.parts > 1)

    @cached_property
    def parts(self) -> int:
        """Number of parts of a chunk: as many as the largest server has ranks, up to MOST_PARTS; one if not levelled."""
        return 1 if self.level_from is None else min(int(np.diff(self.first_N).max(initial=1)), MOST_PARTS)

    @property
    def pieces(self) -> int:
        """Number of parts of all chunks, C."""
        return self.chunks * self.parts

    @cached_property
    def member_G(self) -> IntArray:
        """(G,) int64: the ranks by server."""
        return locked(np.argsort(self.server_G, kind="stable"))

    @cached_property
    def first_N(self) -> IntArray:
        """(N + 1,) int64: where each server's ranks begin in `member_G`, and its length."""
        return locked(np.append(0, np.bincount(self.server_G, minlength=self.servers).cumsum()))

    @cached_property
    def gateway_GN(self) -> IntArray:
        """(G, N) int64: the rank that receives what each rank sends to each server, itself on its own.

        The i-th rank of a server has the i-th ranks of the others as gateways, so that with as many ranks everywhere each NIC
        sends to one NIC of a server. Ranks of larger servers begin again with the first.
        """
        local_G = np.empty(self.ranks, dtype=np.int64)
        local_G[self.member_G] = np.arange(self.ranks) - self.first_N[self.server_G[self.member_G]]
        return locked(self.member_G[self.first_N[:-1] + local_G[:, None] % np.diff(self.first_N)])

    def among(self, alive_G: BoolArray) -> Self:
        """Returns the hierarchy of some ranks alone, renumbered; servers without any are left out."""
        return replace(self, server_G=np.unique(self.server_G[alive_G], return_inverse=True)[1])

    def piece_starts(self, rows: IntArray) -> IntArray:
        """Returns where the pieces of each entry's rows begin, and their end: (..., C + 1) int64 for rows of any shape.

        Chunk s has the `parts` pieces from s * parts on.
        """
        return np.asarray(rows[..., None] * np.arange(self.pieces + 1) // self.pieces)
