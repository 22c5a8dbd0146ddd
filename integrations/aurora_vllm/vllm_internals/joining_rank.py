"""Start of one rank while other servers already serve: it loads and warms up alone, then joins them by a change of ranks.

Until the change, its process groups are fakes: they have as many ranks as at the servers' start, but a collective returns only
this rank's input. The change creates real groups with the serving ranks (`fault_tolerance`).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch.distributed as dist

from aurora_vllm.settings import JOINS
from aurora_vllm.vllm_internals.api_checks import check_api
from aurora_vllm.vllm_internals.replaced import replace, restore

NO_PYNCCL = "VLLM_DISABLE_PYNCCL"  # which would wait for the others
STARTUP = "vllm.v1.engine.utils:wait_for_engine_startup"
NEW_GROUP = "torch.distributed:new_group"
SAME_NODE = "vllm.distributed.parallel_state:in_the_same_node_as"
_ours = dict[str, str]()  # variables that `begin_alone` has set


def joins() -> bool:
    """Returns True if this process belongs to a rank that was started to join serving ranks."""
    return JOINS in os.environ


def start_without_others(coordinator: tuple[str, str, str]) -> None:
    """Patches a server to start without a handshake with other ranks' engines; its engine has none with rank 0's server.

    Args:
        coordinator: three addresses of vLLM's coordinator: for servers, for the output of engines, for their input.

    Raises:
        BadInput: if this vLLM fails the API checks.
    """
    check_api("join")

    def own(wait: Any) -> Any:
        def wait_for_own(
            socket: Any, engines: list[Any], parallel: Any, coordinated: bool, cache: Any, launch: Any
        ) -> None:  # fmt: skip
            addresses = launch.addresses
            addresses.frontend_stats_publish_address, addresses.coordinator_output, addresses.coordinator_input = coordinator
            wait(socket, [engine for engine in engines if engine.local], parallel, coordinated, cache, launch)

        return wait_for_own

    replace(STARTUP, own)


def begin_alone(rank: int, ranks: int) -> None:
    """Makes process groups created until `end_alone` fakes, whose collectives return this rank's input.

    Args:
        rank: this process's global rank.
        ranks: number of the servers' ranks.
    """
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fakes.FakeStore(), rank=rank, world_size=ranks)  # vLLM takes the one that there is

    def fake(new: Any) -> Any:
        return lambda ranks=None, *_args, **_named: new(ranks, backend="fake")

    replace(NEW_GROUP, fake)
    replace(SAME_NODE, lambda _: lambda group, source_rank=0: [True] * dist.get_world_size(group))
    if NO_PYNCCL not in os.environ:
        _ours[NO_PYNCCL] = os.environ[NO_PYNCCL] = "1"


def end_alone() -> None:
    """Undoes `begin_alone`: process groups created from now on are real."""
    restore(NEW_GROUP)
    restore(SAME_NODE)
    for name in _ours:
        del os.environ[name]
    _ours.clear()
