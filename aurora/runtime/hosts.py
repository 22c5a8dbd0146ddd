"""Runs over several hosts: what the leader tells hosts that join, what has to be the same on all, and a joining host's part."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aurora.errors import BadInput
from aurora.io.plans import plan_digest
from aurora.models.hub import model_digest
from aurora.planner.migration.recovery import ExpertTransfer
from aurora.runtime.distributed.epoch_gpu import transport_of_host
from aurora.runtime.distributed.host_agent import HostAgent
from aurora.runtime.distributed.host_agreement import difference, this_version
from aurora.runtime.distributed.host_connection import MESSAGES
from aurora.runtime.distributed.led_ranks import Lead
from aurora.runtime.distributed.secret import secret_of_hosts
from aurora.runtime.distributed.wire_format import WireFormat
from aurora.runtime.elastic_rank import (
    BeganServing,
    Decided,
    EpochWork,
    FetchedWeights,
    HeldExperts,
    NewTokens,
    serve_elastic_rank,
)
from aurora.runtime.order_calibration import OrderCalibration
from aurora.runtime.order_choice import OrdersUsed
from aurora.runtime.result import Answers, RankResult, Token
from aurora.runtime.token_times import TokenTimes
from aurora.types import (
    Cluster,
    ControlOptions,
    ControlReport,
    Gpu,
    Hierarchy,
    Order,
    Placement,
    Plan,
    Program,
    RunOptions,
    SlicePolicy,
    SubChannels,
)
from aurora.types.addresses import parse_address
from aurora.types.control import ControlWindow, PlacementChange
from aurora.types.program import Barrier, Compute, Exchange

WIRE = WireFormat(
    *MESSAGES, Answers, Barrier, BeganServing, Cluster, Compute, ControlOptions, ControlReport, ControlWindow, Decided,
    EpochWork, Exchange, ExpertTransfer, FetchedWeights, Gpu, HeldExperts, Hierarchy, NewTokens, Order, OrderCalibration,
    OrdersUsed, Placement, PlacementChange, Program, RankResult, RunOptions, SlicePolicy,
    SubChannels, Token, TokenTimes,
)  # fmt: skip


def lead_of(
    plan: Plan, models: Sequence[str | Path], prompts: Sequence[Sequence[list[int]]], options: RunOptions, began_s: float
) -> Lead | None:
    """Returns what the leader of a run over several hosts has to know; None: the run is on this host alone.

    Args:
        plan, models, prompts, options: as in `aurora.run`.
        began_s: when the run began, by time.perf_counter.

    Raises:
        BadInput: if the secret is missing, the address is none, or no GPU of the plan is on the node.
    """
    if options.lead is None:
        return None
    address, secret, about = parse_address("lead", options.lead), secret_of_hosts("lead"), about_run(plan, models)
    nodes = tuple(gpu.node for gpu in plan.cluster.gpus)
    if options.node is not None:
        _check_node(options.node, nodes)

    def job() -> tuple[Any, ...]:
        return [list(requests) for requests in prompts], options, time.perf_counter() - began_s

    return Lead(address, secret, nodes, options.node, WIRE, lambda found: difference(about, found), job)


def join_run(plan: Plan, models: Sequence[str | Path], options: RunOptions) -> None:
    """Serves on the ranks of `options.node` in the run that is led at `options.join`, until that is complete.

    Prompts and all other options are the leader's. Times of traces agree with the leader's to the time of one message.

    Args:
        plan, models: as in `aurora.run`; the same as the leader's.
        options: of which only `join`, `node` and `timeout_s` are used, the last one as the time without a leader.

    Raises:
        BadInput: if the leader refuses this host, or it has no secret.
        RankFailed: if the leader ends the run before it is complete, or is gone for `timeout_s`.
    """
    assert options.join is not None
    assert options.node is not None
    address, secret = parse_address("join", options.join), secret_of_hosts("join")
    _check_node(options.node, [gpu.node for gpu in plan.cluster.gpus])
    paths = [str(model) for model in models]

    def args(job: tuple[Any, ...]) -> tuple[Any, ...]:
        prompts, leaders, since_s = job
        transport_of_host(leaders.transport, sum(gpu.node == options.node for gpu in plan.cluster.gpus))
        return plan, paths, prompts, leaders, time.perf_counter() - since_s

    HostAgent(
        address, options.node, secret, serve_elastic_rank, args, about_run(plan, models), WIRE, timeout_s=options.timeout_s
    ).run()  # fmt: skip


def about_run(plan: Plan, models: Sequence[str | Path]) -> dict[str, str]:
    """Returns what has to be the same on all hosts, by what it is in words. All of the models' files are read."""
    files = {f"the files of {planned.model}": model_digest(path) for planned, path in zip(plan.models, models, strict=True)}
    return this_version() | {what: digest[:16] for what, digest in {"the plan": plan_digest(plan), **files}.items()}


def _check_node(node: int, nodes: Sequence[int]) -> None:
    if node not in nodes:
        raise BadInput(f"`node`: expected one of the plan's, {', '.join(map(str, sorted(set(nodes))))}, found {node}")
