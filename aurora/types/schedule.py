"""Order, Hierarchy and Schedule of an all-to-all: sequence of its transfers, its steps over servers, its timed transfers."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import BoolArray, FloatArray, IntArray, Value, check_arrays, gap, locked
from aurora.types.network import Cut


def rotated_pairs(ranks: int) -> IntArray:
    """Returns (X, 2) int64, every ordered pair of ranks: (i, i + 1) for all ranks i, then (i, i + 2), ..., modulo `ranks`.

    For 3 ranks: (0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1). So ranks send to different ranks at any time, as in the
    all-to-alls of NCCL and serving engines.
    """
    src_X, step_X = np.tile(np.arange(ranks), max(ranks - 1, 0)), np.repeat(np.arange(1, ranks), ranks)
    return np.stack([src_X, (src_X + step_X) % ranks], axis=1)


@dataclass(frozen=True, eq=False, repr=False)
class Order(Value):
    """The order of one all-to-all: a list of rows, one per transfer. It holds no sizes, so that it serves any batch.

    A rank sends and receives its own rows in the sequence of the list. A transfer starts when it is next at both of its ends.

    Args:
        method: the order's name in ORDER.
        pairs_X2: (X, 2) int64, (source, destination) of each row; the rows cover every ordered pair.
        sends_open: number of transfers that a rank may be sending at the same time.
        recvs_open: number of transfers that a rank may be receiving at the same time. With 1 and 1 a rank has one partner at a
            time.
        share_X2: (X, 2) float64, the part of its pair's bytes that each row carries, as an interval within 0 to 1: (0, 0.25) is
            the first quarter. None: every pair is one row.
        paced: whether rates are limited so that all rows end at the same time.
        tier_X: (X,) int64, the tier of each row, from zero. A rank has separate ports in each tier: sequence and limits hold
            among its rows of one tier, and rows of different tiers do not wait for each other. None: all rows are in one tier.

    Raises:
        BadInput: if arrays differ in length or a number is out of range.
    """

    method: str
    pairs_X2: IntArray
    sends_open: int = 1
    recvs_open: int = 1
    share_X2: FloatArray | None = None
    paced: bool = False
    tier_X: IntArray | None = None

    def __post_init__(self) -> None:
        check_arrays(self, f"order {self.method}, ")
        if min(self.sends_open, self.recvs_open) < 1:
            raise BadInput(f"order {self.method}: expected at least one open send and receive")

    @classmethod
    def all_at_once(cls, ranks: int) -> "Order":
        """Returns the order that starts every transfer at once, so that ports are shared."""
        return cls("all-at-once", rotated_pairs(ranks), sends_open=max(1, ranks - 1), recvs_open=max(1, ranks - 1))

    @cached_property
    def tiers(self) -> int:
        """Number of tiers; 1 if tier_X is None."""
        return 1 if self.tier_X is None else 1 + int(self.tier_X.max(initial=0))

    @cached_property
    def one_to_one(self) -> bool:
        """True if each rank sends to one rank and receives from one at a time, in each tier."""
        return self.sends_open == self.recvs_open == 1

    @cached_property
    def reversed(self) -> "Order":
        """The order of the transposed all-to-all (combine after dispatch): the same transfers backwards in time."""
        share_X2 = None if self.share_X2 is None else self.share_X2[::-1]
        tier_X = None if self.tier_X is None else self.tier_X[::-1]
        windows = self.recvs_open, self.sends_open
        return Order(self.method, self.pairs_X2[::-1, ::-1], *windows, share_X2, self.paced, tier_X)

    def opened(self, transfers: int) -> "Order":
        """Returns the order with sends_open and recvs_open set to `transfers`; itself unless both are one in it.

        In stages (`stage_X`), a rank then has up to `transfers` sends and receives per stage. The result is cached.
        """
        if not self.one_to_one:
            return self
        if transfers not in self._opened:
            self._opened[transfers] = replace(self, sends_open=transfers, recvs_open=transfers)
        return self._opened[transfers]

    @cached_property
    def _opened(self) -> dict[int, "Order"]:
        """Cache of `opened`, by its argument."""
        return {}

    def rows_of(self, rank: int, sending: bool) -> tuple[IntArray, IntArray]:
        """Returns (rows, peers) of the transfers that a rank sends or receives, in sequence; the result is cached.

        Args:
            rank: the rank.
            sending: True for the rows that it sends, False for those that it receives.

        Returns:
            (Y,) int64 indices of the rows, and (Y,) int64 the rank at the other end of each.
        """
        transfers = self._rows_of.get((rank, sending))
        if transfers is None:
            own_X, peer_X = self.pairs_X2.T if sending else self.pairs_X2.T[::-1]
            rows_X = np.flatnonzero(own_X == rank)
            transfers = self._rows_of[rank, sending] = locked(rows_X), locked(peer_X[rows_X])
        return transfers

    @cached_property
    def _rows_of(self) -> dict[tuple[int, bool], tuple[IntArray, IntArray]]:
        """Cache of `rows_of`, by its arguments."""
        return {}

    @cached_property
    def in_sequence_X(self) -> BoolArray:
        """(X,) bool: True for rows whose sequence matters, because a port of the row has more rows than it may have open."""
        port_X2, _, in_sequence_P = self._ports
        return locked(np.asarray(in_sequence_P[port_X2].any(axis=1)))

    @property
    def _ports(self) -> tuple[IntArray, IntArray, BoolArray]:
        """The two ports (X, 2) of each row; by port, the rows that it may have open, and whether it keeps a sequence.

        Ports are numbered by tier, in each first the senders and then the receivers.
        """
        ranks = 1 + int(self.pairs_X2.max(initial=-1))
        port_X2 = self.pairs_X2 + np.array([0, ranks])
        if self.tier_X is not None:
            port_X2 = port_X2 + 2 * ranks * self.tier_X[:, None]
        capacity_P = np.tile(np.repeat([self.sends_open, self.recvs_open], ranks), self.tiers)
        return port_X2, capacity_P, np.bincount(port_X2.ravel(), minlength=len(capacity_P)) > capacity_P

    @cached_property
    def stage_X(self) -> IntArray:
        """(X,) int64, the stage of each row, from zero, for transfers that run in stages, as in grouped calls of NCCL.

        A rank's stage consists of all its rows with one stage number. It starts when the rank's previous stage has ended, and
        ends as a whole; a rank does not wait for stages of other ranks. Rows are numbered in sequence: a row gets the smallest
        number that is no less than the numbers of earlier rows at its two ports, and at which both ports have room for it
        (sends_open and recvs_open). Ports that may have all of their rows open do not count. Each tier is numbered
        independently; a stage has the rows of all tiers with its number.

        Ranks cannot deadlock: a transfer waits only for stages with smaller numbers, so by induction every stage ends. Rows
        without bytes may be left out, if both of their ends leave them out.
        """
        port_X2, capacity_P, in_sequence_P = self._ports
        in_sequence, capacity = in_sequence_P.tolist(), capacity_P.tolist()
        last, free, stages = [0] * len(capacity), capacity_P.tolist(), []
        for ports in port_X2.tolist():
            counted = [port for port in ports if in_sequence[port]]
            stage = max((last[port] + (free[port] == 0) for port in counted), default=0)
            for port in counted:
                if stage > last[port]:
                    last[port], free[port] = stage, capacity[port]
                free[port] -= 1
            stages.append(stage)
        return locked(np.array(stages, dtype=np.int64))

    def cuts(self, sizes_X: IntArray, rows_X: IntArray | None = None) -> IntArray:
        """Divides each pair's units (bytes or tokens, say) over its rows; returns the range of units that each row carries.

        The ranges of a pair have no gaps or overlaps. A row of share (0.25, 0.5) of a pair with 100 units carries units 25 to
        49, returned as (25, 50).

        Args:
            sizes_X: (X,) int64, units of each row's pair.
            rows_X: (X,) indices of the rows; None: all rows.

        Returns:
            (X, 2) int64, the first unit of each row and the one after its last.
        """
        if self.share_X2 is None:
            return np.stack([np.zeros_like(sizes_X), sizes_X], axis=1)
        share_X2 = self.share_X2 if rows_X is None else self.share_X2[rows_X]
        return np.rint(share_X2 * sizes_X[:, None]).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Value):
    """A timed all-to-all: one row per transfer, sorted by start; several rows for a transfer whose rate changes.

    A row starts when its bytes begin to flow, after the transfer's start-up.

    Args:
        method: the order's name.
        one_to_one: whether each rank sends to one rank and receives from one at a time, in each tier.
        src_X: (X,) int64, sending ranks.
        dst_X: (X,) int64, receiving ranks.
        bytes_X: (X,) int64, bytes.
        start_s_X: (X,) float64, starts in seconds.
        end_s_X: (X,) float64, ends in seconds.
        rate_Bps_X: (X,) float64, bytes per second.
        fluid_bound_s: the fluid bound of the ports, in seconds.
        one_to_one_bound_s: the one-to-one bound, in seconds.
        cut: the port or NIC with the largest bound, between servers; None on a big switch.
        tier_X: (X,) int64, the tier of each row's pair in the order; None: all are in one tier.
        step_X: (X,) int64, the step of each row in a hierarchical all-to-all; None if it is flat.

    Raises:
        BadInput: if columns differ in length or hold invalid numbers.
    """

    method: str
    one_to_one: bool
    src_X: IntArray
    dst_X: IntArray
    bytes_X: IntArray
    start_s_X: FloatArray
    end_s_X: FloatArray
    rate_Bps_X: FloatArray
    fluid_bound_s: float
    one_to_one_bound_s: float
    cut: Cut | None = None
    tier_X: IntArray | None = None
    step_X: IntArray | None = None

    def __post_init__(self) -> None:
        check_arrays(self, f"schedule {self.method}, ")

    @property
    def makespan_s(self) -> float:
        """Seconds from zero to the last end."""
        return float(self.end_s_X.max(initial=0.0))

    @property
    def gap(self) -> float:
        """makespan_s / bound - 1, where the bound is the larger of the fluid bound and the cut's bound."""
        return gap(self.makespan_s, max(self.fluid_bound_s, self.cut.bound_s if self.cut else 0.0))


