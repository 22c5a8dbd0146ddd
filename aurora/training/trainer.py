"""Trainer: one rank's part of each training step. All ranks prepare a step collectively; each commits it locally."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.errors import BadInput
from aurora.models.loading import MoeModel
from aurora.models.own_weights import load_without_experts
from aurora.moe.expert_map import ExpertMap
from aurora.moe.transport import Transport
from aurora.training.data import GlobalBatches, samples_digest
from aurora.training.loss import PartLoss, router_loss_weight, set_exact_kernels
from aurora.training.migration import (
    end_window,
    held_by_all,
    move_state,
    next_placement,
    rebalancer,
    tell_placement,
)
from aurora.training.state import TrainState, optimizer_dtype
from aurora.types import Cluster, Gpu, Order, Placement, TrainOptions
from aurora.types.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class PreparedStep:
    """Training step whose gradients are summed over all ranks, so that a rank can commit it without communication.

    Attributes:
        step: number of the step, from 0.
        loss: mean loss of the global batch's predicted tokens, without the load-balancing loss.
        router_loss: the load-balancing loss before weighting; zero if its weight is zero.
        gradient_norm: Euclidean norm of the gradient of all weights; each expert counts once, whatever its replicas.
        scale: factor for the gradient, at most 1, by which its norm is clipped to the limit.
    """

    step: int
    loss: float
    router_loss: float
    gradient_norm: float
    scale: float


class Trainer:
    """Trains a model on one of several ranks. Dropout is off, so that a token's result does not depend on its rank.

    Between two steps, experts may move, and a trainer may continue with other ranks: call `join`, then `place`.

    Args:
        model: a model of `load_without_experts`, in `optimizer_dtype`.
        batches: the global batch of each step.
        options: options of the training.
        clock: returns the present time in seconds.

    Attributes:
        model: the model; the experts of its MoE layers are spread over all ranks.
        state: the weights that this rank holds, with their AdamW state.
        placement: the experts of each rank; set by `place`.
    """

    placement: Placement

    def __init__(
        self, model: MoeModel, batches: GlobalBatches, options: TrainOptions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model, self._batches, self._options, self._clock = model, batches, options, clock
        self._move_Bps: float | None = None  # of the last moves
        set_exact_kernels(model, options)
        router_loss_weight(model, options.router_loss)  # refuses what the model cannot give
        self._device = next(model.model.parameters()).device
        self.state = TrainState(model, options)

    def join(self, transport: Transport, cluster: Cluster) -> None:
        """Sets the ranks with which this rank trains from the next step on; `place` must follow.

        Args:
            transport: carries tokens, gradients and experts between these ranks.
            cluster: the ranks' GPUs; the GPUs of a node fail together.
        """
        self._transport, self._cluster = transport, cluster
        everyone_RR = 1 - np.eye(transport.ranks, dtype=np.int64)
        self._gradient_order = self._order(everyone_RR)

    def place(self, placement: Placement, stale: Sequence[int] = ()) -> int:
        """Moves experts between ranks according to `placement`, and uses it from the next step on. A collective call.

        Args:
            placement: the experts of each rank.
            stale: the ranks that lack the parameters outside experts, which they receive too.

        Returns:
            Number of experts that moved between ranks.
        """
        moved, _ = self._move(placement, stale)
        min_replicas = self._options.min_replicas_among(self._transport.ranks)
        self._rebalancer = rebalancer(placement, self._cluster, self.state.expert_bytes, min_replicas, self._move_Bps)
        self._told_LE, self._step_s = np.zeros_like(self._tokens_LE()), list[float]()
        return moved

    def _move(self, placement: Placement, stale: Sequence[int] = ()) -> tuple[int, float]:
        """The same. Returns also how many seconds it took."""
        began_s = self._clock()
        held_R = held_by_all(self.state, self._transport)
        moved, moved_bytes = move_state(self.state, held_R, placement, self._cluster, self._transport, stale)
        self.placement = placement
        rank, ranks = self._transport.rank, self._transport.ranks
        for number, layer in enumerate(self.state.layers):
            slots_G, split_EG = placement.slots_LG[number], placement.split_EG(number)
            expert_map = ExpertMap(slots_G, rank, split_EG, local_first=True).to(self._device)
            tokens_G = np.ceil((layer.tokens_E + 1) @ split_EG).astype(np.int64)
            layer.serve(slots_G, expert_map, self._order(np.tile(tokens_G, (ranks, 1))), self._transport)
        seconds = self._clock() - began_s
        if moved_bytes and seconds:
            self._move_Bps = moved_bytes / seconds
        return moved, seconds

    def planned(self) -> Placement:
        """Returns a placement, computed on rank 0, for the loads since the last expert move, to which few experts move.

        A collective call.
        """
        held_R, load_LE, transport = held_by_all(self.state, self._transport), self._load_LE(), self._transport
        slots, min_replicas = self.slots_among(transport.ranks)
        placement = next_placement(held_R, load_LE, self._cluster, slots, min_replicas) if transport.rank == 0 else None
        return tell_placement(placement, slots, transport, len(load_LE))

    def slots_among(self, ranks: int) -> tuple[int, int]:
        """Returns (slots of each rank in a layer, least replicas of each expert) for training on `ranks` ranks."""
        min_replicas = self._options.min_replicas_among(ranks)
        return max(self._options.slots_per_gpu or 0, -(-self.state.layers[0].count * min_replicas // ranks)), min_replicas

    def rebalance(self) -> int:
        """Ends a window of steps, and moves experts if that pays off, as rank 0 decides. A collective call.

        Returns:
            Number of experts that moved between ranks.
        """
        tokens_LE, transport, target = self._tokens_LE(), self._transport, None
        if transport.rank == 0:
            target = end_window(self._rebalancer, tokens_LE - self._told_LE, self._step_s) or self.placement
        slots = self.placement.held_LGP().shape[-1]
        placement = tell_placement(target, slots, transport, len(tokens_LE))
        self._told_LE, self._step_s = tokens_LE, []
        if placement.slots_LG == self.placement.slots_LG:
            return 0
        moved, seconds = self._move(placement)
        if transport.rank == 0:
            self._rebalancer.moved(seconds)
        for layer in self.state.layers:
            layer.tokens_E[:] = 0
        self._told_LE = np.zeros_like(tokens_LE)
        return moved

    def _tokens_LE(self) -> IntArray:
        """(L, E): the tokens of each expert since experts moved last."""
        return np.array([layer.tokens_E for layer in self.state.layers])

    def _load_LE(self) -> FloatArray:
        """(L, E): the same; equal before any."""
        load_LE = self._tokens_LE().astype(np.float64)
        return load_LE if load_LE.any() else load_LE + 1

    def prepare(self) -> PreparedStep:
        """Computes the gradients of the next step, summed over all ranks. A collective call: all ranks make it.

        Raises:
            BadInput: on all ranks, if the loss or a gradient is not finite.
            RankFailed: if a rank is lost.
        """
        step, transport, began_s = self.state.steps, self._transport, self._clock()
        tokens_BT = torch.from_numpy(self._batches.of(step, transport.rank, transport.ranks)).to(self._device)
        forward = PartLoss(self.model, tokens_BT, self._options, self._batches)
        chosen_E = None if forward.chosen_E is None else transport.gather(forward.chosen_E).sum(dim=0)
        loss, router_loss = forward.backward(chosen_E)
        squares = self.state.sum_gradients(self.placement, self._gradient_order, transport)
        parts = torch.tensor([loss, router_loss, squares], dtype=torch.float64)
        whole_loss, whole_router_loss, whole_squares = transport.gather(parts).sum(dim=0).tolist()
        self._step_s.append(self._clock() - began_s)
        return self._prepared(whole_loss, whole_router_loss, whole_squares)

    def take_gradient(self, gradient_X: torch.Tensor, loss: float, router_loss: float) -> PreparedStep:
        """Prepares the next step, on the only rank of a run, from a gradient that other processes computed.

        Args:
            gradient_X: (X,) the gradient of all weights, in the sequence of `TrainState.weights_X`.
            loss, router_loss: as in PreparedStep.

        Raises:
            BadInput: as `prepare`.
        """
        self.state.take_gradient(gradient_X)
        return self._prepared(loss, router_loss, float(gradient_X.double().square().sum()))

    def _prepared(self, loss: float, router_loss: float, squares: float) -> PreparedStep:
        """The next step, by the sum of the gradient's squares. Raises BadInput unless it is finite."""
        step, norm = self.state.steps, math.sqrt(squares)
        if not math.isfinite(loss + norm):
            numbers = f"{loss:g} and {norm:g}"
            raise BadInput(f"step {step}: expected a finite loss and gradient, found {numbers}; try a smaller `learning_rate`")
        limit = self._options.max_norm
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        return PreparedStep(step, loss, router_loss, norm, scale)

    def commit(self, prepared: PreparedStep) -> None:
        """Applies the step from the last `prepare`, without communication."""
        assert prepared.step == self.state.steps, "a step is committed once"
        self.state.step(prepared.scale)

    def discard(self) -> None:
        """Drops a prepared or failed step, so that it can be prepared again, possibly with other ranks."""
        self.state.forget_gradients()

    def _order(self, bytes_RR: IntArray) -> Order:
        np.fill_diagonal(bytes_RR, 0)
        return ORDER["openshop"](bytes_RR, self._cluster.network, rng=np.random.default_rng(0))


def load_trainer(path: str, device: str, samples_NT: IntArray, options: TrainOptions) -> tuple[Trainer, dict[str, Any]]:
    """Loads a model. Returns (its Trainer, values that identify this training in checkpoints).

    Args:
        path: the model's folder.
        device: device on which to train.
        samples_NT: (N, T) int64, the token ids of all samples.
        options: options of the training.
    """
    model = load_without_experts(path, device, optimizer_dtype(options))
    about = {
        "model": model.fingerprint(), "batch": options.batch, "length": options.length, "seed": options.seed,
        "text": samples_digest(samples_NT), "dtype": options.dtype,
    }  # fmt: skip
    return Trainer(model, GlobalBatches(samples_NT, options.batch, options.seed), options), about


def alike_ranks(node_R: Sequence[int]) -> Cluster:
    """Returns a cluster of equal GPUs, one per rank; node_R is the node of each. GPUs of a node fail together."""
    gpus = (Gpu(f"rank-{rank}", "rank", node, 1e9, 1e9, 1) for rank, node in enumerate(node_R))
    return Cluster("ranks", tuple(gpus))
