"""Program: the operations of every rank, in order. The simulator predicts its time and the runtime executes it.

A Program holds no sizes: its orders give the sequence of transfers and each transfer's share of its pair's bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from aurora.types.arrays import IntArray, Value
from aurora.types.placement import Placement
from aurora.types.schedule import Hierarchy, Order

BARRIERS = ("gpu", "global", "none")  # which ranks a phase waits for in a simulation; see `aurora.simulate`
TIME_SLICES = ("exchange", "layer", "step")  # a model holds a port for one all-to-all, a combine and the next dispatch, a pass
AUTO_TIME_SLICES = TIME_SLICES[:2]  # that are chosen from
PREEMPTION_INTERVAL_S = 0.02  # of expert compute between two preemption points, with time slices by layer
PRIORITIES = ("interactive", "batch")  # of a model beside others
INTERACTIVE_LEVEL = 2  # of all compute of an interactive model, see `Program.compute_level`


@dataclass(frozen=True)
class Compute:
    """Local computation on a rank. Only one model at a time computes on a rank.

    Args:
        phase: "gate", "expert" or "aggregate".
    """

    phase: str


@dataclass(frozen=True)
class Barrier:
    """Point at which all ranks of the model wait for each other.

    Args:
        phase: "counts": ranks exchange token counts, from which each learns how many rows it will receive.
    """

    phase: str


@dataclass(frozen=True)
class Exchange:
    """An all-to-all. On every rank it runs in the model's time slice of the port.

    Models take time slices in turn: model 0, model 1, ..., then model 0 again.

    Args:
        phase: "dispatch" or "combine".
        order: the order of its transfers.
        hold_port: True: the time slice lasts through the model's next exchange; False: it ends with this one.
        hierarchy: the servers and chunks of a hierarchical all-to-all; all its steps use `order` and share one time slice.
            None: the all-to-all is flat.
        groups: number of groups of each rank's experts. If there are several, the rows of each group travel as a stage of their
            own, in `order`. The experts of a group compute as soon as its rows are there, and then its combine may begin.
    """

    phase: str
    order: Order
    hold_port: bool = False
    hierarchy: Hierarchy | None = None
    groups: int = 1


Op = Compute | Barrier | Exchange


def hierarchy_of(ops: Sequence[Op]) -> Hierarchy | None:
    """Returns the hierarchy of a layer's all-to-alls; None if they are flat.

    Args:
        ops: the operations of one layer of a model.
    """
    return next((op.hierarchy for op in ops if isinstance(op, Exchange)), None)


def groups_of(ops: Sequence[Op]) -> int:
    """Returns the number of groups of experts in a layer, see `Exchange.groups`; `ops` are as in `hierarchy_of`."""
    return next((op.groups for op in ops if isinstance(op, Exchange)), 1)


@dataclass(frozen=True)
class SlicePolicy:
    """Rules by which a model shares its ranks' ports and GPUs with other models.

    Args:
        interactive: True: its computation runs before that of batch models, which yield to it at preemption points.
        slice_s: maximum seconds of one time slice of a port; a flat exchange that takes longer is cut into several slices.
            Infinity: every exchange is one slice.
    """

    interactive: bool = False
    slice_s: float = float("inf")

    @property
    def yields(self) -> bool:
        """True for a batch model that shares the GPUs with an interactive one; only such a model has a finite `slice_s`."""
        return self.slice_s < float("inf")


def has_next_slice(next_M: Sequence[float], model: int) -> bool:
    """Returns whether the next time slice of a port belongs to `model`.

    It belongs to the model whose next slice has the smallest virtual time; among equal times, to the first model. The i-th
    slice of a model that joined at the virtual time `base` is at base + i. So models take slices in turn.
    The port arbiters of the runtime and of the simulator both use this rule.

    Args:
        next_M: (M,) virtual time of each model's next slice; infinity for a model that takes no slices.
        model: index of the model in next_M.

    Example:
        >>> [has_next_slice([1, 0], model) for model in (0, 1)]
        [False, True]
    """
    return all((next_M[model], model) <= (other_next, other) for other, other_next in enumerate(next_M))


@dataclass(frozen=True, eq=False, repr=False)
class Program(Value):
    """The operations of every rank. Its models run at the same time.

    Args:
        ranks: number of ranks.
        names_M: the models' names.
        placements_M: the Placement of each model's experts on the ranks.
        ops_ML: ops_ML[m][l] are the operations of model m in MoE layer l, in every step.
        deduplicated_M: per model, whether a token is sent once to a rank that holds several of its experts, instead of once
            per expert.
        policies_M: how each model shares ports and GPUs; empty: all models have the default policy.
        plan_model_M: for each model of the program, the index of the plan's model; micro-batches of a model have the same
            index. Empty: model m is the plan's model m.
        preemption_s: seconds of expert compute between two preemption points.
        gathered: for simulations only: an allgather and a reduce-scatter replace all-to-alls; every rank gets all tokens, and
            sends to every rank its partial sums of that rank's tokens.
    """

    ranks: int
    names_M: tuple[str, ...]
    placements_M: tuple[Placement, ...]
    ops_ML: tuple[tuple[tuple[Op, ...], ...], ...]
    deduplicated_M: tuple[bool, ...]
    policies_M: tuple[SlicePolicy, ...] = ()
    plan_model_M: tuple[int, ...] = ()
    preemption_s: float = PREEMPTION_INTERVAL_S
    gathered: bool = False

    def __post_init__(self) -> None:
        if not self.policies_M:
            object.__setattr__(self, "policies_M", (SlicePolicy(),) * len(self.names_M))
        if not self.plan_model_M:
            object.__setattr__(self, "plan_model_M", tuple(range(len(self.names_M))))

    def at_layers(self, some_M: Sequence[IntArray]) -> Self:
        """Returns the program reduced to some MoE layers; some_M[m] are the indices of model m's layers."""
        placements = zip(self.placements_M, some_M, strict=True)
        return replace(
            self,
            placements_M=tuple(Placement.stack([whole.layer(layer) for layer in some.tolist()]) for whole, some in placements),
            ops_ML=tuple(
                tuple(ops_L[layer] for layer in some.tolist()) for ops_L, some in zip(self.ops_ML, some_M, strict=True)
            ),
        )

    @cached_property
    def time_slice(self) -> str:
        """Length of a model's time slice of a port, one of TIME_SLICES.

        - "exchange": one all-to-all.
        - "layer": from a layer's combine through the next layer's dispatch, so that one model's experts compute during the
          other model's combine, gate and dispatch. Gates and aggregations are then high-priority work: they run before waiting
          expert compute, and interrupt running expert compute at its preemption points.
        - "step": a whole forward pass; the model takes the port before it computes.
        """
        exchanges = (op for layers in self.ops_ML for ops in layers for op in ops if isinstance(op, Exchange))
        phases = {op.phase for op in exchanges if op.hold_port}
        return "step" if "dispatch" in phases else "layer" if phases else "exchange"

    def compute_level(self, model: int, phase: str) -> int:
        """Returns the urgency of a model's phase; higher levels run first.

        2: any phase of an interactive model. 1: gate and aggregate if `time_slice` is "layer". 0: everything else.
        """
        if self.policies_M[model].interactive:
            return INTERACTIVE_LEVEL
        return int(self.time_slice == "layer" and phase != "expert")

    def preemptive(self, model: int) -> bool:
        """Returns whether a model's expert compute has preemption points, because other compute may be more urgent."""
        if self.policies_M[model].interactive:
            return False
        return self.time_slice == "layer" or self.policies_M[model].yields
