"""What one model on one rank shares with its layers: transport, turnstile, clock, trace and the current step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from aurora.errors import BadInput, RankFailed
from aurora.execute.calibrate import Choice
from aurora.execute.turnstile import Turnstile
from aurora.ranks.transport import Transport
from aurora.types import Order, Recorder


class Session:
    """One model's run on one rank. Times are seconds since `began_s` of time.perf_counter. choice: of orders by size, instead
    of the planned ones."""

    def __init__(
        self,
        model: int,
        transport: Transport,
        turnstile: Turnstile,
        recorder: Recorder,
        began_s: float,
        choice: Choice | None = None,
    ) -> None:
        self.transport = transport
        self.mask: torch.Tensor | None = None
        self._model, self._turnstile, self._recorder, self._began_s = model, turnstile, recorder, began_s
        self._choice = choice
        self._rows = 0  # of all ranks, in this layer
        self._step = -1
        self._computing_since = 0.0
        self._on_gpu = torch.cuda.is_available()

    def agree(self, active: bool) -> bool:
        """Whether any rank still has work; a meeting of all ranks."""
        with self._told("between steps"):
            return bool(self.transport.gather(torch.tensor([active], dtype=torch.long)).any())

    def next_step(self, mask: torch.Tensor | None) -> None:
        """Begin a forward pass. mask (tokens,) bool: which of them need experts; None: all."""
        self._step += 1
        self.mask = mask

    def start_compute(self) -> None:
        self._turnstile.start_compute()
        self._computing_since = self._now()

    def stop_compute(self, phase: str, layer: int) -> None:
        self._recorder.add(self.transport.rank, self._model, self._step, layer, phase, self._computing_since, self._now())
        self._turnstile.stop_compute()

    @contextmanager
    def computing(self, phase: str, layer: int) -> Iterator[None]:
        self.start_compute()
        yield
        self.stop_compute(phase, layer)

    def counts(self, row_E: torch.Tensor, layer: int) -> torch.Tensor:
        """(R, E) int64 on the CPU: what every rank sends to every expert's place."""
        began = self._now()
        with self._told(f"layer {layer}, counts"):
            rows = self.transport.gather(row_E)
        self._rows = int(rows.sum())
        self._recorder.add(self.transport.rank, self._model, self._step, layer, "counts", began, self._now())
        return rows

    def exchange(
        self, phase: str, layer: int, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor]
    ) -> None:
        """An all-to-all in `order`, when it is this model's turn on the port."""

        def observe(peer: int, sent: bool, size: int, start_s: float, end_s: float) -> None:
            self._recorder.transfer(
                self.transport.rank, self._model, self._step, layer, phase, peer, sent, size,
                start_s - self._began_s, end_s - self._began_s,
            )  # fmt: skip

        if self._choice is not None:
            rank_bytes = self._rows / self.transport.ranks * sends[0].shape[1] * sends[0].element_size()
            order = self._choice.order(order, rank_bytes)
        with self._turnstile.exchange(self._model), self._told(f"layer {layer}, {phase}"):
            self.transport.exchange(order, sends, recvs, observe)

    def leave(self) -> None:
        """This model needs the port no more."""
        self._turnstile.leave(self._model)

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """An error of the transport also says in which model and where."""
        try:
            yield
        except (BadInput, RankFailed) as error:
            raise type(error)(f"{self._recorder.names_M[self._model]}, {where}: {error}") from None

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # a phase is over when its kernels are
        return time.perf_counter() - self._began_s
