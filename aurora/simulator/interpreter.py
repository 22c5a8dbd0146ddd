"""Event-driven simulation of a Program: ranks, models, their GPUs and ports, and the switch.

Models share GPUs and ports (`waiting`) by the rules of `aurora.algorithms.arbitration`, as in `aurora.runtime.port_arbiter`.
"""

import heapq
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from aurora.algorithms.alltoall.expert_groups import stage_rows
from aurora.algorithms.alltoall.schedule import batch_order
from aurora.algorithms.arbitration import PortSlices, slices_of
from aurora.algorithms.check.fit import check_overlap, check_traffic
from aurora.algorithms.check.plans import check_plan
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.network.port_bounds import nics_of
from aurora.algorithms.network.switch import Switch, counts_seconds
from aurora.algorithms.workload.serving_gpus import replica_tokens
from aurora.algorithms.workload.step_traffic import cut_traffic
from aurora.algorithms.workload.traffic import GATHERS, exchange_bytes, exchange_rows, gathered_bytes
from aurora.errors import BadInput, check_one_of
from aurora.simulator.waiting import Event, PriorityLock, Process, Resume, SimulatedPort, Wait
from aurora.types import (
    BARRIERS,
    OVERHEAD,
    Barrier,
    Cluster,
    Compute,
    Exchange,
    Hierarchy,
    Op,
    Order,
    Plan,
    Profile,
    Program,
    SlicePolicy,
    Trace,
    TraceRecorder,
)
from aurora.types.arrays import IntArray
from aurora.types.options import GATHERED, SIMULATED_ORDERS
from aurora.types.program import INTERACTIVE_LEVEL, groups_of, hierarchy_of
from aurora.types.run_options import INTERLEAVE

OrderBatch = Callable[[IntArray, Hierarchy | None], Order]  # the order of one all-to-all: its bytes (S, G, G), its servers
Key = tuple[int, int, int, str]  # of an all-to-all: model, step, layer, phase


def simulate_plan(
    plan: Plan,
    profiles: Profile | Sequence[Profile],
    barriers: str = "gpu",
    orders: str = "plan",
    interleave: str = "on",
    staged: bool = False,
    overlap: int = 1,
) -> Trace:
    """Predicts how long a plan takes to serve the profiles' tokens, event by event. Each window is one forward pass.

    Args:
        plan: the plan.
        profiles: the traffic: one profile per model, which is divided over the plan's micro-batches; or one per micro-batch.
        barriers: "gpu": a GPU waits for its own transfers, and for the token counts of all ranks; "none": for its own transfers
            only; "global": for all ranks after every phase.
        orders: "plan": the plan's orders; "batch": a new order for each all-to-all, made from its bytes; "allgather": an
            allgather of all tokens and a reduce-scatter replace all-to-alls, as in vLLM without aurora.
        interleave: "on": models run at the same time; "off": one after the other.
        staged: whether transfers run in stages, as NCCL's grouped calls do; see `Order.stage_X`.
        overlap: groups of each rank's experts, which compute while the rows of other groups travel; 1: they do not.

    Returns:
        The predicted Trace.

    Raises:
        BadInput: if a profile is not of the plan's model or ranks, or an argument is unknown.

    Example:
        >>> import aurora
        >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics")
        >>> plan = aurora.plan(aurora.load("demo-4"), traffic)
        >>> aurora.simulate(plan, traffic).kind
        'predicted'
    """
    check_one_of("interleave", interleave, INTERLEAVE)
    if interleave == "processes":
        raise BadInput("`interleave`: expected on or off, as other processes are not simulated")
    ordered = batch_orders(plan, orders)
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    check_plan(plan)
    check_overlap(plan, overlap, orders, barriers)
    check_traffic(plan, profiles)
    served, traffic = cut_traffic(plan, profiles)
    program = compile_plan(served, orders == GATHERED, overlap)
    return simulate(program, plan.cluster, traffic, barriers, ordered, interleave == "on", staged)


def batch_orders(plan: Plan, orders: str) -> OrderBatch | None:
    """Returns the function that orders each all-to-all by its bytes if `orders` is "batch"; otherwise None."""
    check_one_of("orders", orders, SIMULATED_ORDERS)
    return batch_order(plan.cluster.network, plan.options.order, plan.options.seed) if orders == "batch" else None


