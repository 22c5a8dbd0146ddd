"""Price a Program event by event: ranks, models, compute locks, port turns and the switch."""

import heapq
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from aurora.errors import BadInput
from aurora.planner.check.plans import check_plan
from aurora.planner.compile import compile_plan
from aurora.planner.network.switch import Switch
from aurora.planner.workload.traffic import deduplicated_tokens, tokens_on_gpu, tokens_to_gpus
from aurora.types import (
    BARRIERS,
    PART_S,
    Barrier,
    Cluster,
    Compute,
    Exchange,
    Order,
    Plan,
    Profile,
    Program,
    Trace,
    TraceRecorder,
    is_turn,
)
from aurora.types.arrays import IntArray
from aurora.types.profile import same_model

Resume = Callable[[], None]
Wait = Callable[[Resume], None]  # calls its argument once the wait is over
Process = Generator[Wait, None, None]
Ordered = Callable[[IntArray], Order]  # the order for one all-to-all's bytes (G, G)


def simulate_plan(
    plan: Plan, profiles: Sequence[Profile], barriers: str = "gpu", ordered: Ordered | None = None, interleave: bool = True
) -> Trace:
    """The predicted Trace of `plan` serving the profiles' windows, one step a window; what follows is as `simulate`'s.

    Raises BadInput where a profile is not of the plan's model, was dealt to another number of ranks, or holds counts alone
    where the plan counts tokens once a GPU.
    """
    check_plan(plan)
    if len(profiles) != len(plan.models):
        raise BadInput(f"simulate: expected {len(plan.models)} profiles as in the plan, found {len(profiles)}")
    for model, profile in zip(plan.models, profiles, strict=True):
        expected = (len(plan.cluster), len(model.dispatch_L), model.placement.experts)
        found = (profile.sources, profile.layers, profile.experts)
        if found != expected or not same_model(profile.fingerprint, model.fingerprint):
            raise BadInput(
                f"profile of {profile.model!r}: expected {model.model!r} on {expected[0]} ranks with {expected[1]} MoE "
                f"layers of {expected[2]} experts, found {found[0]} ranks, {found[1]} layers, {found[2]} experts"
                + (" and other router weights" if found == expected else "")
            )
    return simulate(compile_plan(plan), plan.cluster, profiles, barriers, ordered, interleave)


def simulate(
    program: Program,
    cluster: Cluster,
    profiles: Sequence[Profile],
    barriers: str = "gpu",
    ordered: Ordered | None = None,
    interleave: bool = True,
) -> Trace:
    """The predicted Trace of `program`: model m of any number runs one step for each window of profiles[m].

    Rules: on a rank one model computes at a time, first come first served; turns of the models alternate on its port (a's
    first, b's first, a's second, ...), and a model that is through is skipped. Where turns go by layer, gates and aggregations
    go before experts' work that waits, and between its parts of PART_S. Deterministic.
    barriers: "gpu", a rank goes on when its own transfers are done, and a Barrier lets all ranks of the model go at once;
    "none", Barriers are skipped as well; "global", every phase of a model ends for all ranks together, and only then are GPU
    and port free for another model (the maxima of Aurora's Eq. 1 and Table 2).
    ordered: makes the order of each all-to-all anew from its bytes; None keeps the program's.
    interleave: whether the models run side by side, or one after the other on every rank.
    """
    if barriers not in BARRIERS:
        raise BadInput(f"`barriers`: expected one of {', '.join(BARRIERS)}, found {barriers!r}")
    return _Run(program, cluster, profiles, barriers, ordered, interleave).trace()


@dataclass
class _Lock:
    """One holder at a time, first come first served, brief work first."""

    held: bool = False
    queue: list[Resume] = field(default_factory=list)
    brief: list[Resume] = field(default_factory=list)

    def acquire(self, resume: Resume, brief: bool = False) -> None:
        if self.held:
            (self.brief if brief else self.queue).append(resume)
        else:
            self.held = True
            resume()

    def part(self, resume: Resume) -> None:
        """Let brief work go first."""
        self.queue.insert(0, resume)
        self.release()

    def release(self) -> None:
        if self.brief or self.queue:
            (self.brief or self.queue).pop(0)()
        else:
            self.held = False


