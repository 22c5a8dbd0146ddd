"""What planning makes: placements, orders, timed schedules, and the Plan that holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, counts, locked, numbers
from aurora.types.cluster import Cluster
from aurora.types.fabric import Cut


def gap(value: float, bound: float) -> float:
    """value / bound - 1, and 0 when both are zero."""
    if bound > 0:
        return value / bound - 1
    return 0.0 if value <= 0 else float("inf")


@dataclass(frozen=True)
class Placement:
    """slots_LG[l][g]: the experts that GPU g holds in layer l, ascending; every expert at least once a layer.

    split_LG, of the same shape: how much of each expert's load its replica there takes; None where every expert is held once.
    """

    slots_LG: tuple[tuple[tuple[int, ...], ...], ...]
    split_LG: tuple[tuple[tuple[float, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        if any(not isinstance(expert, int) for layer in self.slots_LG for held in layer for expert in held):
            raise BadInput("placement: expected experts as whole numbers")
        if not self.slots_LG or len({len(layer) for layer in self.slots_LG}) != 1:
            raise BadInput("placement: expected one list of GPUs for every layer, all of one length")
        if self.split_LG is None:
            object.__setattr__(self, "slots_LG", tuple(tuple(tuple(sorted(held)) for held in layer) for layer in self.slots_LG))
        else:
            self._sort_with_split(self.split_LG)
        experts = self.experts
        if not experts:
            raise BadInput("placement: expected at least one expert, found none")
        for number, layer in enumerate(self.slots_LG):
            found = sorted(expert for held in layer for expert in held)
            whole = len(set(found)) == experts and found[0] >= 0 and found[-1] < experts
            if not whole or (self.split_LG is None and len(found) > experts):
                raise BadInput(f"placement, layer {number}: expected experts 0..{experts - 1} once, found {found}")
            if self.split_LG is not None:
                self._check_split(number)

    def _sort_with_split(self, split_LG: tuple[tuple[tuple[float, ...], ...], ...]) -> None:
        shapes = [[tuple(map(len, layer)) for layer in table] for table in (self.slots_LG, split_LG)]
        if shapes[0] != shapes[1]:
            raise BadInput("placement: expected a share for each slot")
        pairs = [
            [sorted(zip(held, share, strict=True)) for held, share in zip(*layer, strict=True)]
            for layer in zip(self.slots_LG, split_LG, strict=True)
        ]
        for index, name in enumerate(("slots_LG", "split_LG")):
            column = tuple(tuple(tuple(pair[index] for pair in held) for held in layer) for layer in pairs)
            object.__setattr__(self, name, column)

    def _check_split(self, layer: int) -> None:
        if any(len(set(held)) != len(held) for held in self.slots_LG[layer]):
            raise BadInput(f"placement, layer {layer}: expected no expert twice on a GPU")
        split_EG = self.split_EG(layer)
        total_E = split_EG.sum(axis=1)
        if not (split_EG >= 0).all() or not (abs(total_E - 1) < 1e-9).all():
            raise BadInput(f"placement, layer {layer}: expected shares of zero or more that sum to 1 for every expert")

    @property
    def experts(self) -> int:
        return 1 + max((expert for held in self.slots_LG[0] for expert in held), default=-1)

    @property
    def gpus(self) -> int:
        return len(self.slots_LG[0])

    def layer(self, number: int) -> "Placement":
        """One of its layers by itself."""
        return Placement(
            self.slots_LG[number : number + 1], None if self.split_LG is None else self.split_LG[number : number + 1]
        )

    @classmethod
    def stack(cls, parts: "Sequence[Placement]") -> "Placement":
        """The layers of `parts`, one after the other."""
        slots = tuple(layer for part in parts for layer in part.slots_LG)
        if all(part.split_LG is None for part in parts):
            return cls(slots)
        whole = [tuple(tuple(tuple(1.0 for _ in held) for held in layer) for layer in part.slots_LG) for part in parts]
        return cls(slots, tuple(layer for part, ones in zip(parts, whole, strict=True) for layer in part.split_LG or ones))

    def relabelled(self, from_G: IntArray) -> "Placement":
        """GPU g holds what GPU from_G[g] held."""
        slots, split = (
            None if table is None else tuple(tuple(layer[gpu] for gpu in from_G.tolist()) for layer in table)
            for table in (self.slots_LG, self.split_LG)
        )
        assert slots is not None
        return Placement(slots, split)

    def gpu_E(self, layer: int) -> IntArray:
        """(E,) int64: the GPU that holds each expert of `layer`, where each is held once."""
        assert self.split_LG is None, "a replicated expert has no one GPU"
        where = np.empty(self.experts, dtype=np.int64)
        for gpu, held in enumerate(self.slots_LG[layer]):
            where[list(held)] = gpu
        return where

    def holds_EG(self, layer: int) -> NDArray[np.bool_]:
        """(E, G) bool: which GPUs hold each expert of `layer`."""
        holds_EG = np.zeros((self.experts, self.gpus), dtype=bool)
        for gpu, held in enumerate(self.slots_LG[layer]):
            holds_EG[list(held), gpu] = True
        return holds_EG

    def split_EG(self, layer: int) -> FloatArray:
        """(E, G) float64: how much of each expert's load each GPU takes in `layer`."""
        split_EG = np.zeros((self.experts, self.gpus))
        for gpu, held in enumerate(self.slots_LG[layer]):
            split_EG[list(held), gpu] = 1.0 if self.split_LG is None else self.split_LG[layer][gpu]
        return split_EG


