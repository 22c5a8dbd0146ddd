"""Ranks on servers that send routed tokens: dispatch and combine by every layout of the runtime, interleaved and timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from hosts import QUIET_S, TORCH, join, start_together
from two_tier import deduplicated_two_tier_bound

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import timed_steps
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import RowPerExpert, RowPerRank
from aurora.moe.permutation import MessageFormat
from aurora.moe.server_layout import RowPerServer
from aurora.runtime.distributed.launcher import RankInfo
from aurora.runtime.order_calibration import measured_network
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Cluster, Hierarchy, Network, Order
from aurora.types.arrays import IntArray

WAYS = ("dispatch", "combine")
HIERARCHICAL = "hierarchical"
EVERY: dict[type, int] = {RowPerExpert: 4, RowPerRank: 3, RowPerServer: 1}  # the longer an exchange takes, the fewer there are
SAME = 0.02  # relative difference of sums in bfloat16 that were rounded in other places


@dataclass(frozen=True)
class RoutedTokens:
    """What the ranks send: the experts of each token, and who holds them."""

    expert_UK: IntArray
    source_U: IntArray
    slots_G: tuple[tuple[int, ...], ...]
    width: int  # of the hidden states, in bfloat16

    @cached_property
    def rank_UK(self) -> IntArray:
        """(U, K) the rank of every choice."""
        home_E = np.empty(sum(map(len, self.slots_G)), dtype=np.int64)
        for rank, slots in enumerate(self.slots_G):
            home_E[list(slots)] = rank
        return home_E[self.expert_UK]

    def row_bytes(self, way: str) -> int:
        """Bytes of a deduplicated row."""
        there = MessageFormat(self.width, self.expert_UK.shape[1], torch.bfloat16)
        return there.row_bytes if way == "dispatch" else 2 * self.width

    def bound_s(self, cluster: Cluster, way: str) -> float:
        """No deduplicated all-to-all over the servers takes less."""
        assert cluster.servers is not None
        assert cluster.servers.nic_Bps is not None
        hierarchy = Hierarchy(np.array(cluster.servers.server_G), 1)
        rows = hierarchical_rows(self.rank_UK, self.source_U, hierarchy)
        sent_GN, needed_GG = (self.row_bytes(way) * each for each in (rows.sent_GN, rows.needed_GCG[:, 0]))
        rates_Bps = cluster.servers.nic_Bps, cluster.gpus[0].out_Bps
        return deduplicated_two_tier_bound(sent_GN, needed_GG, hierarchy.server_G, *rates_Bps, cluster.servers.shared)


@dataclass(frozen=True)
class Method:
    """One way to send a row for each choice, for each rank (deduplicated), or for each server (hierarchical).

    order: of ORDER, or TORCH, or HIERARCHICAL.
    """

    order: str
    deduplicated: bool = False
    hierarchy: Hierarchy | None = None

    def __str__(self) -> str:
        if self.hierarchy is not None:
            chunks = f"{self.hierarchy.chunks} chunk{'s' * (self.hierarchy.chunks > 1)}"
            levelled = ", levelled" * (self.hierarchy.level_from is not None)
            return f"{HIERARCHICAL}, {chunks}{levelled}{f', {self.order}' * (self.order != HIERARCHICAL)}"
        return f"{self.order}{', deduplicated' * self.deduplicated}"

    @property
    def layout(self) -> type[RowPerExpert] | type[RowPerRank]:
        if self.hierarchy is not None:
            return RowPerServer
        return RowPerRank if self.deduplicated else RowPerExpert

    def rows_SGG(self, tokens: RoutedTokens) -> IntArray:
        """(S, G, G) the rows between ranks in each exchange of a dispatch."""
        if self.hierarchy is not None:
            return step_rows(hierarchical_rows(tokens.rank_UK, tokens.source_U, self.hierarchy), self.hierarchy)
        ranks = len(tokens.slots_G)
        needs_UG = np.zeros((len(tokens.rank_UK), ranks), dtype=np.int64)
        np.add.at(needs_UG, (np.arange(len(needs_UG))[:, None], tokens.rank_UK), 1)
        if self.deduplicated:
            needs_UG = np.minimum(needs_UG, 1)
        rows_GG = np.stack([needs_UG[tokens.source_U == rank].sum(axis=0) for rank in range(ranks)])
        np.fill_diagonal(rows_GG, 0)
        return rows_GG[None]

    def predicted_s(self, tokens: RoutedTokens, way: str, planned: Cluster, network: Network) -> float | None:
        """Seconds of an all-to-all by the simulator's switch, in the order that was made for a cluster; None for gloo's own."""
        order, forward = self.planned(tokens, planned), way == "dispatch"
        if order is None:
            return None
        rows_SGG = self.rows_SGG(tokens)
        row_bytes = tokens.row_bytes(way) if self.deduplicated else 2 * tokens.width
        bytes_SGG = row_bytes * (rows_SGG if forward else rows_SGG[::-1].swapaxes(1, 2))
        return timed_steps(order if forward else order.reversed, bytes_SGG, network).makespan_s

    def planned(self, tokens: RoutedTokens, cluster: Cluster) -> Order | None:
        """The order of each exchange; None: gloo's own all-to-all."""
        if self.order == TORCH:
            return None
        rows_GG, rng = self.rows_SGG(tokens).sum(axis=0), np.random.default_rng(0)
        if self.order == HIERARCHICAL:
            assert self.hierarchy is not None
            return hierarchical_order(rows_GG, self.hierarchy, cluster.network, rng=rng)
        return ORDER[self.order](rows_GG, cluster.network, rng=rng)


