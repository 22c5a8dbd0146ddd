"""Adapts the placement to traffic without EPLB: moves weights and rewrites vLLM's expert maps between forward passes."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from aurora.moe.expert_map import ExpertMap
from aurora.moe.transport import Transport
from aurora.runtime.between_steps import Moved
from aurora.runtime.live_placement import LivePlacement
from aurora.types import Cluster, ControlOptions, Exchange, Network, Op, Order, Placement, Profile
from aurora_vllm.layer_alltoall import LayerAllToAll
from aurora_vllm.plugin_status import STUCK_S, ControlMetrics, HeartbeatThread
from aurora_vllm.settings import Settings
from aurora_vllm.time_slices import TimeSlices
from aurora_vllm.traffic_recorder import ChoiceCounter, EngineFacts, KeptCounter

if TYPE_CHECKING:
    from aurora.algorithms.control.controller import Decision
    from aurora.runtime.follower import Follower
    from aurora_vllm.pushed_alltoall import PushedLayer

LOG = logging.getLogger("vllm.aurora")


class ExpertSlots:
    """Replaces the experts of one vLLM MoE layer on this rank between two forward passes.

    Weights and maps are overwritten in place, so that captured CUDA graphs read the new ones.

    Args:
        held: the expert in each of the layer's slots.
        weights: the layer's weight tensors; their first axis is the slots.
        maps: tensors (E,) that vLLM's kernels and loaders read: the slot of every expert on this rank, -1 for none.
        orders: the planned orders of dispatch and combine; None: not planned.
        alltoalls: returns the all-to-all objects of the layer that aurora has built so far.
    """

    def __init__(
        self,
        held: Sequence[int],
        weights: Sequence[torch.Tensor],
        maps: Sequence[torch.Tensor],
        orders: tuple[Order, Order] | None,
        alltoalls: "Callable[[], Sequence[LayerAllToAll | PushedLayer]]",
    ) -> None:
        self._held, self._maps, self._alltoalls = tuple(held), maps, alltoalls
        self._weights = {str(number): whole.detach() for number, whole in enumerate(weights)}
        self._ops: tuple[Op, ...] = ()
        if orders is not None:
            self._ops = Exchange("dispatch", orders[0]), Exchange("combine", orders[1])

    @property
    def ops(self) -> tuple[Op, ...]:
        """The planned dispatch and combine as operations; empty if not planned."""
        return self._ops

    @ops.setter
    def ops(self, ops: tuple[Op, ...]) -> None:
        self._ops = ops
        if ops:
            dispatch, combine = (op.order for op in ops if isinstance(op, Exchange))
            for alltoall in self._alltoalls():
                alltoall.planned_orders = dispatch, combine

    def empty_weights(self) -> dict[str, torch.Tensor]:
        """Returns uninitialised memory for the weights of one expert, by name."""
        return {name: whole.new_empty(whole.shape[1:]) for name, whole in self._weights.items()}

    def weights(self, expert: int) -> dict[str, torch.Tensor]:
        """Returns the weights of an expert that this rank holds, by name."""
        slot = self._held.index(expert)
        return {name: whole[slot] for name, whole in self._weights.items()}

    def place(
        self,
        expert_map: ExpertMap,
        wanted: Sequence[int],
        arrived: Mapping[int, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """Replaces experts in the slots; the next forward pass uses the new expert map.

        Args:
            expert_map: the new map of the layer, over all ranks.
            wanted: the new expert of each of this rank's slots, as many as before.
            arrived: new experts of this rank, each with its weights by name.
        """
        for slot, (before, expert) in enumerate(zip(self._held, wanted, strict=True)):
            if expert != before:
                for name, whole in self._weights.items():
                    whole[slot].copy_(arrived[expert][name])
        self._held = tuple(wanted)
        for slot_E in self._maps:
            slot_E.fill_(-1)
            slot_E[list(wanted)] = torch.arange(len(wanted), dtype=slot_E.dtype, device=slot_E.device)
        for alltoall in self._alltoalls():
            alltoall.place(expert_map, wanted)


class BetweenPasses:
    """BetweenSteps of vLLM: lets one rank communicate between two forward passes, and holds the token counts of the passes.

    Args:
        transport: carries tensors between the expert-parallel ranks.
        time_slices: grants the port for an all-to-all.

    Attributes:
        tokens_LE: (L, E) int64 counter, to which each pass adds this rank's tokens per expert; None: no counting.
    """

    def __init__(self, transport: Transport, time_slices: TimeSlices) -> None:
        self.transport, self._time_slices = transport, time_slices
        self.tokens_LE: torch.Tensor | None = None

    def gather_between_steps(self, row: torch.Tensor) -> torch.Tensor:
        """All-gathers `row`, which has the same shape on all ranks. Returns (R, *row.shape) on the CPU. A collective call."""
        return self.transport.gather(row)

    def exchange_between_steps(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> float:
        """Performs an all-to-all in a time slice of the port. Returns its seconds on this rank. A collective call."""
        with self._time_slices.exchanging(self.transport):
            start_s = _finished_s()  # else its time would be that of the last pass too
            self.transport.exchange(order, sends, recvs, lambda *_: None)
            self.transport.wait()
            return time.perf_counter() - start_s

    def work_between_steps(self, work: Callable[[], None]) -> float:
        """Calls `work`, which changes this rank's experts. Returns its duration in seconds, GPU included."""
        start_s = _finished_s()
        work()
        return _finished_s() - start_s