@dataclass(frozen=True)
class SubChannels:
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


@dataclass(frozen=True)
class Order:
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


@dataclass(frozen=True)
class Schedule:
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


@dataclass(frozen=True)
class ModelPlan:
    """One model's part of a plan. dispatch_L, combine_L: the orders of each layer's two all-to-alls.

    profile_path: where its profile was read from, relative to the plan's file; empty if it came from memory.
    dispatch_s_L, fluid_bound_s_L, one_to_one_bound_s_L: seconds of the whole dispatch traffic of its profiles sent as one
    all-to-all, and the bounds under it. cut_L: what limits each layer's dispatch on a fabric; empty on the big switch.
    once: a token travels once to a GPU that holds several of its experts; all seconds and orders are for that.
    """

    model: str
    fingerprint: str
    profile_path: str
    profile_digest: str
    placement: Placement
    dispatch_L: tuple[Order, ...]
    combine_L: tuple[Order, ...]
    dispatch_s_L: FloatArray
    fluid_bound_s_L: FloatArray
    one_to_one_bound_s_L: FloatArray
    cut_L: tuple[Cut, ...] = ()
    deduplicated: bool = False

    def __post_init__(self) -> None:
        for name in ("dispatch_s_L", "fluid_bound_s_L", "one_to_one_bound_s_L"):
            object.__setattr__(self, name, locked(np.array(getattr(self, name), dtype=np.float64)))
        layers = len(self.placement.slots_LG)
        if not len(self.dispatch_L) == len(self.combine_L) == layers:
            raise BadInput(
                f"plan of {self.model!r}: expected two orders for each of {layers} layers, "
                f"found {len(self.dispatch_L)} and {len(self.combine_L)}"
            )
        if self.deduplicated and self.placement.split_LG is not None:
            raise BadInput(f"plan of {self.model!r}: expected every expert held once where a token counts once, found replicas")

    @property
    def bound_s_L(self) -> FloatArray:
        """Below each layer's dispatch_s_L: the fluid bound or, where it is larger, the cut's."""
        return np.maximum(self.fluid_bound_s_L, [cut.bound_s for cut in self.cut_L] or 0.0)


@dataclass(frozen=True)
class Plan:
    """Where experts sit and in which order tokens travel, for one model or two that share the GPUs.

    scenario: exclusive or colocated, on equal or mixed GPUs. methods: the strategy's name for each decision, and
    the slots a GPU that were asked for.
    objective: the planning model, "exclusive" (Eq. 1), "causal" or "paper" (Table 2). objective_s: its seconds of all layers,
    the windows and domains summed, or weighed as methods["aim"] says; bound_s: proved, below what no assignment of the same
    groups of experts gets, one a GPU; free_bound_s: below what no placement gets at all. The planning model knows ports, not
    the links of a fabric; orders are timed on both.
    floor: every expert of each layer is on at least so many GPUs and nodes, or on all; None: failures were not planned for.
    survival_LK (L, D-1): then how likely every expert is still held after 1, 2, ... of the D nodes failed.
    """

    cluster: Cluster
    models: tuple[ModelPlan, ...]
    scenario: str
    methods: Mapping[str, str]
    seed: int
    objective: str
    objective_s: float
    bound_s: float
    free_bound_s: float
    epoch: int = 0
    notes: tuple[str, ...] = field(default=())
    min_replicas: int | None = None
    survival_LK: FloatArray | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.models) <= 2:
            raise BadInput(f"plan: expected one or two models, found {len(self.models)}")
        if len(self.models) > 1 and any(model.deduplicated for model in self.models):
            raise BadInput("plan: expected one model alone where a token counts once a GPU, found two")
        if (self.min_replicas is None) != (self.survival_LK is None):
            raise BadInput("plan: expected a floor and survival together or neither")
        if self.survival_LK is not None:
            object.__setattr__(self, "survival_LK", numbers("plan, survival", self.survival_LK, 2))
        for model in self.models:
            if model.placement.gpus != len(self.cluster):
                raise BadInput(
                    f"plan of {model.model!r}: expected a placement on {len(self.cluster)} GPUs, "
                    f"found one on {model.placement.gpus}"
                )

    @property
    def gap(self) -> float:
        return gap(self.objective_s, self.bound_s)
