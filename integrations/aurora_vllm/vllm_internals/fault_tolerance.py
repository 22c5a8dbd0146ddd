"""Continues serving when a data-parallel rank is lost or joins: instruction `change_ranks` of vLLM's fault-tolerance framework.

Interface between the parent, which starts the servers and alone decides who is lost, and the survivors:

1. The parent starts the **keeper**, `python -m aurora_vllm.vllm_internals.fault_tolerance DESCRIPTOR FOLDER`, in vLLM's
   environment. It holds the TCP store at which survivors meet, on a listening socket that it inherits from the parent, and
   vLLM's data-parallel coordinator, whose sockets are in FOLDER, so that no rank is special. It serves once the first line
   comes on its stdin ("0"), and prints one then; servers that come before wait. It ends when its stdin is closed, or on
   SIGTERM. A line with a change's number ("1"), before the change is posted, frees survivors that wait for a lost rank. If it
   ends, the parent starts another one with the same socket and folder, to which all reconnect by themselves, and then a
   change, by which all run at the same time again.
2. For each rank r of N the parent starts one server, in a process group of its own, so that `os.killpg(pid, SIGKILL)` cuts a
   rank off whole (server, engine, workers):

       vllm serve MODEL --data-parallel-size N --data-parallel-rank r --data-parallel-address 127.0.0.1
           --data-parallel-rpc-port PORT (equal for all) --port PORT_r --api-server-count 1
           --enable-expert-parallel --enable-eplb --eplb-config '{"num_redundant_experts": ...}' (or a plan, which sets it)
           --enable-fault-tolerance --fault-tolerance-config '{"engine_recovery_timeout_sec": 180}'
           --additional-config '{"aurora": {..., "fault_store": "127.0.0.1:PORT of the keeper"}}'

   `fault_store` (or AURORA_FAULT_STORE) turns all of this on. AURORA_COMMAND_SECRET, in the environment of every server, has a
   secret that the parent draws when it starts: servers obey commands alone that bring it. All servers must start: a loss
   before `/health` of every rank answers 200 ends the command.
3. When ranks are lost, the parent kills their process groups, draws the next change number (1, 2, 3, ...; never again the same
   one), and posts to every survivor's server, idle or not, all at once:

       POST /fault_tolerance/apply
       {"instruction": "change_ranks", "secret": ..., "params": {"change": 1, "dead": [2], "alive": [0, 1, 3], "within_s": 40}}

   Ranks are numbered as at start, for ever: `dead` has all ranks that were lost since, `alive` the others; together they are
   0 ... N-1. `within_s` is how long survivors wait for each other; `changed`, if it is there, says how the model's files have
   changed since the start, and no survivor reads experts then. vLLM answers 202 {"request_id": ..., "message": ...}.
4. The parent polls `GET /fault_tolerance/status` of every survivor, {"engines": [{"id": r, "status": ..., "change": 1}]}:
   - status "healthy" and change 1: this survivor serves on. The change is done when all survivors say so.
   - "ft_error" with "last_ft_request_id" equal to the request_id: this survivor refused or failed, and says why (an older
     change number; an expert that nobody holds; other survivors that did not come). It still waits for a newer change.
     If its status is still "healthy" then, its step has not ended within `within_s`: the parent takes it for lost.
   - "unhealthy": it waits for a change (its requests were aborted: HTTP 200, finish reason "abort"). "dead": it is lost.
   A rank lost during a change is a new change with a greater number, posted to those who are left; the older one is given up.
   Requests that come meanwhile wait, and are served after the change.
5. A lost rank may come back. The parent starts its server again, as in 2, with AURORA_RANK_JOINS=1 in its environment; it loads
   and warms up without the others. Once its `/health` answers 200, a change has it in `alive` again, and is posted to it too.
6. Fencing: an engine takes a change only once, and only one of a greater number than its last; one that finds itself in `dead`
   kills itself. Ranks that the parent has cut off have no connection to survivors, which have closed theirs.
7. The last survivor serves alone. With no survivor left, and where a change fails, the parent starts all servers anew, as in 2.
"""

from __future__ import annotations

