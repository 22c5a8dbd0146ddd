"""Ranks of bench/interleave.py: without turns, or in a network namespace with experts that wait instead of computing."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from net import enter

from aurora.execute import parcels, serve
from aurora.execute.result import Share
from aurora.ranks.launcher import Seat

TOKEN_S = 200e-6


class NoTurns:
    """What one model alone would do without the machinery."""

    def start_compute(self) -> None: ...

    def stop_compute(self) -> None: ...

    def exchange(self) -> Any:
        return nullcontext()

    def leave(self) -> None: ...

    def abort(self, error: BaseException) -> None: ...


def served_alone(seat: Seat, turns: bool, *args: Any) -> list[Share]:
    if not turns:
        serve._turnstiles = lambda transports, *_: [NoTurns() for _ in transports]
    return serve.serve_rank(seat, *args)


def served_on_hosts(seat: Seat, hosts: Sequence[str], meeting: str, *args: Any) -> list[Share]:
    """In the rank's namespace, with experts that wait instead of computing."""
    enter(hosts[seat.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    @contextmanager
    def joined(_: Seat) -> Iterator[None]:
        store = dist.FileStore(meeting, seat.ranks)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()

    run = parcels._run

    def timed(experts: Any, rows: Any, slots: Any) -> Any:
        until = time.perf_counter() + TOKEN_S * len(rows)
        done = run(experts, rows[:1], slots[:1]).expand(len(rows), -1).clone() if len(rows) else rows
        time.sleep(max(0.0, until - time.perf_counter()))
        return done

    serve.joined, parcels._run = joined, timed
    return serve.serve_rank(seat, *args)
