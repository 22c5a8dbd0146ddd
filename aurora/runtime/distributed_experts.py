"""Expert-parallel replacement of a MoE layer's experts module: performs the layer's operations over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from aurora.models.loading import hold_experts
from aurora.models.own_weights import release_freed_memory
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layer import all_loads, combine, compute, dispatch
from aurora.moe.layouts import DispatchLayout, RowPerExpert, RowPerRank, apply_experts
from aurora.moe.overlap import overlapped
from aurora.runtime.layer_context import LayerContext, LayerPort
from aurora.types import Exchange, Op, Placement
from aurora.types.program import groups_of, hierarchy_of

MIN_CHUNK_BYTES = 32 * 1024  # of rows, between two preemption points; at least one row
LEAST_CHUNK_BYTES = 2 * 1024  # the same of a batch model beside an interactive one


class DistributedExperts(nn.Module):
    """Expert-parallel module that replaces the experts module of a MoE layer, and gives the same output for this rank's tokens.

    Its LayerContext records the layer's phases, and shares GPU and port with other models. Call `set_placement` before the
    first forward pass.

    Attributes:
        local: the module that computes this rank's experts: at first the replaced module. It starts with all experts, or, if it
            has an attribute `reader` (an ExpertReader, which reads single experts from the model's files), with none.
        held: the expert in each slot of `local`.
        ops: the layer's operations.
    """

    ops: tuple[Op, ...]

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._reader: Any = getattr(experts, "reader", None)
        self.num_experts = int(experts.num_experts if self._reader is None else self._reader.count)
        self.local = experts
        self.held = tuple(range(int(experts.num_experts)))
        self._chunk_bytes = self._least_bytes = MIN_CHUNK_BYTES
        self._timed_chunk: tuple[int, Any, Any] | None = None  # bytes, start and end mark of a chunk whose time is not known

    def set_placement(
        self,
        placement: Placement,
        ops: tuple[Op, ...],
        layer: int,
        context: LayerContext,
        deduplicate: bool = False,
    ) -> None:
        """Sets the operations `ops` of this layer, and loads the experts that `placement` gives this rank.

        Args:
            context: the LayerContext that all of the model's layers on this rank share.
            deduplicate: send a token only once to a rank that holds several of its experts; hierarchical all-to-alls always do.
        """
        self.ops, self._layer, self._context = ops, layer, context
        self._chunk_bytes = self._least_bytes = LEAST_CHUNK_BYTES if context.yields else MIN_CHUNK_BYTES
        hierarchy, rank, slots_G = hierarchy_of(ops), context.transport.rank, placement.slots_LG[layer]
        self._deduplicate = deduplicate
        split_EG = None if placement.split_LG is None else placement.split_EG(layer)
        expert_map = ExpertMap(slots_G, rank, split_EG, hierarchy=hierarchy)
        self.expert_map = expert_map.to(next(self.local.parameters()).device)
        self.hold(slots_G[rank])
        if context.push is not None:
            dispatch, combine = (op.order for op in ops if isinstance(op, Exchange))
            context.push.set_order(layer, dispatch, back=combine)

    def hold(self, wanted: Sequence[int]) -> None:
        """Replaces this rank's experts by `wanted`, the expert of each slot; reads missing ones from the model's files."""
        if tuple(wanted) != self.held:
            lacking = sorted(set(wanted) - set(self.held))
            weights = self._reader.read(lacking) if lacking else {}
            hold_experts(self.local, [weights.get(expert) or self.held.index(expert) for expert in wanted])
            self.held = tuple(wanted)
            if lacking:
                del weights
                release_freed_memory()

    def share(self, other: "DistributedExperts") -> None:
        """Shares the expert weights of `other`, the same layer of another micro-batch, to hold them in memory only once."""
        self.local, self.held = other.local, other.held

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns each token's expert outputs, weighted and summed; shaped like `hidden_states`, (N, H) or (batch, tokens, H).

        A collective call: all ranks make it.
        """
        context, layer = self._context, self._layer
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        context.recorder.route(top_k_index, context.mask)
        outs = []
        for part in [slice(None)] if context.push is None else context.push.parts(len(rows)):
            mask = None if context.mask is None else context.mask[part]
            tokens = rows[part], top_k_index[part], top_k_weights[part], mask
            outs.append(self._by_messages(*tokens) if context.push is None else self._by_push(*tokens))
            context.start_compute()
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        context.layers_done = layer + 1
        return out.view(hidden_states.shape)

    def _by_messages(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns (N, H), the outputs for this rank's tokens, which its transport carries."""
        context, layer, port = self._context, self._layer, LayerPort(self._context, self._layer, self.ops)
        loads_RE = all_loads(self.expert_map, index, mask, port.gather)
        if loads_RE is not None:
            context.start_compute()
        if (groups := groups_of(self.ops)) > 1:
            by_expert = RowPerExpert(self.expert_map, hidden, index, weights, mask, loads_RE)
            returned = overlapped(by_expert, self.expert_map, port, groups, self._compute_group, context.port)
            with context.computing("aggregate", layer):
                return by_expert.aggregate(returned)
        layout = self._layout_kind(index.shape[1])(self.expert_map, hidden, index, weights, mask, loads_RE)
        layout, arrived = dispatch(layout, port)
        with context.computing("expert", layer):
            answers = compute(layout, arrived, self._compute_in_chunks if context.preemptible else self.local)
        returned = combine(layout, answers, port)
        with context.computing("aggregate", layer):
            return layout.aggregate(returned)

    def _compute_group(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns (X, H), the outputs of a group of this rank's experts for rows (X, H), each of the expert in slots (X,)."""
        with self._context.computing("expert", self._layer):
            return apply_experts(self.local, rows, slots)

    def _by_push(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns (N, H), the outputs for this rank's tokens, which kernels push without the host."""
        from aurora.runtime.pushed_batch import PushedBatch  # Triton's interpreter is chosen before its import

        context, layer = self._context, self._layer
        assert context.push is not None
        context.stop_compute("gate", layer)
        batch = PushedBatch(context.push, layer, self.expert_map, (hidden, index, weights), mask)
        with context.computing("expert", layer):
            batch.compute(self._compute_in_chunks if context.preemptible else self.local)
        return batch.combined()

    def _layout_kind(self, top_k: int) -> type[DispatchLayout]:
        """Returns the class of layouts for tokens that choose `top_k` experts each."""
        if hierarchy_of(self.ops) is not None:
            from aurora.moe.server_layout import RowPerServer  # which flat all-to-alls need not

            return RowPerServer
        return RowPerRank if self._deduplicate and top_k > 1 else RowPerExpert

    def _compute_in_chunks(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes `local` with preemption points: a chunk takes about `preemption_s`, judged by an earlier one.

        Chunks are of rows sorted by expert, as each chunk reads the weights of all its experts. `index` is (X, 1).
        """
        recorder, outputs, first, by_expert = self._context.recorder, [], 0, None
        row_bytes = rows.shape[1] * rows.element_size()
        self._adapt_chunks()
        if rows.nbytes > self._chunk_bytes:
            by_expert = index[:, 0].argsort(stable=True)
            rows, index, weights = rows[by_expert], index[by_expert], weights[by_expert]
        while first < len(rows):
            if first:
                self._context.yield_to_priority("expert", self._layer)
                self._adapt_chunks()
            most = max(self._chunk_bytes // row_bytes, 1)
            chunk, start = slice(first, min(first + most, len(rows))), recorder.mark()
            outputs.append(self.local(rows[chunk], index[chunk], weights[chunk]))
            if self._timed_chunk is None:
                self._timed_chunk = (chunk.stop - chunk.start) * row_bytes, start, recorder.mark()
            first = chunk.stop
        answers = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return answers if by_expert is None else answers.new_empty(answers.shape).index_copy_(0, by_expert, answers)

    def _adapt_chunks(self) -> None:
        """Sets the size of chunks by the timed one, once it has been executed; a GPU executes chunks after they are queued."""
        if self._timed_chunk is not None:
            size, start, end = self._timed_chunk
            took_s = self._context.recorder.elapsed_s(start, end)
            if took_s is not None:
                self._chunk_bytes = max(self._least_bytes, int(size * self._context.preemption_s / max(took_s, 1e-9)))
                self._timed_chunk = None

    def idle(self, top_k: int, like: torch.Tensor) -> None:
        """Takes part in the layer's exchanges without tokens.

        Args:
            top_k: experts that a token chooses.
            like: (1, H) a hidden state, for dtype, device and width.
        """
        index = torch.empty(0, top_k, dtype=torch.long, device=like.device)
        self(like[:0], index, like.new_empty(0, top_k))