def simulate(
    program: Program,
    cluster: Cluster,
    profiles: Sequence[Profile],
    barriers: str = "gpu",
    ordered: OrderBatch | None = None,
    interleave: bool = True,
    staged: bool = False,
) -> Trace:
    """Predicts the Trace of `program` on `cluster`.

    On a rank one model computes at a time, first come first served. Models take time slices of its port in turn
    (`aurora.algorithms.arbitration`); a model that has finished is skipped. With time slices by layer, gates and aggregations
    run before waiting expert compute, and interrupt running expert compute at its preemption points. All compute of an
    interactive model does the same.

    Args:
        program: a program of any number of models.
        cluster: the GPUs' speeds and the network.
        profiles: one per model, which runs one step for each window of its profile.
        barriers: "gpu": a rank continues when its own transfers are done, and a Barrier releases all ranks of the model at
            once. "none": as "gpu", without Barriers. "global": every phase of a model ends on all ranks together, and only
            then are GPU and port free for another model (the maxima of Aurora's Eq. 1 and Table 2).
        ordered: a function that returns the order of an all-to-all from its bytes (S, G, G) and its hierarchy. For a
            hierarchical combine it gets the bytes of the dispatch with the same transfers backwards. None: the program's orders
            are used.
        interleave: True: the models run at the same time; False: one after the other on every rank.
        staged: whether transfers run in stages, see `Switch.open`, and a rank has one exchange under way at a time, as on NCCL.

    Returns:
        A Trace of kind "predicted"; the same for the same arguments.

    Raises:
        BadInput: if `barriers` is not one of BARRIERS.
    """
    check_one_of("barriers", barriers, BARRIERS)
    record = TraceRecorder("predicted", program.names_M, program.ranks)
    _Run(program, cluster, profiles, barriers, ordered, interleave, staged, record).perform()
    return record.trace()


def simulated_span_s(program: Program, cluster: Cluster, profiles: Sequence[Profile]) -> float:
    """Returns the predicted seconds of a program, as `simulate(program, cluster, profiles).seconds`, without making a Trace."""
    _Run(program, cluster, profiles, "gpu", None, True, False, span := _Span()).perform()
    return span.last_s - span.first_s if span.last_s >= span.first_s else 0.0


@dataclass
class _Span:
    """The time from the first start to the last end of what is recorded; arguments as those of TraceRecorder."""

    first_s: float = float("inf")
    last_s: float = -float("inf")

    def add(self, *event: Any) -> None:
        """Records a phase of a rank."""
        self.first_s, self.last_s = min(self.first_s, event[5]), max(self.last_s, event[6])

    def transfers(self, *event: Any) -> None:
        """Records all transfers of an all-to-all."""
        start_s_X, end_s_X = event[6]
        self.first_s = min(self.first_s, float(start_s_X.min(initial=np.inf)))
        self.last_s = max(self.last_s, float(end_s_X.max(initial=-np.inf)))


@dataclass
class _Step:
    """One step of an all-to-all in progress: its number at the switch, and the ranks that wait for its end."""

    key: Key
    number: int  # of the step, 0 in a flat all-to-all
    at_switch: int  # the switch's number of it
    finished: int = 0  # ranks whose transfers are done
    waiting: dict[int, Resume] = field(default_factory=dict)


