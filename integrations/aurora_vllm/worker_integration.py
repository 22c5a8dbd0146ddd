"""What the plugin does in one worker process, in aurora's terms: its settings, the agreed plan, the layers, the recording."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from aurora.errors import AuroraError, BadInput
from aurora.io import load_plan
from aurora.io.engine_records import save_record
from aurora.planner.alltoall.open_shop import openshop
from aurora.runtime.distributed.transport import Transport
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.types import Network, Plan
from aurora.types.arrays import IntArray
from aurora_vllm.layer_alltoall import LayerExchange
from aurora_vllm.metrics import Metrics
from aurora_vllm.plan_fit import Checkpoint, check_fit
from aurora_vllm.settings import Settings
from aurora_vllm.time_slices import TimeSlicedTransport, TimeSlices
from aurora_vllm.traffic_recorder import EngineFacts, LayerObservation, TrafficRecorder

LOG = logging.getLogger("vllm.aurora")
Slots = tuple[tuple[int, ...], ...]


class WorkerIntegration:
    """One expert-parallel rank of `ranks`. checkpoint: of the model to come, None where it cannot be read beforehand; then a
    plan does not fit. cut: (part, parts): the part of a batch's rows that this rank counts as its own, where several have all.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        ranks: int,
        checkpoint: Checkpoint | None,
        experts: int | None,
        cut: tuple[int, int] = (0, 1),
    ) -> None:
        self.settings, self.rank, self.ranks = settings, rank, ranks
        self.plan: Plan | None = None
        self.order = settings.order
        self.recording: TrafficRecorder | None = None
        self.metrics: Metrics | None = None
        self.checkpoint, self._experts, self._cut = checkpoint, experts, cut
        self.time_slice = TimeSlices(thread_port_arbiters(1)[0], False)
        self._transport: Callable[[], Transport] | None = None
        self._exchanges: dict[int, LayerExchange] = {}
        self._step = -1
        self._real = 0  # tokens of this rank's batch that are no padding and no warm-up
        self._recorded_s = time.monotonic()
        self._facts: EngineFacts | None = None
        self._first = 0
        self._on_gpu = False
        self._to = settings.record
        self._here = threading.local()  # the layer, its all-to-all under way, and when this thread left the last layer

    def trouble(self) -> str | None:
        """What keeps this rank from its settings; the plan is read here."""
        if self.settings.plan is None:
            return None
        try:
            plan = load_plan(self.settings.plan)
            if self.checkpoint is None or self._experts is None:
                raise BadInput("the plan cannot be compared with the model: expected a folder with config.json and safetensors")
            check_fit(plan, self.checkpoint, self._experts, self.ranks)
        except AuroraError as error:
            return str(error)
        self.plan = plan
        return None

    @property
    def word(self) -> str:
        """What all ranks must share."""
        models = [] if self.plan is None else [(m.profile_digest, m.placement.slots_LG) for m in self.plan.models]
        orders = [] if self.plan is None else [[order.pairs_X2.tolist() for order in self.plan.models[0].dispatch_L]]
        return hashlib.sha256(repr((self.settings.order, self.settings.colocate, models, orders)).encode()).hexdigest()

    def stand_aside(self) -> None:
        """Placement and all-to-all stay the engine's."""
        self.plan, self.order = None, "stock"

    def layer(self, decoder_layer: int) -> int | None:
        """The number among MoE layers of a decoder layer; None for what the checkpoint does not know, like draft layers."""
        if self.checkpoint is None:
            return decoder_layer
        layers = self.checkpoint.layers
        return layers.index(decoder_layer) if decoder_layer in layers else None

    def held(self, layer: int | None) -> tuple[int, ...] | None:
        """The experts that the plan gives this rank, ascending; None: as the engine has it."""
        if self.plan is None or layer is None or self.plan.models[0].placement.split_LG is not None:
            return None
        return self.plan.models[0].placement.slots_LG[layer][self.rank]

    def connect(self, transport: Callable[[], Transport]) -> None:
        """Exchanges go over this, made on first use."""
        self._transport = transport

    def begin(self, facts: EngineFacts, first: int) -> None:
        """The model is loaded; what is seen from now on counts. first: of this process's layers; with it a pass begins."""
        self._facts, self._first, self._on_gpu = facts, first, torch.cuda.is_available()
        if self.order == "online":  # compiled now, not in the first batch
            ones_RR = np.ones((self.ranks, self.ranks), dtype=np.int64)
            openshop(ones_RR, Network.equal(self.ranks), rng=np.random.default_rng(0))
        if self.settings.record is not None:
            self.recording = TrafficRecorder(facts)
        if self.order != "stock" or self.recording is not None:
            try:
                self.metrics = Metrics(self.rank, self.plan, self.settings)
            except (ValueError, OSError) as error:  # the names are taken in this process, or the port is
                LOG.warning("aurora: no metrics: %s", error)

    # while it serves

    @contextmanager
    def step(self, real_tokens: int) -> Iterator[None]:
        """A forward pass over so many tokens of this rank; 0 for warm-up and for keeping the others company."""
        before, self._real = self._real, real_tokens
        try:
            yield
        finally:
            self._real = before
            if self.recording is not None:
                self.recording.passed()
        if before == 0:
            self._periodically()

    @contextmanager
    def at(self, layer: int, experts_NK: torch.Tensor, spread: bool) -> Iterator[None]:
        """Inside, this thread is in a MoE layer with these choices. spread: rows are already divided over ranks."""
        here, first = self._here, layer == self._first
        self._step += first
        began = self._now()
        seen = None
        if self.recording is not None and self._real:
            mine = self._own_rows(len(experts_NK), spread)
            seen = LayerObservation(self._step, layer, experts_NK.clone(), mine, None if first else began - here.left_s)
            self.recording.saw(seen)
        here.layer, here.batch, here.computing_s, here.exchanged = layer, None, began, None
        try:
            yield
        finally:
            here.left_s = self._now()
            if seen is not None and here.exchanged is None:
                seen.expert_s = here.left_s - here.computing_s
            here.layer = None

    @property
    def exchanges(self) -> bool:
        """Whether the layer that this thread is in has aurora's all-to-all."""
        return self.order != "stock" and getattr(self._here, "layer", None) is not None

    @property
    def under_way(self) -> bool:
        return getattr(self._here, "batch", None) is not None

    def dispatch(
        self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, slots: Callable[[int], Slots]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that this rank's experts need, with weights and experts. slots: who holds what in a layer."""
        here = self._here
        self.time_slice.rest()
        if here.layer not in self._exchanges:
            self._exchanges[here.layer] = self._exchange(here.layer, slots(here.layer), hidden.device)
        rows, weights, index, here.batch = self._exchanges[here.layer].dispatch(hidden, weights, index)
        here.index, here.weights = index, weights
        self.time_slice.compute()
        here.computing_s = self._now()
        return rows, weights, index

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, summed over their experts."""
        here, batch = self._here, self._here.batch
        if self.recording is not None and self._real:
            chosen = here.index[here.weights != 0].cpu().numpy()
            seconds = self._now() - here.computing_s
            self.recording.timed(here.layer, "expert", seconds, len(chosen), len(np.unique(chosen)))
        here.batch, here.exchanged = None, True
        self.time_slice.rest()
        done = self._exchanges[here.layer].combine(answers, batch)
        self.compute()
        if self.recording is not None and self._real:
            self.recording.timed(here.layer, "aggregate", batch.summed_s, len(done))
        return done

    def compute(self) -> None:
        """Until `turns.rest`, or the next all-to-all, this rank computes."""
        if self._real and self.time_slice.through:
            self.time_slice.compute()

    # on command

    def command(self, what: str, folder: str | None = None) -> str:
        """start (afresh, into `folder`), stop, or write: the file of this rank. Gives the sentence to show."""
        if what == "start":
            self._to = Path(folder) if folder else self._to
            if self._to is None or self._facts is None:
                raise BadInput("start: expected a folder to record into")
            self.recording = TrafficRecorder(self._facts)
            return f"rank {self.rank}: recording"
        if what not in ("stop", "write"):
            raise BadInput(f"expected start, stop or write, found {what!r}")
        if self.recording is None:
            return f"rank {self.rank}: records nothing"
        path = self._write()
        if what == "stop":
            self.recording = None
        return f"rank {self.rank}: wrote {path}"

    def _write(self) -> Path:
        assert self.recording is not None
        assert self._to is not None
        self._recorded_s = time.monotonic()
        return save_record(self.recording.record(), self._to)

    def _periodically(self) -> None:
        if time.monotonic() - self._recorded_s < self.settings.record_every_s:
            return
        self._recorded_s = time.monotonic()
        if self.recording is not None:
            try:
                self._write()
            except OSError as error:
                LOG.warning("aurora: cannot write to %s: %s; recording stops", self._to, error.strerror)
                self.recording = None
        if self.metrics is not None and self.recording is not None:
            self.metrics.drifted(self.recording.load_LE())

    def _own_rows(self, rows: int, spread: bool) -> slice:
        part, parts = self._cut
        if spread:
            return slice(0, min(rows, max(0, self._real - part * rows)))
        real = min(rows, self._real)
        each = -(-real // parts)
        return slice(min(real, part * each), min(real, (part + 1) * each))

    def _exchange(self, layer: int, slots_G: Slots, device: torch.device) -> LayerExchange:
        assert self._transport is not None
        transport = TimeSlicedTransport(self._transport(), self.time_slice.turnstile)
        planned = self.plan.models[0] if self.plan is not None and self.order == "plan" else None
        orders = None if planned is None else (planned.dispatch_L[layer], planned.combine_L[layer])
        cluster = None if self.plan is None else self.plan.cluster
        return LayerExchange(layer, transport, slots_G, orders, cluster, self._told, device)

    def _told(self, phase: str, layer: int, seconds: float, bytes_GG: IntArray) -> None:
        if self._real and self.recording is not None:
            self.recording.timed(layer, phase, seconds)
        if self._real and self.metrics is not None:
            self.metrics.exchanged(phase, seconds, bytes_GG)

    def _now(self) -> float:
        if self._on_gpu and self.recording is not None:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()
