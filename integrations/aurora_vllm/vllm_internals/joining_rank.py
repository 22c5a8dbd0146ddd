"""Start of one rank while other servers already serve: it loads and warms up alone, then joins them by a change of ranks.

Until the change, its process groups are fakes: they have as many ranks as at the servers' start, but a collective returns only
this rank's input. The change creates real groups with the serving ranks (`fault_tolerance`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aurora_vllm.settings import JOINS
from aurora_vllm.vllm_internals.api_checks import check_api, find

ENGINE = "vllm.v1.engine.core:EngineCoreProc"
NO_PYNCCL = "VLLM_DISABLE_PYNCCL"  # which would wait for the others
_undo: list[Callable[[], None]] = []


def joins() -> bool:
    """Returns True if this process belongs to a rank that was started to join serving ranks."""
    return JOINS in os.environ


def start_without_others(coordinator: tuple[str, str, str]) -> None:
    """Patches a server to start its engine without a handshake with rank 0's server or other ranks' engines.

    Args:
        coordinator: three addresses of vLLM's coordinator: for servers, for the output of engines, for their input.

    Raises:
        BadInput: if this vLLM fails the API checks.
    """
    check_api("join")
    module = find("vllm.v1.engine.utils:")
    wait = module.wait_for_engine_startup

    class OwnEngines(module.CoreEngineProcManager):  # type: ignore[misc, name-defined]
        """Starts engines that know their own server alone."""

        def __init__(self, *args: Any, **named: Any) -> None:
            address = named.get("client_handshake_address") or named["handshake_address"]
            super().__init__(*args, **named | {"handshake_address": address, "client_handshake_address": None})

    def wait_for_own(socket: Any, engines: list[Any], parallel: Any, coordinated: bool, cache: Any, launch: Any) -> None:
        addresses = launch.addresses
        addresses.frontend_stats_publish_address, addresses.coordinator_output, addresses.coordinator_input = coordinator
        wait(socket, [engine for engine in engines if engine.local], parallel, coordinated, cache, launch)

    module.CoreEngineProcManager, module.wait_for_engine_startup = OwnEngines, wait_for_own
    find(ENGINE).run_engine_core = staticmethod(run_alone)


def run_alone(*args: Any, **named: Any) -> None:
    """Runs vLLM's engine, whose arguments it takes, in a data-parallel group that contains only this rank."""
    parallel, make = find("vllm.config:ParallelConfig"), find("vllm.distributed.utils:init_gloo_process_group")

    def own_group(self: Any, return_store: bool = False) -> Any:
        store = HashStore()
        group = make(store, 0, 1, self.cpu_distributed_timeout or dist.distributed_c10d.default_pg_timeout)
        return (group, store) if return_store else group

    parallel.stateless_init_dp_group = own_group
    find(f"{ENGINE}.run_engine_core")(*args, **named)


def begin_alone() -> None:
    """Replaces process groups created until `end_alone` by fakes, whose collectives return this rank's input."""
    init, new = dist.init_process_group, dist.new_group
    fakes, state = importlib.import_module("torch.testing._internal.distributed.fake_pg"), "vllm.distributed.parallel_state:"

    def init_alone(*_args: Any, rank: int, world_size: int, **_named: Any) -> None:
        init("fake", store=fakes.FakeStore(), rank=rank, world_size=world_size)

    def new_alone(ranks: Any = None, *_args: Any, **_named: Any) -> Any:
        return new(ranks, backend="fake")

    def on_one_host(group: Any, source_rank: int = 0) -> list[bool]:
        return [True] * dist.get_world_size(group)

    balancer = find("vllm.distributed.eplb.eplb_state:")
    for owner, name, function in (
        (dist, "init_process_group", init_alone), (dist, "new_group", new_alone),
        (find(state), "in_the_same_node_as", on_one_host), (balancer, "in_the_same_node_as", on_one_host),
    ):  # fmt: skip
        _undo.append(lambda owner=owner, name=name, real=getattr(owner, name): setattr(owner, name, real))  # type: ignore[misc]
        setattr(owner, name, function)
    if NO_PYNCCL not in os.environ:
        os.environ[NO_PYNCCL] = "1"
        _undo.append(lambda: os.environ.__delitem__(NO_PYNCCL))


def end_alone() -> None:
    """Undoes `begin_alone`: process groups created from now on are real."""
    while _undo:
        _undo.pop()()