@dataclass
class _Prepared:
    """A method on one rank, ready to be performed any number of times."""

    layout: Any
    order: Order | None
    transport: GlooTransport
    answers: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    steps: list[tuple[float, float]] = field(default_factory=list)  # start and end of the exchanges performed last

    def dispatch(self) -> torch.Tensor:
        self.steps = []
        arrived: torch.Tensor = self.layout.dispatch(partial(self._exchange, self.order))
        return arrived

    def combine(self) -> torch.Tensor:
        self.steps = []
        back = None if self.order is None else self.order.reversed
        answers: torch.Tensor = self.layout.combine(self.answers, partial(self._exchange, back))
        return answers

    def _exchange(self, order: Order | None, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]) -> None:
        began_s = time.perf_counter()
        self.transport.exchange(order, sends, recvs, lambda *_: None)
        self.steps.append((began_s, time.perf_counter()))


@dataclass(frozen=True)
class Span:
    """One all-to-all on one rank, by time.perf_counter: start and end of the whole, and of each of its exchanges."""

    start_s: float
    end_s: float
    steps: tuple[tuple[float, float], ...]


Spans = dict[tuple[str, str, str], list[Span]]  # by case, method and way


def measure_routed(
    seat: RankInfo,
    hosts: Sequence[str],
    meeting: str,
    cases: dict[str, RoutedTokens],
    methods: Sequence[Method],
    cluster: Cluster,
    repetitions: int,
) -> tuple[Spans, list[Cluster]]:
    """This rank's spans, and the network as measured before and after.

    Methods are performed in every EVERY-th repetition, and once before; the sums that they then give are compared with those of
    the first one.
    """
    join(seat, hosts, meeting)
    transport = GlooTransport(None, cluster)
    found_network = [measured_network(transport, cluster, "cpu")]
    runs: list[tuple[tuple[str, str, str], int, Callable[[], object], _Prepared]] = []
    for case, tokens in cases.items():
        sums = None
        for method in methods:
            ready = _prepared(method, tokens, transport, cluster)
            ready.answers = ready.layout.compute(ready.dispatch(), _Scaled(tokens.slots_G[seat.rank]))
            found = ready.layout.aggregate(ready.combine()).float()
            sums = found if sums is None else sums
            if not torch.allclose(found, sums, rtol=SAME, atol=SAME * float(sums.abs().max())):
                raise AssertionError(f"{method}: other sums than {methods[0]} gives, by up to {(found - sums).abs().max()}")
            every = EVERY[method.layout]
            for way, run in zip(WAYS, (ready.dispatch, ready.combine), strict=True):
                runs.append(((case, str(method), way), every, run, ready))
    spans: Spans = {key: [] for key, *_ in runs}
    for repetition in range(repetitions):
        for key, every, run, ready in runs[:: 1 if repetition % 2 else -1]:
            if repetition % every == 0:
                time.sleep(QUIET_S)
                start_together(transport)
                began_s = time.perf_counter()
                run()
                spans[key].append(Span(began_s, time.perf_counter(), tuple(ready.steps)))
    return spans, [*found_network, measured_network(transport, cluster, "cpu")]


def together(spans_R: Sequence[Spans]) -> dict[tuple[str, str, str], list[float]]:
    """Seconds of each repetition, from the first rank's start to the last one's end."""
    return {
        key: [
            max(span.end_s for span in each) - min(span.start_s for span in each)
            for each in zip(*(spans[key] for spans in spans_R), strict=True)
        ]
        for key in spans_R[0]
    }


def compile_kernels(tokens: RoutedTokens, methods: Sequence[Method], cluster: Cluster) -> None:
    """Compiles into the cache what every rank needs, which they would do all at the same time."""
    for method in methods:
        method.predicted_s(tokens, WAYS[0], cluster, cluster.network)
        _layout(method, tokens, 0)


def _layout(method: Method, tokens: RoutedTokens, rank: int) -> RowPerExpert | RowPerRank:
    """A rank's rows."""
    own_UK = torch.from_numpy(tokens.expert_UK[tokens.source_U == rank]).long()
    hidden = torch.randn(len(own_UK), tokens.width, generator=torch.Generator().manual_seed(rank)).bfloat16()
    weights = torch.full(own_UK.shape, 1 / own_UK.shape[1])
    return method.layout(ExpertMap(tokens.slots_G, rank, hierarchy=method.hierarchy), hidden, own_UK, weights, None)


def _prepared(method: Method, tokens: RoutedTokens, transport: GlooTransport, cluster: Cluster) -> _Prepared:
    """A method on this rank, its counts gathered."""
    layout = _layout(method, tokens, transport.rank)
    layout.gathered(transport.gather(layout.counts))
    return _Prepared(layout, method.planned(tokens, cluster), transport)


class _Scaled:
    """Experts that give their rows, each a little larger than the expert before."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._scale = 1 + torch.tensor(slots) / 64

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (rows * self._scale[slots]).to(rows.dtype)