import functools
import hmac
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from aurora.errors import BadInput
from aurora_vllm.settings import SECRET
from aurora_vllm.vllm_internals.api_checks import check_api, find
from aurora_vllm.vllm_internals.close_group_connections import (
    KEEPER_STARTS,
    GroupConnections,
    RankLost,
    announce,
    connect,
)
from aurora_vllm.vllm_internals.held_experts import gather_slots, hold_slots
from aurora_vllm.vllm_internals.joining_rank import end_alone, joins, start_without_others
from aurora_vllm.vllm_internals.local_stores import LOOPBACK
from aurora_vllm.vllm_internals.replaced import replace

LOG = logging.getLogger("vllm.aurora")
COORDINATOR = "vllm.v1.engine.utils:DPCoordinator"
VALIDATE = "vllm.entrypoints.serve.fault_tolerance.api_router:_validate_payload"
REARRANGE = "vllm.distributed.eplb.eplb_state:rearrange_expert_weights_inplace"
INSTRUCTION = "change_ranks"
DEFAULT_TIMEOUT = dist.distributed_c10d.default_pg_timeout
EXPECTED = 0  # engines that the coordinator waits for before it serves; each is told when it comes
WAIT_S = 0.005  # between two looks at an engine that is about to stop


@dataclass(frozen=True)
class RanksChange:
    """Change of the set of serving ranks, ordered by the parent. Ranks keep their numbers from the start.

    Attributes:
        number: number of the change; later changes have greater numbers.
        dead: the lost ranks.
        alive: the ranks that must serve after the change.
        within: how long these ranks wait for each other.
        changed: how the model's files differ from those that the ranks have loaded, as a part of a sentence; "": they do not.

    Raises:
        BadInput: if ranks are missing, or in both `dead` and `alive`.
    """

    number: int
    dead: tuple[int, ...]
    alive: tuple[int, ...]
    within: timedelta
    changed: str = ""

    @classmethod
    def read(cls, params: Mapping[str, Any], ranks: int) -> RanksChange:
        """Returns the RanksChange in the parameters of a `change_ranks` instruction; `ranks`: number of ranks at the start."""
        try:
            dead, alive = (tuple(sorted({int(rank) for rank in params[name]})) for name in ("dead", "alive"))
            within = timedelta(seconds=float(params["within_s"]))
            change = cls(int(params["change"]), dead, alive, within, str(params.get("changed", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{INSTRUCTION}: expected change, dead, alive and within_s, found {dict(params)}") from error
        if sorted(dead + alive) != list(range(ranks)) or not alive:
            raise BadInput(f"{INSTRUCTION}: expected ranks 0 to {ranks - 1}, each dead or alive, found {dead} and {alive}")
        return change

    def store(self, address: str, prefix: str) -> Store:
        """Returns the keeper's store at `address`, with a key prefix that is unique to this change and `prefix`."""
        store = connect(address, self.within)
        return PrefixStore(f"{self.number}/{prefix}", store)


@functools.cache  # an engine and the worker in its process have one
def watch_connections(address: str) -> GroupConnections:
    """Watches this process's connections, all that are opened from now on; `address`: of the keeper's store."""
    connections = GroupConnections()
    connections.watch(address)
    connections.begin(0)
    return connections


# Engine


def engine_sentinel(engine: Any, connections: GroupConnections, address: str) -> Any:
    """Returns a sentinel (vLLM's fault-handling object) of an engine that obeys `change_ranks`.

    Args:
        engine: vLLM's engine, which has a sentinel of vLLM's own.
        connections: its connections.
        address: of the keeper's store.
    """
    make, message = find("vllm.distributed.utils:init_gloo_process_group"), find("vllm.v1.engine:")

    class RanksSentinel(type(engine.ft_sentinel)):  # type: ignore[misc]
        """vLLM's sentinel of an engine, which can go on with other ranks.

        Attributes:
            change: number of the last change that was made.
        """

        def __init__(self) -> None:
            super().__init__(engine, engine.ft_sentinel.parallel_config)
            self.change = self._tried = 0
            engine.ignore_start_dp_wave = joins()  # until its change
            self._rank, self._ranks = self.parallel_config.data_parallel_rank, self.parallel_config.data_parallel_size

        def handle_command(self, client_idx: int, call_id: int, ft_args: dict[str, Any]) -> None:
            """Handles a command; vLLM refuses one if the engine runs, so a change stops it first."""
            if ft_args["instruction"] == INSTRUCTION:
                try:
                    self._stop(ft_args["params"])
                except RuntimeError as error:  # the keeper has ended
                    LOG.error("aurora: %s", error)
            super().handle_command(client_idx, call_id, ft_args)

        def change_ranks(self, request: Any) -> Any:
            """Goes on with the ranks that are alive. Called in the thread of the input sockets, while the engine waits."""
            engine, change = self.engine, RanksChange.read(request.params, self._ranks)
            if change.number <= self._tried:
                raise BadInput(f"{INSTRUCTION}: expected a change after {self._tried}, found {change.number}")
            self._tried = change.number
            connections.begin(change.number)
            rank, ranks = change.alive.index(self._rank), len(change.alive)
            connections.keep([engine.dp_group])
            engine.dp_store = change.store(address, "engine")
            engine.dp_group = make(engine.dp_store, rank, ranks, change.within)
            executor, within_s = engine.model_executor, change.within.total_seconds()
            request.params["store"] = address
            executor.collective_rpc("handle_ft_command", timeout=within_s, args=(request,))
            wave = torch.tensor([engine.current_wave])
            engine.dp_group.allreduce([wave], dist.ReduceOp.MAX).wait()  # all survivors have come so far
            parallel = engine.vllm_config.parallel_config
            engine.dp_group.set_timeout(parallel.cpu_distributed_timeout or DEFAULT_TIMEOUT)
            engine.dp_rank, engine.dp_size = parallel.data_parallel_rank, parallel.data_parallel_size = rank, ranks
            engine.scheduler.reset_prefix_cache()  # it knows blocks of the pass that failed
            engine.step_counter, engine.current_wave, engine.engines_running = 0, int(wave), True
            engine.pending_pause = engine.ignore_start_dp_wave = False
            self.change, self.status_type = change.number, message.EngineStatusType.HEALTHY
            self.resumed.set()
            self._push_status()
            LOG.info("aurora: change %d: ranks %s serve on", change.number, ", ".join(map(str, change.alive)))
            return find("vllm.v1.fault_tolerance.utils:FaultToleranceResult")(request_id=request.request_id, success=True)

        def scale_down(self, request: Any) -> Any:
            """Refuses the recovery of a vLLM that has one of its own: one alone decides who is lost."""
            raise BadInput(f"{request.instruction}: expected {INSTRUCTION}, as `aurora vllm` decides which ranks serve")

        def _stop(self, params: dict[str, Any]) -> None:
            """Brings the engine to wait for the change, whether it is idle, computes, or waits for a lost rank."""
            try:
                change = RanksChange.read(params, self._ranks)
            except BadInput:
                return  # `change_ranks` says so
            if change.number <= self._tried:
                return
            if self._rank in change.dead:
                LOG.error("aurora: change %d: this rank, %d, is not to serve any longer", change.number, self._rank)
                os.kill(os.getpid(), signal.SIGKILL)
            connections.shut(change.number)
            announce(connect(address, change.within), change.number)
            if self.resumed.is_set():
                self.engine.input_queue.put_nowait((message.EngineCoreRequestType.WAKEUP, change))
            until_s = time.monotonic() + change.within.total_seconds()
            while self.status_type == message.EngineStatusType.HEALTHY and time.monotonic() < until_s:
                time.sleep(WAIT_S)

        def stops(self, request: Any) -> bool:
            """Returns False if a request to the engine is of vLLM's; True: it is a change that stops the engine no more.

            Raises:
                RankLost: if it is a change that the engine has not noticed by itself.
            """
            if isinstance(request, RanksChange) and request.number > self._tried:
                raise RankLost(f"ranks {', '.join(map(str, request.dead))} are lost")
            return isinstance(request, RanksChange)

        def _push_status(self) -> None:
            status = {"id": self.engine_index, "status": self.status_type.name.lower(), "change": self.change}
            if self.status_type == message.EngineStatusType.UNHEALTHY:
                status["fault_info"] = self.fault_info
            result = find("vllm.v1.serial_utils:UtilityResult")(status)
            output = message.UtilityOutput(call_id=message.FT_STATUS_CALL_ID, result=result)
            outputs = message.EngineCoreOutputs(utility_output=output)
            outputs.engine_index = self.engine_index
            self.engine.output_queue.put_nowait((0, outputs))

    return RanksSentinel()


# Worker


def worker_sentinel(worker: Any, connections: GroupConnections, address: str) -> Any:
    """Returns a sentinel of a worker that obeys `change_ranks`, and accepts vLLM's stock all-to-all.

    Args:
        worker: vLLM's worker. Its method `ranks_changed` is called with the expert-parallel ranks by their old numbers (None:
            it joins), and by those at the start.
        connections: its connections.
        address: of the keeper's store.
    """
    moving = threading.Event()

    def noted(rearrange: Any) -> Any:
        @functools.wraps(rearrange)
        def rearrange_and_note(*args: Any, **named: Any) -> None:
            moving.set()  # and so it stays after an error
            rearrange(*args, **named)
            moving.clear()

        return rearrange_and_note

    replace(REARRANGE, noted)

    class RanksWorkerSentinel(find("vllm.v1.worker.sentinel.gpu_worker_sentinel:WorkerSentinel")):  # type: ignore[misc]
        """vLLM's sentinel of a worker, which can form its groups anew with other ranks."""

        def __init__(self) -> None:  # vLLM's own refuses the stock all-to-all
            self.worker = worker
            self.dp_rank, self.dp_size = worker.parallel_config.data_parallel_rank, worker.parallel_config.data_parallel_size
            self._alive = tuple(range(self.dp_size))

        def change_ranks(self, request: Any) -> None:
            """Forms all groups anew, and EPLB's maps of the slots of their ranks. A collective call."""
            change = RanksChange.read(request.params, self.dp_size)
            connections.begin(change.number)
            self._clean_worker_state()
            parallel = worker.vllm_config.parallel_config
            rank, ranks = change.alive.index(self.dp_rank), len(change.alive)
            parallel.data_parallel_rank, parallel.data_parallel_size = rank, ranks
            end_alone()
            connections.keep(dist.distributed_c10d._world.pg_map)
            size, part = parallel.world_size, worker.rank
            before = {peer: place * size for place, peer in enumerate(self._alive)}
            form_groups(worker, change.store(address, "workers"), change.within)
            slots = gather_slots(worker, before[self.dp_rank] + part, moving.is_set())
            if change.changed and any(filled for _, filled_L in slots.values() for filled in filled_L):
                raise BadInput(f"experts that no rank holds cannot be read: {change.changed}")
            self._alive = change.alive  # from here to `connect_balancer` no other rank is waited for
            hold_slots(worker, slots)
            moving.clear()
            places = [(before.get(peer), peer * size, n) for peer in change.alive for n in range(size)]
            worker.ranks_changed([None if at is None else at + n for at, _, n in places], [start + n for _, start, n in places])
            connect_balancer(worker)
            if torch.cuda.is_available() and ranks > 1:
                worker.elastic_ep_executor.warm_and_capture()  # graphs know the old communicators

    return RanksWorkerSentinel()


def form_groups(worker: Any, store: Store, within: timedelta) -> None:
    """Recreates vLLM's process groups from its parallel configuration. A collective call of all ranks in it.

    Args:
        worker: vLLM's worker.
        store: store of the ranks' rendezvous.
        within: how long the ranks wait for each other.
    """
    state, config = find("vllm.distributed.parallel_state:"), worker.vllm_config
    parallel, backend = config.parallel_config, find("vllm.platforms:current_platform").dist_backend
    state.destroy_model_parallel()
    state.destroy_distributed_environment()
    state._group_name_counter.clear()  # compiled graphs know groups by name
    rank = parallel.data_parallel_rank * parallel.world_size + worker.rank
    timeouts = parallel.distributed_timeout_seconds, parallel.cpu_distributed_timeout_seconds
    parallel.distributed_timeout_seconds = parallel.cpu_distributed_timeout_seconds = max(1, round(within.total_seconds()))
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=parallel.world_size_across_dp, timeout=within)
        find("vllm.v1.worker.gpu_worker:init_worker_distributed_environment")(
            config, worker.rank, worker.distributed_init_method, worker.local_rank, backend
        )
    finally:
        parallel.distributed_timeout_seconds, parallel.cpu_distributed_timeout_seconds = timeouts
    for group, (name, _) in dist.distributed_c10d._world.pg_map.items():
        seconds = timeouts[name == "gloo"]
        group.set_timeout(DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds))


def connect_balancer(worker: Any) -> None:
    """Connects EPLB between the ranks of the new groups. A collective call."""
    group, config = find("vllm.distributed.parallel_state:get_eplb_group")(), worker.vllm_config.parallel_config.eplb_config
    create = find("vllm.distributed.eplb.eplb_communicator:create_eplb_communicator")
    for model in worker.model_runner.eplb_state.model_states.values():
        model.communicator = create(group, config.communicator, model.model.expert_weights, model.expert_buffer)


# Server and keeper


def install_in_server(address: str) -> None:
    """Patches a server's HTTP endpoint to accept `change_ranks`, and its engines to use the keeper's coordinator.

    Called before the server starts engines.

    Raises:
        BadInput: if this vLLM fails the API checks, or the environment has no secret.
    """
    check_api("survive", "engines", "reload")
    if not (secret := os.environ.get(SECRET)):
        raise BadInput(f"fault_store: expected {SECRET}, with which `aurora vllm` starts servers, found none")
    coordinator = coordinator_of(address)
    replace(VALIDATE, lambda validate: secured(validate, secret))

    class KeptCoordinator:
        """The coordinator of the keeper's, as vLLM's server of rank 0 sees its own: it does not end with that server."""

        def __init__(self, *_args: Any, **_named: Any) -> None:
            self._front, self._output, self._input = coordinator
            self._pipe = multiprocessing.Pipe(duplex=False)  # never ready
            self.proc = self
            self.pid, self.name, self.exitcode, self.sentinel = 0, "coordinator", None, self._pipe[0].fileno()

        def get_stats_publish_address(self) -> str:
            return str(self._front)

        def get_engine_socket_addresses(self) -> tuple[str, str]:
            return self._input, self._output

        def shutdown(self, timeout: float | None = None) -> None:
            """Leaves it to the keeper."""

    replace(COORDINATOR, lambda _: KeptCoordinator)
    if joins():
        start_without_others(coordinator)


def coordinator_of(address: str) -> tuple[str, str, str]:
    """Returns the addresses of the coordinator that the keeper holds, whose store is at `address`."""
    return tuple(json.loads(connect(address, KEEPER_STARTS).get("coordinator")))


def secured(validate: Any, secret: str) -> Any:
    """Returns vLLM's check of commands, which takes `change_ranks` too, and answers 403 to bodies without the secret."""
    refuse = validate.__globals__["HTTPException"]

    @functools.wraps(validate)
    def validate_payload(body: Any) -> Any:
        given = body.get("secret") if isinstance(body, dict) else None
        if not hmac.compare_digest(str(given).encode(errors="replace"), secret.encode()):
            raise refuse(403, "secret: expected that of the `aurora vllm` that started this server")
        if body.get("instruction") != INSTRUCTION:
            return validate(body)
        return INSTRUCTION, validate({**body, "instruction": "retry"})[1]

    return validate_payload


def keep(descriptor: int, folder: str) -> None:
    """Runs the store and vLLM's coordinator, from the first line on stdin until it closes; announces change numbers read there.

    Args:
        descriptor: file descriptor of the store's listening socket.
        folder: folder for the coordinator's sockets.
    """
    port = socket.socket(fileno=os.dup(descriptor)).getsockname()[1]
    run = find("vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator")  # loads vLLM
    if not sys.stdin.readline():
        return
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    addresses = [f"ipc://{folder}/coordinator-{number}" for number in range(3)]
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    threading.Thread(target=run, args=(EXPECTED, *addresses, writer), daemon=True).start()
    reader.recv()  # once its sockets are there
    store.set("coordinator", json.dumps(addresses))
    print("serves", flush=True)
    for line in sys.stdin:
        announce(store, int(line))


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2])