MOST_CHUNKS = 1024  # each costs a start-up
MOST_ROWS = 1 << 40  # that a rank needs for levelling: sums of rows fit into 64 bits
MOST_PARTS = 8  # of a chunk: ranks tell each other the rows of each


@dataclass(frozen=True, eq=False, repr=False)
class Hierarchy(Value):
    """An all-to-all in which a token travels once to each server that needs it, and from there once to each GPU.

    The dispatch has two hops. A rank sends a token to its gateway, one rank, on each other server that holds experts of the
    token. The gateway sends it on to the ranks of its server that hold these experts. Tokens for experts on the rank's own
    server take only the second hop. The combine goes the same way back: a gateway sums its server's results for a token, and
    sends the sum back as one row.

    The rows from a rank to a server are cut into chunks. An all-to-all has `steps`, each an exchange between all ranks: step s
    of a dispatch carries chunk s between servers, chunk s of the rows inside servers, and the rows that gateways received in
    step s - 1 on to their servers' ranks. So both networks are busy at the same time. A combine has the same steps backwards.

    A levelled all-to-all also balances the load of a server's NICs. Chunks are cut into parts. A rank with many more rows for a
    server than its peers hands parts to the peers, inside the server; in the next step the peers send these rows to their
    gateways, like their own rows. This takes one more step.

    Args:
        server_G: (G,) int64, the server of each rank, numbered from zero.
        chunks: number of chunks; more chunks overlap the hops better, and cost more start-ups.
        level_from: a rank hands parts to its peers if it has at least this many rows more for another server than the ranks of
            its own server have on average; None: never.

    Raises:
        BadInput: if a server has no rank, or the number of chunks or of rows is out of range.
    """

    server_G: IntArray
    chunks: int = 4
    level_from: int | None = None

    def __post_init__(self) -> None:
        check_arrays(self, "hierarchy, ")
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
        """Number of parts of a chunk: if levelled, the ranks of the largest server, up to MOST_PARTS; otherwise one."""
        return 1 if self.level_from is None else min(int(np.diff(self.first_N).max(initial=1)), MOST_PARTS)

    @property
    def pieces(self) -> int:
        """Number of parts of all chunks together, C = chunks x parts."""
        return self.chunks * self.parts

    @cached_property
    def member_G(self) -> IntArray:
        """(G,) int64: all ranks sorted by server; `first_N` is the index of each server's first rank."""
        return locked(np.argsort(self.server_G, kind="stable"))

    @cached_property
    def first_N(self) -> IntArray:
        """(N + 1,) int64: server n's ranks are member_G[first_N[n] : first_N[n + 1]]."""
        return locked(np.append(0, np.bincount(self.server_G, minlength=self.servers).cumsum()))

    @cached_property
    def gateway_GN(self) -> IntArray:
        """(G, N) int64: the gateway of each rank on each server, which receives the rank's rows for the server.

        The gateways of a server's i-th rank are the i-th ranks of the other servers, so that between servers of equal size each
        NIC sends to one NIC. Where a server has fewer ranks, counting begins again with its first. On its own server a rank is
        its own gateway.
        """
        local_G = np.empty(self.ranks, dtype=np.int64)
        local_G[self.member_G] = np.arange(self.ranks) - self.first_N[self.server_G[self.member_G]]
        return locked(self.member_G[self.first_N[:-1] + local_G[:, None] % np.diff(self.first_N)])

    def piece_starts(self, rows: IntArray) -> IntArray:
        """Cuts numbers of rows into C pieces of nearly equal size, and returns where the pieces begin.

        Chunk s has the pieces s * parts to (s + 1) * parts - 1. With two pieces, 5 rows give [0, 2, 5].

        Args:
            rows: (...) int64, numbers of rows.

        Returns:
            (..., C + 1) int64, the first row of each piece, and last the number of rows.
        """
        return np.asarray(rows[..., None] * np.arange(self.pieces + 1) // self.pieces)
