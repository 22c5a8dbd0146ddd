"""Arbitration of a rank's GPU and port between the models that share it: slices, priorities, and a bound on starvation.

This module has the rules alone: no threads, and no clock. Its users are `aurora.runtime.port_arbiter` (threads),
`aurora.runtime.arbiter_process` (processes) and `aurora.simulator.interpreter` (simulated time).

GPU: the most urgent waiting compute runs first; among equally urgent, first come first served (`ComputeQueue`).

Port: models have time slices in one sequence, the same on every rank, so that ranks cannot deadlock. A model joins the sequence
at a virtual time that all ranks agree on while no slice begins on any of them: all report that they are ready, each stops its
port, rank 0 draws the time, and sends it to all. So no rank begins a slice before one that precedes it.

If a rank may have exchanges of two models under way, batch models that share GPUs with interactive ones have a second sequence.
A batch slice begins on a rank if no interactive exchange waits or is under way there, whatever other ranks do. That cannot
deadlock: an interactive exchange never waits for a batch model's; at worst they share the port until the batch slice ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.types import Network, SlicePolicy, has_next_slice
from aurora.types.arrays import IntArray

MOST_OVERTAKEN = 16  # times that compute that waits for a GPU is overtaken by more urgent compute
AHEAD = 2  # slices that a model's other ranks may be ahead of rank 0: those of a layer, as counts are gathered from all
MOST_PIECES = 256  # of one exchange
OUT = float("inf")


def precedence(level: int, ticket: int, overtaken: int) -> tuple[bool, int, int]:
    """Returns the sort key of a compute request that waits for a GPU; the request with the smallest key runs first.

    Args:
        level: urgency, see `Program.compute_level`; higher levels run first.
        ticket: number of the request, rising with time.
        overtaken: how often requests with later tickets ran first; from MOST_OVERTAKEN times on, the request runs before all
            others.
    """
    return overtaken < MOST_OVERTAKEN, -level, ticket


@dataclass(eq=False)
class ComputeRequest:
    """A request to compute on a GPU, waiting or running; for its fields see `precedence`."""

    level: int
    ticket: int
    overtaken: int = 0


class ComputeQueue:
    """Decides which compute request runs next on a GPU.

    A request is made (`ask`), begins (`begin`) once it is `first`, and ends (`end`) or is interrupted (`give_way`).

    Attributes:
        waiting: the requests that have not begun, or were interrupted.
    """

    def __init__(self) -> None:
        self._tickets = 0
        self.waiting: list[ComputeRequest] = []
        self._holder: ComputeRequest | None = None

    @property
    def first(self) -> ComputeRequest | None:
        """The request that may begin now; None if the GPU is taken, or nobody waits."""
        if self._holder is not None or not self.waiting:
            return None
        return min(self.waiting, key=lambda request: precedence(request.level, request.ticket, request.overtaken))

    @property
    def priority_waits(self) -> bool:
        """True if a more urgent request than the running one waits."""
        return self._holder is not None and any(request.level > self._holder.level for request in self.waiting)

    def ask(self, level: int = 0) -> ComputeRequest:
        """Returns a new request, which waits from now on."""
        self._tickets += 1
        self.waiting.append(ComputeRequest(level, self._tickets))
        return self.waiting[-1]

    def begin(self, request: ComputeRequest) -> None:
        """Gives the GPU to a request, which must be `first`."""
        self.waiting.remove(request)
        self._holder, request.overtaken = request, 0
        for other in self.waiting:
            other.overtaken += other.ticket < request.ticket

    def end(self) -> None:
        """Frees the GPU."""
        self._holder = None

    def give_way(self) -> ComputeRequest:
        """Interrupts the running request, which becomes the next one of its level, and returns it."""
        holder, self._holder = self._holder, None
        assert holder is not None
        self.waiting.append(holder)
        return holder


def slices_of(bytes_GG: IntArray, network: Network, slice_s: float) -> int:
    """Returns the number of time slices into which an exchange is cut, so that none occupies a port longer than `slice_s`.

    Args:
        bytes_GG: (G, G) bytes from each GPU (row) to each GPU (column).
        network: the ports' rates.
        slice_s: maximum seconds of a slice.
    """
    sent_GG = bytes_GG - np.diag(np.diag(bytes_GG))
    took_s = max((sent_GG.sum(axis=1) / network.out_Bps_G).max(), (sent_GG.sum(axis=0) / network.in_Bps_G).max())
    return int(np.clip(np.ceil(took_s / slice_s), 1, MOST_PIECES))


def piece(count: int, number: int, pieces: int) -> slice:
    """Returns the rows of piece `number` when `count` rows are cut into `pieces` pieces of nearly equal size.

    Example:
        >>> [piece(5, number, 2) for number in range(2)]
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(count * number // pieces, count * (number + 1) // pieces)


class PortSlices:
    """Decides which model's exchange may begin on one port; the rules are in the module's docstring.

    An exchange is requested (`ask`), begins (`begin`) once `may_begin` is true, and ends (`end`). The next slice of a sequence
    is that of the model which `has_next_slice` names.

    Args:
        policies_M: the models' policies.
        overlapping: whether exchanges of an interactive and of a batch model may be under way at once. On NCCL they may not.

    Attributes:
        joins_M: for each model, True if it joins a sequence for each exchange and leaves after it, so others never wait for it.
    """

    def __init__(self, policies_M: Sequence[SlicePolicy], overlapping: bool) -> None:
        models = len(policies_M)
        self._yields_M = [overlapping and policy.yields for policy in policies_M]  # in which of the two sequences a model is
        several = sum(self._yields_M) > 1 or not overlapping
        self.joins_M = tuple(several and policy.yields for policy in policies_M)
        self._base_M, self._done_M = [0.0] * models, [0] * models
        self._slices_M: list[int | None] = [None] * models
        self._next_M = [OUT if joins else 0.0 for joins in self.joins_M]
        self._past_C = [0.0, 0.0]  # no model that has left this sequence had a slice at this time or later
        self._stopped_C = [0, 0]  # models that join this sequence now: no slice of it begins meanwhile
        self._urgent: set[int] = set()  # models whose exchange waits or is under way and goes before those that yield
        self._asking: set[int] = set()
        self._overtaken_M = [0] * models

    def add(self, policy: SlicePolicy) -> int:
        """Adds a model, which is in no sequence until `join`. Returns its number."""
        self._yields_M.append(policy.yields)
        self._base_M.append(0.0)
        self._done_M.append(0)
        self._slices_M.append(None)
        self._next_M.append(OUT)
        self._overtaken_M.append(0)
        return len(self._base_M) - 1

    def single(self, model: int) -> bool:
        """Returns whether no other model uses this model's sequence of slices."""
        return self._yields_M.count(self._yields_M[model]) == 1

    def ask(self, model: int) -> None:
        """Registers that an exchange of the model waits for the port."""
        self._asking.add(model)
        if not self._yields_M[model]:
            self._urgent.add(model)

    def may_begin(self, model: int) -> bool:
        """Returns whether the model's waiting exchange may begin now."""
        kind = self._yields_M[model]
        members = [other for other, yields in enumerate(self._yields_M) if yields == kind]
        next_M = [self._next_M[other] for other in members]
        if self._stopped_C[kind] or not has_next_slice(next_M, members.index(model)):
            return False
        return not (kind and self._urgent) or self._overtaken_M[model] >= MOST_OVERTAKEN

    def begin(self, model: int) -> None:
        """Begins the model's exchange."""
        self._asking.discard(model)
        self._overtaken_M[model] = 0
        for other in self._asking:
            self._overtaken_M[other] += self._yields_M[other] and not self._yields_M[model]

    def end(self, model: int, hold_port: bool = False) -> None:
        """Ends the model's exchange and, unless `hold_port`, its time slice."""
        self._urgent.discard(model)
        if hold_port:
            return
        self._done_M[model] += 1
        self._next_M[model] = self._time(model, self._done_M[model])
        if self._done_M[model] == self._slices_M[model]:
            self.leave(model)

    def leave(self, model: int) -> None:
        """Takes the model out of its sequence: its slices are skipped from now on."""
        self._urgent.discard(model)
        if self._next_M[model] < OUT:
            kind = self._yields_M[model]
            self._past_C[kind] = max(self._past_C[kind], self._next_M[model])
            self._next_M[model] = OUT

    def stop(self, model: int, more: int) -> None:
        """Adds `more`, 1 or -1, to the number of models that are about to join this model's sequence.

        While that number is above zero, no slice of the sequence begins.
        """
        self._stopped_C[self._yields_M[model]] += more

    def draw(self, model: int) -> float:
        """Returns a virtual time at which a model can join this model's sequence: no slice on any rank has reached it.

        Called on rank 0 only.
        """
        kind = self._yields_M[model]
        others = [other for other, time in enumerate(self._next_M) if time < OUT and self._yields_M[other] == kind]
        ends = (self._time(other, self._slices_M[other] or self._done_M[other] + AHEAD) for other in others)
        return max([self._past_C[kind], *ends])

    def join(self, model: int, base: float, slices: int | None = None) -> None:
        """Puts the model into its sequence.

        Args:
            model: the model, which is not in the sequence.
            base: virtual time of its first slice, drawn by rank 0.
            slices: number of slices after which the model leaves; None: it leaves when `leave` is called.
        """
        self._base_M[model], self._done_M[model], self._slices_M[model] = base, 0, slices
        self._next_M[model] = base

    def _time(self, model: int, slices: int) -> float:
        """The virtual time of a model's next slice once `slices` are over."""
        return self._base_M[model] + slices
