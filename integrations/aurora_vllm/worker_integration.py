"""Integration into one vLLM worker: connects plan, forward passes, all-to-alls, records and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aurora.moe.transport import Transport
from aurora.types.arrays import IntArray
from aurora_vllm.layer_alltoall import DispatchedBatch, LayerAllToAll
from aurora_vllm.metrics import Metrics
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.served_plan import Checkpoint, ServedPlan
from aurora_vllm.settings import Settings
from aurora_vllm.traffic_recorder import (
    SAMPLED,
    ChoiceCounter,
    EngineFacts,
    KeptCounter,
    LayerMarks,
    Mark,
    PhaseClock,
    Span,
    span,
)
from aurora_vllm.worker_records import WorkerRecords

if TYPE_CHECKING:
    from aurora.runtime.transports.push import OrderedPush
    from aurora.runtime.transports.symmetric_memory import MakeMemory
    from aurora_vllm.eplb_mover import EplbMover
    from aurora_vllm.layer_alltoall import Slots
    from aurora_vllm.pushed_alltoall import EngineLayers, PushedLayer, PushedRounds
    from aurora_vllm.watchdog import Watchdog


@dataclass
class LayerInFlight:
    """State of the MoE layer that is computed at present."""

    layer: int  # the MoE layer's index
    own_rows: slice  # the rows that this rank counts; other tensor-parallel ranks count the rest
    experts_from: Mark | None  # when the layer's experts began to compute; None unless it is recorded
    most_tokens: int = 0  # of any rank, known by push alone
    batch: DispatchedBatch | PushedRounds | None = None  # the dispatched batch; None before dispatch and after combine
    index: torch.Tensor | None = None  # index and weights: (P, K), experts and weights of the dispatched rows
    weights: torch.Tensor | None = None
    exchanged: bool = False  # whether aurora performed the layer's all-to-all


class WorkerIntegration:
    """Central object of the plugin in one expert-parallel rank, which vLLM's patched functions call.

    Args:
        settings, rank, ranks, checkpoint, experts: as in `ServedPlan`.
        row_share: (part, parts): if each of `parts` tensor-parallel ranks has all rows of a batch, this rank counts the rows
            of part number `part`.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        ranks: int,
        checkpoint: Checkpoint | None,
        experts: int | None,
        row_share: tuple[int, int] = (0, 1),
    ) -> None:
        self.settings, self.rank, self.ranks = settings, rank, ranks
        self.served = ServedPlan(settings, rank, ranks, checkpoint, experts)
        self.records = WorkerRecords(settings, rank)
        self.progress = RankProgress()
        self.watchdog: Watchdog | None = None
        self.status: PluginStatus | None = None
        self.metrics: Metrics | None = None
        self.live: EplbMover | None = None  # of EPLB's physical experts, if they follow the traffic
        self._row_share = row_share
        self._make_transport: Callable[[], Transport] | None = None
        self._transport: Transport | None = None
        self._alltoall_of_layer: dict[int, LayerAllToAll] = {}
        self._clock = PhaseClock(False)
        self._choices: ChoiceCounter | KeptCounter | None = None
        self.peers_memory: MakeMemory | str = "expected expert-parallel ranks"  # of push, or why there is none
        self._push: OrderedPush | None = None  # None: all-to-alls are by messages, or vLLM's own
        self._pushed_of_layer: dict[int, PushedLayer] = {}
        self._step = -1
        self._real_tokens = 0  # of this rank's batch: without padding and warm-up
        self._recorded = False  # not in warm-up and dummy batches, of which CUDA graphs are captured
        self._timed = False  # of the recorded ones, see SAMPLED
        self.passes_by = False  # whether layers of this pass need no more than `RankProgress.layer`
        self._layers: list[LayerMarks] = []  # of the pass that is recorded
        self._exchanges: deque[tuple[str, Span, IntArray]] = deque()  # phase, time, bytes of those that metrics do not show yet
        self._in_flight: LayerInFlight | None = None

    def connect(self, make_transport: Callable[[], Transport]) -> None:
        """Sets the function that creates the transport to the other ranks, which `transport` calls on first use."""
        self._make_transport, self._transport = make_transport, None

    def transport(self) -> Transport:
        """Returns the transport to the other ranks, shared by all layers. The first call, after `connect`, is collective."""
        assert self._make_transport is not None
        if self._transport is None:
            self._transport = self._make_transport()
        return self._transport

    def change_ranks(self, ranks_before: Sequence[int | None], make_transport: Callable[[], Transport]) -> None:
        """Continues with another set of ranks. Called before the next forward pass.

        Args:
            ranks_before: for each new rank, its number before the change; None: a joining rank. [0, 1, 3] if rank 2 was lost.
            make_transport: creates the transport to these ranks.
        """
        self.rank, self.ranks = ranks_before.index(self.rank), len(ranks_before)
        self.served.change_ranks(self.rank, self.ranks)
        self._make_transport = make_transport
        self._alltoall_of_layer.clear()
        if self.metrics is not None:
            self.metrics.change_ranks(self.rank)
        if self.live is not None:
            self.live.change_ranks(self.rank, self.ranks)

    def begin_serving(
        self, facts: EngineFacts, served_name: str, decoder_layers: Mapping[int, int],
        choices: ChoiceCounter | KeptCounter | None,
        engine: EngineLayers | None = None,
    ) -> None:  # fmt: skip
        """Starts push, records and metrics. Called once the model is loaded. A collective call with the order "push".

        Args:
            facts: metadata about the model and this rank.
            served_name: the name under which vLLM serves the model.
            decoder_layers: {MoE layer of this process: its decoder layer}.
            choices: counts the routers' choices; None: nothing is recorded.
            engine: with the order "push", the layers whose tokens it carries; None: there are none.
        """
        self._clock = PhaseClock(torch.cuda.is_available())
        if self.served.order == "push":
            self._begin_push(engine)
        self._choices = choices
        if self.served.order != "stock" or choices is not None:
            self.metrics = Metrics(served_name, self.rank, decoder_layers, self.served.plan, self.settings)
        if choices is not None:
            assert self.metrics is not None
            self.records.begin(facts, self.metrics.update_drift, self.metrics.add_lost_record, choices.take)
        if self.status is not None and not self.served.disabled:
            self.status.engaged(f"{served_name} on {self.ranks} expert-parallel ranks: {self.served.summary()}")

    # Forward passes

    @contextmanager
    def forward_pass(self, real_tokens: int) -> Iterator[None]:
        """Context manager around one forward pass, which records its traffic.

        Args:
            real_tokens: number of this rank's tokens; 0 in warm-up and in an idle rank's dummy batches.
        """
        outer, self._real_tokens = self._real_tokens, real_tokens
        self._step += 1
        if self._push is not None:
            self._push.check_peers(waits=False)
        with self.records.between_passes:
            try:
                self._recorded, self._layers = real_tokens > 0 and self.records.active, []
                self._timed = self._recorded and (self._step % SAMPLED == 0 or self.records.dense)
                self.passes_by = self.stock and not self._timed
                self.progress.begin_pass(real_tokens)
                yield
                self.progress.end_pass()
                if self._choices is not None and self._recorded and not self._timed:
                    self._choices.add(self._own_rows(real_tokens, False))
                    self.records.add_pass(self._step)
                elif self._choices is not None and self._recorded:
                    counts = local = self._choices.count(slice(0, real_tokens))
                    if self._row_share[1] > 1:
                        counts = self._choices.count(self._own_rows(real_tokens, False))
                    self.records.end_pass(self._step, counts, local, self._layers)
            finally:
                self.progress.idle()  # also after an error
                self._real_tokens, self._recorded, self._timed = outer, False, False
        if outer == 0 and self.metrics is not None:
            self._show_exchanges()
            self.metrics.refresh()

    def enter_layer(self, layer: int) -> Mark | None:
        """Called when the MoE layer with index `layer` begins. Returns a time mark if the pass is recorded."""
        self.progress.layer(layer)
        return self._clock.mark() if self._timed else None

    def leave_layer(self, layer: int, experts_NK: torch.Tensor, stock: bool, began: Mark | None) -> None:
        """Called when a MoE layer is computed; records its times.

        Args:
            layer: the MoE layer's index.
            experts_NK: (N, K) experts chosen by the router for the rows on this rank.
            stock: True: its all-to-all was vLLM's own, so the time of its experts is derived from these marks. False: it was
                aurora's, which records the times.
            began: the result of `enter_layer`; None: nothing is recorded.
        """
        if began is not None:
            self._layers.append(LayerMarks(layer, experts_NK.shape, stock, began, self._clock.mark()))

    @property
    def files(self) -> RankFiles | None:
        """The progress of all ranks of this host, by which errors name lost ranks; None: this rank has no watchdog."""
        return None if self.watchdog is None else self.watchdog.files

    @property
    def stock(self) -> bool:
        """True if all all-to-alls are vLLM's own."""
        return self.served.order == "stock"

    @contextmanager
    def moe_layer(self, layer: int, experts_NK: torch.Tensor, sequence_parallel: bool) -> Iterator[None]:
        """Context manager around the computation of a MoE layer.

        Args:
            layer: the MoE layer's index.
            experts_NK: (N, K) experts chosen by the router for the rows on this rank.
            sequence_parallel: True: rows are divided over tensor-parallel ranks.

        Raises:
            RuntimeError: if aurora dispatched the layer's tokens, and vLLM did not let it combine them.
        """
        began = self.enter_layer(layer)
        self._in_flight = in_flight = LayerInFlight(layer, self._own_rows(len(experts_NK), sequence_parallel), began)
        try:
            yield
            if in_flight.batch is not None:
                raise RuntimeError(f"aurora: the tokens of MoE layer {layer} were dispatched by aurora and not combined by it")
            self.leave_layer(layer, experts_NK, not in_flight.exchanged, began)
        finally:
            self._in_flight = None

    def _own_rows(self, rows: int, sequence_parallel: bool) -> slice:
        """Returns the slice of a layer's rows that are tokens of this rank: neither padding nor counted by another rank."""
        part, parts = self._row_share
        if sequence_parallel:
            return slice(0, min(rows, max(0, self._real_tokens - part * rows)))
        real = min(rows, self._real_tokens)
        share = -(-real // parts)
        return slice(min(real, part * share), min(real, (part + 1) * share))

    # All-to-alls

    def takes(self, rows_of_ranks: Callable[[], Sequence[int]], extra_row_bytes: int | None = None) -> bool:
        """Returns True if aurora, not vLLM, performs the all-to-all of the layer that is computed.

        Args:
            rows_of_ranks: returns the number of rows of each rank, which push needs.
            extra_row_bytes: size of a row if other tensors travel along, which push alone carries, if its slots are so large;
                None: none do.
        """
        in_flight = self._in_flight
        if self.stock or in_flight is None:
            return False
        if self._push is None:
            return extra_row_bytes is None
        in_flight.most_tokens = max(rows_of_ranks())
        return extra_row_bytes is None or extra_row_bytes <= self._push.row_bytes

    @property
    def dispatched(self) -> bool:
        """True between aurora's dispatch and combine."""
        return self._in_flight is not None and self._in_flight.batch is not None

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, slots_of_layer: Callable[[int], Slots],
        extra: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Sends the tokens of the layer in `moe_layer` to the ranks of their experts. A collective call.

        Args:
            hidden: (N, H), hidden states of this rank's tokens.
            weights, index: (N, K), the weights and the experts that the router chose for each token.
            slots_of_layer: called with a MoE layer's index at the layer's first dispatch; returns each rank's experts.
            extra: tensors (N, ...) that travel along by push, such as scales of quantized hidden states.

        Returns:
            (rows, weights, index): the P received rows (P, H), their weights (P, K) and experts (P, K); with `extra` also a
            list of its received rows.
        """
        in_flight = self._in_flight
        assert in_flight is not None
        layer = in_flight.layer
        if in_flight.batch is not None or in_flight.exchanged:
            raise RuntimeError(f"aurora: the tokens of MoE layer {layer} were dispatched twice")
        if self._push is not None:
            pushed = self._pushed_of_layer[layer]
            *received, rounds = pushed.dispatch(hidden, weights, index, in_flight.most_tokens, extra or ())
            in_flight.batch = rounds
            return tuple(received) if extra is None else (*received, rounds.extra)
        if layer not in self._alltoall_of_layer:
            self._alltoall_of_layer[layer] = self._layer_alltoall(layer, slots_of_layer(layer), hidden.device)
        alltoall = self._alltoall_of_layer[layer]
        rows, weights, index, batch = alltoall.dispatch(hidden, weights, index, in_flight.own_rows)
        in_flight.batch = batch
        if self.metrics is not None:
            self.metrics.add_tokens(layer, batch.tokens_G)
        in_flight.index, in_flight.weights = index, weights
        in_flight.experts_from = self._clock.mark() if self._timed else None
        return rows, weights, index

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """Sends expert outputs `answers` (P, H) of the rows from `dispatch` back. Returns their sums by token, (N, H)."""
        in_flight = self._in_flight
        assert in_flight is not None
        batch = in_flight.batch
        assert batch is not None
        if len(answers) != batch.received:
            raise RuntimeError(
                f"aurora: expected results of the {batch.received} rows dispatched in MoE layer {in_flight.layer}, "
                f"found {len(answers)}"
            )
        in_flight.batch, in_flight.exchanged = None, True
        if not isinstance(batch, DispatchedBatch):
            return self._pushed_of_layer[in_flight.layer].combine(answers, batch)
        self._record_experts(in_flight)
        summed = self._alltoall_of_layer[in_flight.layer].combine(answers, batch)
        if self._timed:
            self.records.add_timing(in_flight.layer, "aggregate", batch.aggregate, len(summed))
        return summed

    def _layer_alltoall(self, layer: int, slots_G: Slots, device: torch.device) -> LayerAllToAll:
        served, transport = self.served, self.transport()
        orders, hierarchy = served.planned_orders(layer), served.hierarchy
        network = None if served.cluster is None else served.cluster.network
        return LayerAllToAll(layer, transport, slots_G, orders, hierarchy, network, self._report_phase, self._clock, device)

    def _begin_push(self, engine: EngineLayers | None) -> None:
        """Makes the push buffers; if a rank cannot, all-to-alls are vLLM's own. A collective call."""
        memory = self.peers_memory
        lacks = "expected MoE layers whose tokens go to all expert-parallel ranks, found none"
        push: tuple[OrderedPush, dict[int, PushedLayer]] | str = memory if isinstance(memory, str) else lacks
        if engine is not None and not isinstance(memory, str):
            from aurora_vllm.pushed_alltoall import pushed_layers

            push = pushed_layers(self.transport(), memory, engine, self.served.plan)
        if isinstance(push, tuple):
            self._push, self._pushed_of_layer = push
            return
        assert self.status is not None
        self.status.report_degraded(f"order push: {push}; all-to-alls are vLLM's own")
        self.served.use_stock_alltoall()

    # Records

    def _record_experts(self, in_flight: LayerInFlight) -> None:
        """Records how long this rank's experts took for the rows that were dispatched to them."""
        if not self._timed or in_flight.index is None or in_flight.weights is None:
            return
        computed = span(in_flight.experts_from, self._clock.mark())
        chosen = in_flight.index[in_flight.weights != 0].cpu().numpy()
        self.records.add_timing(in_flight.layer, "expert", computed, len(chosen), len(np.unique(chosen)))

    def _report_phase(self, phase: str, layer: int, took: Span | None, bytes_GG: IntArray) -> None:
        """Records an all-to-all that has been started."""
        if self._timed:
            self.records.add_timing(layer, phase, took)
        if self._real_tokens and self.metrics is not None and took is not None:
            self._exchanges.append((phase, took, bytes_GG))

    def _show_exchanges(self) -> None:
        """Adds to the metrics the all-to-alls that have ended."""
        assert self.metrics is not None
        while self._exchanges and self._exchanges[0][1].reached:
            phase, took, bytes_GG = self._exchanges.popleft()
            self.metrics.add_exchange(phase, took.seconds, bytes_GG)
