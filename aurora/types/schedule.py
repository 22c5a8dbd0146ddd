"""The order of one all-to-all, and its timed schedule."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, gap, numbers
from aurora.types.fabric import Cut
from aurora.types.value import Value


@dataclass(frozen=True, eq=False, repr=False)
class SubChannels(Value):
    """Ports cut into lanes of about one rate, so that a fast one serves several slow ones at once.

    row_X (X,) int64: how many lanes of both of its ports each row of an order takes. out_G, in_G (G,) int64: how many lanes
    each port has. A row is held to its lanes' share of the slower port.
    """

    row_X: IntArray
    out_G: IntArray
    in_G: IntArray

    def __post_init__(self) -> None:
        for name in ("row_X", "out_G", "in_G"):
            object.__setattr__(self, name, counts(f"lanes, {name}", getattr(self, name), 1))
        if len(self.out_G) != len(self.in_G):
            raise BadInput(f"lanes: expected as many senders as receivers, found {len(self.out_G)} and {len(self.in_G)}")

    @property
    def reversed(self) -> "SubChannels":
        return SubChannels(self.row_X[::-1], self.in_G, self.out_G)


@dataclass(frozen=True, eq=False, repr=False)
class Order(Value):
    """The order of one all-to-all; it holds no sizes, so it serves any batch.

    pairs_X2 (X, 2) int64: (source, destination) rows that cover every ordered pair. A rank sends and receives its own rows in
    this sequence, with at most `sends_open` and `recvs_open` of them under way at a time, or as many as its lanes hold;
    a transfer starts when both of its ends are ready. One and one means one partner at a time. share_X2 (X, 2) float64: which
    part of its pair's bytes a row carries, from and to; None: each pair is one row, whole. paced: rates are held so that all
    rows end together.
    """

    method: str
    pairs_X2: IntArray
    sends_open: int = 1
    recvs_open: int = 1
    share_X2: FloatArray | None = None
    paced: bool = False
    sub_channels: SubChannels | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs_X2", counts("order", self.pairs_X2, 2))
        if min(self.sends_open, self.recvs_open) < 1:
            raise BadInput(f"order {self.method}: expected at least one open send and receive")
        if self.sub_channels is not None and len(self.sub_channels.row_X) != len(self.pairs_X2):
            raise BadInput(f"order {self.method}: expected lanes for each of {len(self.pairs_X2)} rows")
        if self.share_X2 is not None:
            object.__setattr__(self, "share_X2", numbers("order shares", self.share_X2, 2))
            if self.share_X2.shape != self.pairs_X2.shape:
                raise BadInput(f"order {self.method}: expected a share for each row, found {self.share_X2.shape}")

    @property
    def one_to_one(self) -> bool:
        return self.sends_open == self.recvs_open == 1 and self.sub_channels is None

    @property
    def reversed(self) -> "Order":
        """The order of the transposed all-to-all (combine after dispatch): the same transfers backwards in time."""
        share_X2 = None if self.share_X2 is None else self.share_X2[::-1]
        sub_channels = None if self.sub_channels is None else self.sub_channels.reversed
        return Order(
            self.method, self.pairs_X2[::-1, ::-1], self.recvs_open, self.sends_open, share_X2, self.paced, sub_channels
        )

    @cached_property
    def ends(self) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[tuple[int, int]]]]:
        """(row, peer) in sequence of what each rank sends, and of what it receives."""
        sends: dict[int, list[tuple[int, int]]] = {}
        recvs: dict[int, list[tuple[int, int]]] = {}
        for row, (src, dst) in enumerate(self.pairs_X2.tolist()):
            sends.setdefault(src, []).append((row, dst))
            recvs.setdefault(dst, []).append((row, src))
        return sends, recvs

    def cuts(self, sizes_X: IntArray, rows_X: IntArray | None = None) -> IntArray:
        """(X, 2) int64: from where to where each row goes in something of sizes_X units, the size of its pair, (X,) int64.

        Whole units: the rows of a pair cover it without gap or overlap. rows_X: only these rows; None: all.
        """
        if self.share_X2 is None:
            return np.stack([np.zeros_like(sizes_X), sizes_X], axis=1)
        share_X2 = self.share_X2 if rows_X is None else self.share_X2[rows_X]
        return np.rint(share_X2 * sizes_X[:, None]).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Value):
    """A timed all-to-all. src_X, dst_X, bytes_X int64, start_s_X, end_s_X, rate_Bps_X float64, by start.

    A row is a transfer, or the part of one that flows at one rate: where ports are shared, rates change. A transfer's
    start-up time lies before its first row. fluid_bound_s is the ports'; cut: what limits on a fabric, None on the big switch.
    hop_X2 (X, 2) int64: where bytes are forwarded, the GPUs that a row goes from and to on its way from src to dst; None: every
    row goes all the way.
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
    hop_X2: IntArray | None = None

    def __post_init__(self) -> None:
        if self.hop_X2 is not None:
            object.__setattr__(self, "hop_X2", counts("schedule, hop_X2", self.hop_X2, 2))
        for name in ("src_X", "dst_X", "bytes_X"):
            object.__setattr__(self, name, counts(f"schedule, {name}", getattr(self, name), 1))
        for name in ("start_s_X", "end_s_X", "rate_Bps_X"):
            object.__setattr__(self, name, numbers(f"schedule, {name}", getattr(self, name)))
        lengths = {len(getattr(self, n)) for n in ("src_X", "dst_X", "bytes_X", "start_s_X", "end_s_X", "rate_Bps_X")}
        if len(lengths) != 1:
            raise BadInput(f"schedule: expected columns of one length, found {sorted(lengths)}")

    @property
    def makespan_s(self) -> float:
        return float(self.end_s_X.max(initial=0.0))

    @property
    def gap(self) -> float:
        """Against the fluid bound or, where it is larger, the cut's."""
        return gap(self.makespan_s, max(self.fluid_bound_s, self.cut.bound_s if self.cut else 0.0))