@dataclass
class _Run:
    """One simulation: a heap of timed resumptions, the switch, and a process for every rank and model."""

    program: Program
    cluster: Cluster
    profiles: Sequence[Profile]
    barriers: str
    ordered: OrderBatch | None
    interleave: bool
    staged: bool
    record: "TraceRecorder | _Span"

    def __post_init__(self) -> None:
        self._preempts = self.interleave and self.barriers != "global"
        self._cut_M = [self._preempts and policy.yields for policy in self.program.policies_M]
        self.now = 0.0
        self._heap: list[tuple[float, int, Resume]] = []
        self._sequence = 0
        ranks, policies_M = range(self.program.ranks), self.program.policies_M
        if not self._preempts:  # where all ranks wait for all, no model goes before another
            policies_M = (SlicePolicy(),) * len(policies_M)
        self._gpus = [PriorityLock() for _ in ranks]
        self._ports = [SimulatedPort(PortSlices(policies_M, not self.staged)) for _ in ranks]
        self._keeps_gpu: set[tuple[int, int]] = set()  # rank and model of who computes from one phase to the next
        self._rank_locks = [PriorityLock() for _ in ranks]  # held by a whole model where they do not interleave
        self._at_barrier: dict[Key, list[Resume]] = {}
        self._sizes: dict[Key, tuple[Order, IntArray]] = {}  # of all-to-alls with steps to come: order, bytes of each step
        self._steps: dict[tuple[Key, int], _Step] = {}
        self._by_number: dict[int, _Step] = {}
        self._switch = Switch(self.cluster.network)
        self._counts_s = counts_seconds(self.cluster.network)
        self._split_MLEG = [
            [placement.split_EG(layer) for layer in range(len(placement.slots_LG))] for placement in self.program.placements_M
        ]
        self._hierarchy_M = [hierarchy_of(ops_L[0]) for ops_L in self.program.ops_ML]
        self._tokens_KGE: dict[tuple[int, int, int], IntArray] = {}  # by model, step and layer

    def perform(self) -> None:
        """Runs all processes to their end, which `record` is told of."""
        running = [self._rank(rank, model) for rank in range(self.program.ranks) for model in range(len(self.profiles))]
        for process in running:
            self._step(process)
        while self._heap or self._switch.busy:
            steps = self._switch.run(self._heap[0][0] if self._heap else float("inf"))
            self.now = self._switch.now_s
            for number, rank in steps:
                self._finish_step(self._by_number[number], rank)
            while not steps and self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
        assert not any(inspect.getgeneratorstate(process) == inspect.GEN_SUSPENDED for process in running), (
            "the program stopped before its end"
        )

    def _step(self, process: Process) -> None:
        """Runs a process to its next wait, and resumes it after that."""
        wait = next(process, None)
        if wait is not None:
            wait(lambda: self._step(process))

    def _rank(self, rank: int, model: int) -> Process:
        """The process of one model on one rank: its operations, layer by layer and step by step."""
        port = self._ports[rank]
        if not self.interleave:
            port.slices.leave(model)  # until it is its turn
            yield self._rank_locks[rank].acquire
            port.slices.join(model, 0.0)
        for step in range(self.profiles[model].windows):
            if self.program.time_slice == "step":
                yield partial(port.acquire, model)
            for layer, ops in enumerate(self.program.ops_ML[model]):
                groups = groups_of(ops)
                for op in ops:
                    match op:
                        case Exchange("dispatch") if groups > 1:
                            yield from self._overlapped(rank, ops, (model, step, layer))
                        case Exchange() | Compute("expert") if groups > 1:
                            pass  # done beside the dispatch
                        case Compute(phase):
                            yield from self._compute(rank, model, step, layer, phase)
                        case Barrier(phase) if self.barriers != "none" and not self.program.gathered:
                            began = self.now
                            yield self._barrier(model, step, layer, phase)
                            if self._counts_s:
                                yield self._sleep(self._counts_s)
                            self.record.add(rank, model, step, layer, phase, began, self.now)
                        case Exchange():
                            yield from self._exchange(rank, op, (model, step, layer, op.phase))
        port.slices.leave(model)
        port.wake()
        if not self.interleave:
            self._rank_locks[rank].release()

    def _exchange(self, rank: int, op: Exchange, key: Key) -> Process:
        """The rank's part of one all-to-all: in one time slice, or cut into several, for which the model may have to join."""
        model, port = key[0], self._ports[rank]
        if not self._cut_M[model]:
            yield from port.exchange(model, self._transfers(rank, op, key, range(self._steps_of(op))), op.hold_port)
            return
        steps = len(self._sizes_of(op, key)[1])
        if port.slices.joins_M[model]:
            yield self._join_sequence(op, key)
        for number in range(steps):
            yield from port.exchange(model, self._transfers(rank, op, key, (number,)))

    def _overlapped(self, rank: int, ops: Sequence[Op], where: tuple[int, int, int]) -> Process:
        """Dispatch, experts and combine of one layer by groups of experts: stages travel while experts compute."""
        dispatch, combine = (op for op in ops if isinstance(op, Exchange))
        arrived, computed = ([Event() for _ in range(dispatch.groups)] for _ in range(2))
        ended = Event()

        def stages() -> Process:
            for group, event in enumerate(arrived):
                yield self._join(rank, dispatch, (*where, "dispatch"), group)
                event.set()
            for group, event in enumerate(computed):
                yield event.wait
                yield self._join(rank, combine, (*where, "combine"), group)

        def port() -> Process:
            yield from self._ports[rank].exchange(where[0], stages())
            ended.set()

        self._step(port())
        for group, event in enumerate(arrived):
            yield event.wait
            yield from self._compute(rank, *where, "expert", group)
            computed[group].set()
        yield ended.wait

    def _transfers(self, rank: int, op: Exchange, key: Key, numbers: Iterable[int]) -> Process:
        """The rank's transfers of some steps of an all-to-all, one after the other, while it has the port."""
        for number in numbers:
            yield self._join(rank, op, key, number)
        if self.barriers == "global":
            yield self._barrier(*key)

    def _join_sequence(self, op: Exchange, key: Key) -> Wait:
        """Waits until all ranks are at this all-to-all; then the model joins the sequence of slices on each of them."""

        def joined(resume: Resume) -> None:
            model, counted = key[0], self.barriers != "none" and not self.program.gathered
            base = max(port.slices.draw(model) for port in (self._ports[:1] if counted else self._ports))
            for port in self._ports:
                port.slices.join(model, base, len(self._sizes_of(op, key)[1]))
                port.wake()
            resume()

        return self._barrier(*key[:3], f"slices of {key[3]}", last=joined)

    def _steps_of(self, op: Exchange) -> int:
        """Returns the number of exchanges that follow one another in one all-to-all."""
        if self.program.gathered:
            return GATHERS if op.phase == "dispatch" else 1
        return 1 if op.hierarchy is None else op.hierarchy.steps

    def _compute(self, rank: int, model: int, step: int, layer: int, phase: str, group: int = 0) -> Process:
        """One phase of compute on a rank's GPU, with preemption points where the program has them.

        An interactive model goes on from an aggregation to the next layer's gate without a pause in which others could begin.
        """
        if self.barriers == "global":  # first all ranks arrive, so that models queue in one sequence on each of them
            yield self._barrier(model, step, layer, f"before {phase}")
        gpu, preemption_s = self._gpus[rank], self.program.preemption_s
        level = self.program.compute_level(model, phase) if self._preempts else 0
        if (rank, model) in self._keeps_gpu:
            self._keeps_gpu.remove((rank, model))
        else:
            yield partial(gpu.acquire, level=level)
        began, left_s = self.now, self._seconds(rank, model, step, layer, phase, group)

        def record() -> None:
            self.record.add(rank, model, step, layer, phase, began, self.now)

        preemptive = self._preempts and (phase == "expert" or self._cut_M[model]) and self.program.preemptive(model)
        while preemptive and left_s > preemption_s:
            yield self._sleep(preemption_s)
            left_s -= preemption_s
            if gpu.priority_waits:
                record()
                yield gpu.yield_to_priority
                began = self.now
        yield self._sleep(left_s)
        record()
        if self.barriers == "global":
            yield self._barrier(model, step, layer, phase)
        if level == INTERACTIVE_LEVEL and phase == "aggregate" and layer < len(self.program.ops_ML[model]) - 1:
            self._keeps_gpu.add((rank, model))
        else:
            gpu.release()

    def _seconds(self, rank: int, model: int, step: int, layer: int, phase: str, group: int) -> float:
        """Seconds that a phase, of "expert" one group of experts, computes by the profile's curves."""
        profile, gpu = self.profiles[model], self.cluster.gpus[rank]
        tokens_SE = profile.tokens_TLSE[step, layer]
        if phase == "expert":
            tokens_KGE = self._expert_tokens(model, step, layer)
            tokens_E = tokens_KGE[group, rank]
            overhead_s = float(profile.seconds(OVERHEAD, gpu, tokens_KGE[group].sum()))
            return float(profile.seconds(phase, gpu, tokens_E).sum()) + overhead_s
        return float(profile.seconds(phase, gpu, tokens_SE[rank].sum() // profile.top_k))

    def _expert_tokens(self, model: int, step: int, layer: int) -> IntArray:
        """(K, G, E) int64, the tokens of each expert that each rank computes, by the experts' group."""
        if (model, step, layer) not in self._tokens_KGE:
            split_EG, hierarchy = self._split_MLEG[model][layer], self._hierarchy_M[model]
            server_G, tokens_SE = hierarchy.server_G if hierarchy else None, self.profiles[model].tokens_TLSE[step, layer]
            tokens_SP, expert_P, gpu_P = replica_tokens(tokens_SE, split_EG, server_G)
            groups = groups_of(self.program.ops_ML[model][layer])
            tokens_KGE = np.zeros((groups, *split_EG.shape[::-1]), dtype=np.int64)
            group_P = 0 if groups == 1 else stage_rows(tokens_SP, gpu_P, groups)[1]
            tokens_KGE[group_P, gpu_P, expert_P] = tokens_SP.sum(axis=0)
            self._tokens_KGE[model, step, layer] = tokens_KGE
        return self._tokens_KGE[model, step, layer]

    def _sleep(self, seconds: float) -> Wait:
        """Waits for simulated `seconds`."""

        def wait(resume: Resume) -> None:
            self._sequence += 1
            heapq.heappush(self._heap, (self.now + seconds, self._sequence, resume))

        return wait

    def _barrier(self, *key: *Key, last: Callable[[Resume], None] = lambda resume: resume()) -> Wait:
        """Waits until all ranks of the model have reached this barrier; `last` then resumes the first of them."""

        def wait(resume: Resume) -> None:
            arrived = self._at_barrier.setdefault(key, [])
            arrived.append(resume)
            if len(arrived) == self.program.ranks:
                first, *others = self._at_barrier.pop(key)
                last(first)
                for resume_rank in others:
                    resume_rank()

        return wait

    def _join(self, rank: int, op: Exchange, key: Key, number: int) -> Wait:
        """Waits until the rank has sent and received all its bytes of this step; bytes are counted for all steps at once."""

        def wait(resume: Resume) -> None:
            if (key, number) not in self._steps:
                order, bytes_SGG = self._sizes_of(op, key)
                opened = _Step(key, number, self._switch.open(order, bytes_SGG[number], self.staged))
                self._steps[key, number] = self._by_number[opened.at_switch] = opened
            step = self._steps[key, number]
            step.waiting[rank] = resume
            if self._switch.join(step.at_switch, rank):
                self._finish_step(step, rank)

        return wait

    def _sizes_of(self, op: Exchange, key: Key) -> tuple[Order, IntArray]:
        """The order of an all-to-all, and the bytes of each of its steps; those of a flat one that is cut, of each piece."""
        if key not in self._sizes:
            bytes_SGG = self._bytes_SGG(op, *key[:3])
            if self.ordered is None:
                order = op.order
            elif op.hierarchy is not None and op.phase == "combine":  # a dispatch backwards
                order = self.ordered(bytes_SGG[::-1].transpose(0, 2, 1), op.hierarchy).reversed
            else:
                order = self.ordered(bytes_SGG, op.hierarchy)
            if self._cut_M[key[0]] and len(bytes_SGG) == 1:
                pieces = slices_of(bytes_SGG[0], self.cluster.network, self.program.policies_M[key[0]].slice_s)
                ends_KGG = bytes_SGG * np.arange(pieces + 1)[:, None, None] // pieces
                bytes_SGG = np.diff(ends_KGG, axis=0)
            self._sizes[key] = order, bytes_SGG
        return self._sizes[key]

    def _finish_step(self, step: _Step, rank: int) -> None:
        """Resumes a rank whose transfers are done; records the step once all ranks' are."""
        step.finished += 1
        if step.finished == self.program.ranks:
            carried = self._switch.close(step.at_switch)
            pairs_2X, span_s_2X = np.stack([carried.src_X, carried.dst_X]), np.stack([carried.start_s_X, carried.end_s_X])
            self.record.transfers(*step.key, pairs_2X, carried.bytes_X, span_s_2X)
            del self._steps[step.key, step.number], self._by_number[step.at_switch]
            if step.number == len(self._sizes[step.key][1]) - 1:
                del self._sizes[step.key]
        step.waiting.pop(rank)()

    def _bytes_SGG(self, op: Exchange, model: int, step: int, layer: int) -> IntArray:
        """(S, G, G) int64: the bytes that each GPU sends to each in one all-to-all, in each of its steps."""
        profile, deduplicated = self.profiles[model], self.program.deduplicated_M[model]
        if self.program.gathered:
            nics = nics_of(self.cluster.network)
            return gathered_bytes(profile, layer, step, op.phase, None if nics is None else nics.server_G)
        placed = profile, layer, self._split_MLEG[model][layer]
        if op.groups > 1:
            tokens_SP, _, gpu_P = replica_tokens(profile.tokens_TLSE[step, layer], placed[-1])
            rows_KGG = stage_rows(tokens_SP, gpu_P, op.groups)[0]
            rows_KGG[:, np.arange(self.program.ranks), np.arange(self.program.ranks)] = 0
            return exchange_bytes(rows_KGG if op.phase == "dispatch" else rows_KGG[::-1], profile, op.phase, deduplicated)
        rows_SGG = exchange_rows(*placed, deduplicated=deduplicated, hierarchy=op.hierarchy, window=step)
        return exchange_bytes(rows_SGG, profile, op.phase, deduplicated)