class ExpertMapMover:
    """Adapts the experts of one rank to the traffic, by moving weights and rewriting expert maps.

    Rank 0 decides in a thread beside serving; experts move between forward passes. All ranks must make the same forward passes,
    including dummy passes of idle ranks, because each pass makes collective calls.

    Args:
        settings: the controller's options, and `dry_run`.
        facts: facts about the model and this rank.
        cluster: the ranks' GPUs and ports; None: equal GPUs, and moves count as free until one has been measured.
        layers: the model's MoE layers.
        placement: the placement in force.
        choices: counts the experts that the routers chose.
        transport: carries tensors between the ranks.
        time_slices: grants the port.
        metrics: counts decisions, moves and failures.
        profile: its compute curves give the cost of load on each kind of GPU; None: the cluster's speeds give it.
    """

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        cluster: Cluster | None,
        layers: Sequence[ExpertSlots],
        placement: Placement,
        choices: ChoiceCounter | KeptCounter,
        transport: Transport,
        time_slices: TimeSlices,
        metrics: ControlMetrics,
        profile: Profile | None = None,
    ) -> None:
        self._choices, self._metrics, self._serving = choices, metrics, False
        self._passed_s = time.monotonic()  # when the last pass began
        self._context = BetweenPasses(transport, time_slices)
        network = Network.equal(facts.ranks) if cluster is None else cluster.network
        ops_L = [layer.ops for layer in layers]
        self._live = LivePlacement(
            layers, placement, ops_L, self._context, facts.dispatch_bytes, network, False, settings.period_s
        )  # fmt: skip
        self._follower: Follower | None = None
        if facts.rank == 0:
            self._follower = self._live.follower = self._made_follower(settings, facts, cluster, placement, profile)
        self.heartbeat = HeartbeatThread(metrics.beat, self._gets_on, tells=False)  # its follower does

    def _made_follower(
        self, settings: Settings, facts: EngineFacts, cluster: Cluster | None, placement: Placement, profile: Profile | None
    ) -> "Follower":
        """The follower of rank 0; other ranks never need what decides."""
        from aurora.algorithms.control.controller import Controller, compile_decisions, load_cost_G, plan_controller
        from aurora.runtime.follower import Follower

        compile_decisions()
        options = ControlOptions(settings.loss, settings.bytes_per_s, settings.period_s)
        if cluster is None:
            controller = Controller(placement, facts.expert_bytes, options)
        else:
            cost_G = load_cost_G(cluster, profile)
            controller = plan_controller(placement, cluster, facts.expert_bytes, options, cost_G=cost_G)
        return Follower(controller, self._perform, settings.dry_run, self._say)

    def begin(self) -> None:
        """Starts to adapt the placement, from the next forward pass on. Called on all ranks after warm-up."""
        self._serving = True

    def begin_pass(self) -> None:
        """Does the next part of a migration before a forward pass: sends a slice of weights, or switches layers over.

        A collective call.
        """
        if not self._serving:
            return
        now_s = time.monotonic()
        if self._follower is not None and now_s - self._passed_s > STUCK_S:
            self._follower.beat()  # moves waited for this pass
        self._passed_s = now_s
        with self.heartbeat.step(), torch.inference_mode():
            self._live.next_step(True)

    def count(self, rows: slice) -> None:
        """Counts the experts that the routers chose for `rows` of the pass that ends. Called on the stream of the pass."""
        if (tokens_LE := self._context.tokens_LE) is not None and self._serving:
            tokens_LE += self._choices.counted(rows)

    def close(self) -> None:
        """Stops to adapt the placement, and abandons unfinished moves."""
        self._live.close()
        if self._follower is not None:
            self._follower.close()

    def _gets_on(self) -> bool:
        """Returns whether the follower is well; moves wait for forward passes, of which idle engines make none."""
        idle = time.monotonic() - self._passed_s > STUCK_S
        return self._follower is None or idle or not self._follower.stuck

    def _perform(self, decision: "Decision") -> Moved:
        """Moves the experts of a decision, and counts its bytes and seconds."""
        start_s = time.monotonic()
        moved = self._live.handover.perform(decision)
        self._metrics.moved(decision.bytes, time.monotonic() - start_s)
        return moved

    def _say(self, line: str) -> None:
        assert self._follower is not None
        self._metrics.tell(line, self._follower)


def _finished_s() -> float:
    """The time, once what was launched on this thread's stream is done."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
