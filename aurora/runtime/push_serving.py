"""Ordered push of `aurora run`: allocates its buffers for a plan and its prompts, and compiles its kernels before serving."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aurora.errors import BadInput, need
from aurora.models.loading import MoeModel
from aurora.moe.expert_map import ExpertMap
from aurora.moe.permutation import MessageFormat
from aurora.moe.transport import Transport
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.transports.process_groups import new_process_group
from aurora.runtime.transports.symmetric_memory import memory_of_peers
from aurora.types import Order, Placement, Plan, RunOptions

if TYPE_CHECKING:
    from aurora.runtime.transports.push import OrderedPush

ROUND_TOKENS = 1024  # of a rank that travel at once: buffers, and the rows of experts, are made for so many
INTERPRETED = 200  # looks at a flag in the time of one, in Triton's interpreter


def make_push(
    plan: Plan, model: MoeModel, tokens: int, options: RunOptions, rank_info: RankInfo, transport: Transport, device: str
) -> "OrderedPush":
    """Returns a run's OrderedPush with its buffers, on GPUs or, for Triton's interpreter, in files. A collective call.

    Args:
        plan, model, options: plan, model and options of the run.
        tokens: largest number of tokens of a rank in a batch.
        rank_info, device: this rank and its device.
        transport: carries tensors between the ranks during the set-up.

    Raises:
        MissingDependency: if Triton is not installed.
        BadInput: if the ranks' GPUs cannot write into each other's memory.
    """
    on_gpu = device != "cpu"
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    need("triton")
    from aurora.runtime.transports.push import LANES, OrderedPush

    group = new_process_group("nccl", options.timeout_s) if on_gpu else None
    make = memory_of_peers(transport.gather, rank_info.rank, rank_info.ranks, device, group)
    if isinstance(make, str):
        raise BadInput(f"`transport` push: {make}")
    orders = [*plan.models[0].dispatch_L, *plan.models[0].combine_L]
    stages = 1 + max(int(np.bincount(order.pairs_X2[:, 0]).max(initial=0)) for order in orders)
    experts = max(len(slots) for slots_G in plan.models[0].placement.slots_LG for slots in slots_G)
    lanes, timeout_s = (LANES, options.timeout_s) if on_gpu else (1, options.timeout_s / INTERPRETED)
    packing = MessageFormat(model.hidden, model.top_k, model.hidden_dtype)
    sizes = packing.row_bytes, ROUND_TOKENS, len(model.layers), lanes, stages, timeout_s, experts
    return OrderedPush(make, rank_info.ranks, tokens, *sizes)


def push_once(push: "OrderedPush", placement: Placement, model: MoeModel, experts: Any) -> None:
    """Sends a token of zeros through the first layer, to compile and load the kernels before requests arrive.

    A collective call.

    Raises:
        RankFailed: if a peer does not answer.
    """
    from aurora.runtime.pushed_batch import PushedBatch

    like, most = model.layers[0].router_weight, push.batch_tokens
    push.set_order(0, Order.all_at_once(push.ranks))
    push.batch_tokens = 1
    index = torch.arange(model.top_k, device=like.device)[None]
    hidden = like.new_zeros(1, model.hidden, dtype=model.hidden_dtype)
    expert_map = ExpertMap(placement.slots_LG[0], push.rank).to(like.device)
    with torch.inference_mode():
        batch = PushedBatch(push, 0, expert_map, (hidden, index, torch.ones_like(index, dtype=hidden.dtype)))
        batch.compute(experts)
        batch.combined()
    push.check_peers()
    push.batch_tokens = most