class _Turns:
    """A port's alternation between models."""

    def __init__(self, models: int) -> None:
        self._done = [0.0] * models
        self._waiting: dict[int, Resume] = {}

    def acquire(self, model: int, resume: Resume) -> None:
        self._waiting[model] = resume
        self._wake()

    def release(self, model: int, hold_port: bool) -> None:
        self._done[model] += not hold_port
        self._wake()

    def leave(self, model: int) -> None:
        self._done[model] = float("inf")
        self._wake()

    def _wake(self) -> None:
        for model, resume in list(self._waiting.items()):
            if is_turn(self._done, model):
                del self._waiting[model]
                resume()


@dataclass
class _AllToAll:
    key: tuple[int, int, int, str]  # model, step, layer, phase
    number: int  # of the switch
    out: int = 0  # ranks that are through with it
    waiting: dict[int, Resume] = field(default_factory=dict)


class _Run:
    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        profiles: Sequence[Profile],
        barriers: str,
        ordered: Ordered | None,
        interleave: bool,
    ) -> None:
        self.program, self.cluster, self.profiles = program, cluster, profiles
        self.barriers, self.ordered, self.interleave = barriers, ordered, interleave
        self._by_layer = interleave and barriers != "global" and program.by_layer
        self.now = 0.0
        self.record = TraceRecorder("predicted", program.names_M, program.ranks)
        self._heap: list[tuple[float, int, Resume]] = []
        self._sequence = 0
        self._locks, self._ranks = ([_Lock() for _ in range(program.ranks)] for _ in range(2))  # for a phase, for a whole model
        self._turns = [_Turns(len(profiles)) for _ in range(program.ranks)]
        self._meetings: dict[tuple[int, int, int, str], list[Resume]] = {}
        self._exchanges: dict[tuple[int, int, int, str], _AllToAll] = {}
        self._under_way: dict[int, _AllToAll] = {}
        self._switch = Switch(cluster.network)
        self._split_MLEG = [
            [placement.split_EG(layer) for layer in range(len(placement.slots_LG))] for placement in program.placements_M
        ]

    def trace(self) -> Trace:
        running = [self._rank(rank, model) for rank in range(self.program.ranks) for model in range(len(self.profiles))]
        for process in running:
            self._step(process)
        while self._heap or self._switch.busy:
            done = self._switch.run(self._heap[0][0] if self._heap else float("inf"))
            self.now = self._switch.now_s
            for number, rank in done:
                self._through(self._under_way[number], rank)
            while not done and self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
        assert not any(inspect.getgeneratorstate(process) == inspect.GEN_SUSPENDED for process in running), (
            "the program stopped before its end"
        )
        return self.record.trace()

    def _step(self, process: Process) -> None:
        wait = next(process, None)
        if wait is not None:
            wait(lambda: self._step(process))

    def _rank(self, rank: int, model: int) -> Process:
        if not self.interleave:
            yield self._ranks[rank].acquire
        for step in range(self.profiles[model].windows):
            for layer, ops in enumerate(self.program.ops_ML[model]):
                for op in ops:
                    match op:
                        case Compute(phase):
                            yield from self._compute(rank, model, step, layer, phase)
                        case Barrier(phase) if self.barriers != "none":
                            began = self.now
                            yield self._meet(model, step, layer, phase)
                            self.record.add(rank, model, step, layer, phase, began, self.now)
                        case Exchange(phase):
                            if self.interleave:
                                yield lambda resume: self._turns[rank].acquire(model, resume)
                            yield self._join(rank, op, (model, step, layer, phase))
                            if self.barriers == "global":
                                yield self._meet(model, step, layer, phase)
                            self._turns[rank].release(model, op.hold_port)
        self._turns[rank].leave(model)
        if not self.interleave:
            self._ranks[rank].release()

    def _compute(self, rank: int, model: int, step: int, layer: int, phase: str) -> Process:
        if self.barriers == "global":  # first all ranks are here, so that models queue in one sequence on each of them
            yield self._meet(model, step, layer, f"before {phase}")
        lock, brief = self._locks[rank], self._by_layer and phase != "expert"
        yield lambda resume: lock.acquire(resume, brief)
        began, left_s = self.now, self._seconds(rank, model, step, layer, phase)
        while self._by_layer and left_s > PART_S and not brief:
            yield self._sleep(PART_S)
            left_s -= PART_S
            if lock.brief:
                self.record.add(rank, model, step, layer, phase, began, self.now)
                yield lock.part
                began = self.now
        yield self._sleep(left_s)
        self.record.add(rank, model, step, layer, phase, began, self.now)
        if self.barriers == "global":
            yield self._meet(model, step, layer, phase)
        lock.release()

    def _seconds(self, rank: int, model: int, step: int, layer: int, phase: str) -> float:
        profile, gpu = self.profiles[model], self.cluster.gpus[rank]
        tokens_SE = profile.tokens_TLSE[step, layer]
        if phase == "expert":
            return float(profile.seconds(phase, gpu, tokens_on_gpu(tokens_SE, self._split_MLEG[model][layer], rank)).sum())
        return float(profile.seconds(phase, gpu, tokens_SE[rank].sum() // profile.top_k))

    def _sleep(self, seconds: float) -> Wait:
        def wait(resume: Resume) -> None:
            self._sequence += 1
            heapq.heappush(self._heap, (self.now + seconds, self._sequence, resume))

        return wait

    def _meet(self, *key: *tuple[int, int, int, str]) -> Wait:
        """Until all ranks are here. key: model, step, layer, phase."""

        def wait(resume: Resume) -> None:
            arrived = self._meetings.setdefault(key, [])
            arrived.append(resume)
            if len(arrived) == self.program.ranks:
                for go in self._meetings.pop(key):
                    go()

        return wait

    def _join(self, rank: int, op: Exchange, key: tuple[int, int, int, str]) -> Wait:
        def wait(resume: Resume) -> None:
            if key not in self._exchanges:
                bytes_GG = self._bytes_GG(op, *key[:3])
                order = op.order if self.ordered is None else self.ordered(bytes_GG)
                self._exchanges[key] = exchange = _AllToAll(key, self._switch.open(order, bytes_GG))
                self._under_way[exchange.number] = exchange
            exchange = self._exchanges[key]
            exchange.waiting[rank] = resume
            if self._switch.join(exchange.number, rank):
                self._through(exchange, rank)

        return wait

    def _through(self, exchange: _AllToAll, rank: int) -> None:
        """The rank has sent and received all that is its own."""
        exchange.out += 1
        if exchange.out == self.program.ranks:
            carried = self._switch.close(exchange.number)
            self.record.transfers(
                *exchange.key, carried.src_X, carried.dst_X, carried.bytes_X, carried.start_s_X, carried.end_s_X
            )
            del self._exchanges[exchange.key], self._under_way[exchange.number]
        exchange.waiting.pop(rank)()

    def _bytes_GG(self, op: Exchange, model: int, step: int, layer: int) -> IntArray:
        profile = self.profiles[model]
        deduplicated, split_EG = self.program.deduplicated_M[model], self._split_MLEG[model][layer]
        if deduplicated:
            tokens_GG = deduplicated_tokens(
                *profile.required_routing.layer(layer, step), split_EG.argmax(axis=1), self.program.ranks
            )
        else:
            tokens_GG = tokens_to_gpus(profile.tokens_TLSE[step, layer], split_EG)
        np.fill_diagonal(tokens_GG, 0)
        return tokens_GG * profile.row_bytes(deduplicated) if op.phase == "dispatch" else tokens_GG.T * profile.combine_bytes
