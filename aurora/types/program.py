"""Program: the operations of every rank, in order. The simulator prices it and the runtime performs it.

A Program holds orders and shares, not sizes.
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
    """Local work. One model at a time computes on a rank.

    Args:
        phase: "gate", "expert" or "aggregate".
    """

    phase: str


@dataclass(frozen=True)
class Barrier:
    """All ranks of the model wait for each other.

    Args:
        phase: "counts", the exchange of token counts, without which no rank knows the sizes of its all-to-all.
    """

    phase: str


@dataclass(frozen=True)
class Exchange:
    """An all-to-all, in the model's time slice of every rank's port.

    Time slices go round: the first model's first, the second model's first, and so on, then the first model's second.

    Args:
        phase: "dispatch" or "combine".
        order: the order of its transfers.
        hold_port: the time slice goes on through the model's next exchange, instead of ending with this one.
        hierarchy: the servers that the all-to-all goes over in two hops; its steps are exchanges in this order, one after the
            other in one time slice. None: every row goes from its rank to its destination.
    """

    phase: str
    order: Order
    hold_port: bool = False
    hierarchy: Hierarchy | None = None


Op = Compute | Barrier | Exchange


def hierarchy_of(ops: Sequence[Op]) -> Hierarchy | None:
    """Returns the servers that a layer's all-to-alls go over; None if they are flat."""
    return next((op.hierarchy for op in ops if isinstance(op, Exchange)), None)


@dataclass(frozen=True)
class SlicePolicy:
    """Rules by which a model shares its ranks' ports and GPUs with other models.

    Args:
        weight: time slices of a port that the model has for each one of a model of weight 1.
        interactive: its compute goes before that of models that are not, which yield to it at preemption points.
        slice_s: seconds of a port that one time slice takes at most: a flat exchange that takes longer is cut into several.
            Infinity: every exchange is one slice.
    """

    weight: int = 1
    interactive: bool = False
    slice_s: float = float("inf")

    @property
    def yields(self) -> bool:
        """True if the model's work comes after that of interactive models: this is a batch model beside one."""
        return self.slice_s < float("inf")


def has_next_slice(next_M: Sequence[float], model: int) -> bool:
    """Returns whether the next time slice of a port belongs to `model`.

    It belongs to the model whose next slice has the smallest virtual time; of equal ones to the first model. A model's i-th
    slice since it joined at the time `base` is at base + i / weight. With weights of 1 slices go round the models. This is the
    one rule of the runtime's and the simulator's port arbiters.

    Args:
        next_M: (M,) virtual time of each model's next slice; infinity for a model that is not in the sequence.
        model: an index into it.

    Example:
        >>> [has_next_slice([1, 0], model) for model in (0, 1)]
        [False, True]
    """
    return all((next_M[model], model) <= (other_next, other) for other, other_next in enumerate(next_M))


@dataclass(frozen=True, eq=False, repr=False)
class Program(Value):
    """The operations of every rank; models run side by side.

    Args:
        ranks: number of ranks.
        names_M: the models' names.
        placements_M: which rank holds which experts of each model.
        ops_ML: ops_ML[m][l] are the operations of model m in MoE layer l, in every step.
        deduplicated_M: per model, whether a token is sent once to a rank that holds several of its experts, instead of once
            per expert.
        policies_M: how each model shares ports and GPUs; empty: all alike.
        plan_model_M: which of the plan's models each is, or is a micro-batch of; empty: one of each.
        preemption_s: seconds of expert compute between two preemption points.
        gathered: whether an allgather and a reduce-scatter stand for all-to-alls, in a simulation: every rank gets all tokens,
            and sends every rank its part of the sums of that rank's tokens.
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
        """Returns the program of some MoE layers of each model, given by their indices."""
        placements = zip(self.placements_M, some_M, strict=True)
        return replace(
            self,
            placements_M=tuple(Placement.stack([each.layer(layer) for layer in some.tolist()]) for each, some in placements),
            ops_ML=tuple(
                tuple(ops_L[layer] for layer in some.tolist()) for ops_L, some in zip(self.ops_ML, some_M, strict=True)
            ),
        )

    @cached_property
    def time_slice(self) -> str:
        """Length of time that a model holds a port, one of TIME_SLICES.

        With "layer" a slice goes from a layer's combine through the next layer's dispatch, so that one model's experts compute
        while the other combines, gates and dispatches. Gates and aggregations are then high-priority work: they run before
        expert compute that waits, and at its preemption points. With "step" a model takes the port before it computes, and
        holds it through the forward pass.
        """
        exchanges = (op for layers in self.ops_ML for ops in layers for op in ops if isinstance(op, Exchange))
        held = {op.phase for op in exchanges if op.hold_port}
        return "step" if "dispatch" in held else "layer" if held else "exchange"

    def compute_level(self, model: int, phase: str) -> int:
        """Returns how urgent a model's phase is: 2 of an interactive model, 1 by layer but for experts, else 0."""
        if self.policies_M[model].interactive:
            return INTERACTIVE_LEVEL
        return int(self.time_slice == "layer" and phase != "expert")

    def preemptive(self, model: int) -> bool:
        """Returns whether a model's expert compute has preemption points, because some compute is more urgent."""
        if self.policies_M[model].interactive:
            return False
        return self.time_slice == "layer" or self.policies_M[model].yields
