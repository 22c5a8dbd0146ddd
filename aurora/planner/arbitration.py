"""Arbitration of a rank's GPU and port between the models that share it: slices, priorities, and a bound on starvation.

Pure: no threads, and no clock. The drivers are `aurora.runtime.port_arbiter` (threads), `aurora.runtime.process_port_arbiter`
(processes, which keep the state in a table that they share) and `aurora.simulator.interpreter` (simulated time).

A GPU goes to the most urgent compute that waits, of equally urgent ones first come first served (`ComputeQueue`).

On a port models have slices in one sequence, the same on every rank, so that ranks cannot wait for each other in a circle. A
model joins it at a virtual time that rank 0 draws. Ranks agree on it while no slice begins on any of them: first all say that
they are ready, then each stops its port, then rank 0 draws, and its time is sent to all. So no rank runs a slice of another in
ignorance of one that comes before it.

Where a rank may have exchanges of two models under way, batch models beside interactive ones have a sequence of their own. A
slice of theirs begins on a rank while no interactive exchange waits or is under way there, whatever other ranks do. That makes
no circle: an interactive exchange waits for no batch model's, which at worst has the port with it until that slice is over.
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
    """Returns what compute that waits for a GPU is compared by: the smallest goes first.

    Args:
        level: how urgent it is, see `Program.compute_level`.
        ticket: rises with the time of its request.
        overtaken: how often compute with a later ticket went first; after MOST_OVERTAKEN times it goes before all other.
    """
    return overtaken < MOST_OVERTAKEN, -level, ticket


@dataclass(eq=False)
class ComputeRequest:
    """Compute that waits for a GPU or has it; see `precedence`."""

    level: int
    ticket: int
    overtaken: int = 0


class ComputeQueue:
    """Says whose compute has a GPU next. Every request is made (`ask`), begins once it is `first`, and ends.

    Attributes:
        waiting: the requests that have not begun, or have given way.
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
        """True if a more urgent request than the holder's waits."""
        return self._holder is not None and any(request.level > self._holder.level for request in self.waiting)

    def ask(self, level: int = 0) -> ComputeRequest:
        """Returns a new request, which waits from now on."""
        self._tickets += 1
        self.waiting.append(ComputeRequest(level, self._tickets))
        return self.waiting[-1]

    def begin(self, request: ComputeRequest) -> None:
        """Gives the GPU to the `first` request."""
        self.waiting.remove(request)
        self._holder, request.overtaken = request, 0
        for other in self.waiting:
            other.overtaken += other.ticket < request.ticket

    def end(self) -> None:
        """Frees the GPU."""
        self._holder = None

    def give_way(self) -> ComputeRequest:
        """Lets the holder wait again, as the next one of its level, and returns its request."""
        holder, self._holder = self._holder, None
        assert holder is not None
        self.waiting.append(holder)
        return holder


def slices_of(bytes_GG: IntArray, network: Network, slice_s: float) -> int:
    """Returns into how many time slices an exchange is cut so that none takes longer than `slice_s` on any port.

    Args:
        bytes_GG: (G, G) bytes from each GPU (row) to each GPU (column).
        network: the ports' rates.
        slice_s: seconds of a port.
    """
    sent_GG = bytes_GG - np.diag(np.diag(bytes_GG))
    took_s = max((sent_GG.sum(axis=1) / network.out_Bps_G).max(), (sent_GG.sum(axis=0) / network.in_Bps_G).max())
    return int(np.clip(np.ceil(took_s / slice_s), 1, MOST_PIECES))


def piece(count: int, number: int, pieces: int) -> slice:
    """Returns which of `count` rows are in a piece, where they are cut evenly.

    Example:
        >>> [piece(5, number, 2) for number in range(2)]
        [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(count * number // pieces, count * (number + 1) // pieces)


class SliceSequence:
    """Says which model has the next time slice of one port; see `has_next_slice`.

    Models are in the sequence from the virtual time 0 on, but for those that join it.

    Args:
        policies_M: the models' policies.
        joins_M: which of them are in the sequence only from `join` until they leave.
    """

    def __init__(self, policies_M: Sequence[SlicePolicy], joins_M: Sequence[bool]) -> None:
        self._weight_M = [policy.weight for policy in policies_M]
        self._base_M, self._done_M = [0.0] * len(policies_M), [0] * len(policies_M)
        self._slices_M: list[int | None] = [None] * len(policies_M)
        self._next_M = [OUT if joins else 0.0 for joins in joins_M]
        self._past = 0.0  # no model that has left had a slice at this time or later

    def has_next(self, model: int) -> bool:
        """Returns whether the next slice is the model's."""
        return has_next_slice(self._next_M, model)

    def finish(self, model: int) -> None:
        """Ends a slice of the model."""
        self._done_M[model] += 1
        self._next_M[model] = self._time(model, self._done_M[model])
        if self._done_M[model] == self._slices_M[model]:
            self.leave(model)

    def leave(self, model: int) -> None:
        """Takes the model out of the sequence: its slices are skipped from now on."""
        if self._next_M[model] < OUT:
            self._past = max(self._past, self._next_M[model])
            self._next_M[model] = OUT

    def draw(self) -> float:
        """Returns a virtual time, on rank 0, that no slice on any rank has reached or been promised."""
        there = [model for model, time in enumerate(self._next_M) if time < OUT]
        return max([self._past, *(self._time(model, self._slices_M[model] or self._done_M[model] + AHEAD) for model in there)])

    def join(self, model: int, base: float, slices: int | None = None) -> None:
        """Puts a model that is not in the sequence into it.

        Args:
            model: the model.
            base: virtual time of its first slice, drawn by rank 0.
            slices: after how many slices the model leaves; None: when `leave` is called.
        """
        self._base_M[model], self._done_M[model], self._slices_M[model] = base, 0, slices
        self._next_M[model] = base

    def _time(self, model: int, done: int) -> float:
        """The virtual time of a model's next slice once `done` are over."""
        return self._base_M[model] + done / self._weight_M[model]


class PortSlices:
    """Says which model's exchange may begin on one port, by the rules of this module.

    Every exchange is asked for (`ask`), begins once `may_begin`, and ends.

    Args:
        policies_M: the models' policies.
        overlapping: whether exchanges of an interactive and of a batch model may be under way at once. On NCCL they may not.

    Attributes:
        joins_M: which models join a sequence for each exchange, as nobody else is to wait for them.
    """

    def __init__(self, policies_M: Sequence[SlicePolicy], overlapping: bool) -> None:
        self._yields_M = [overlapping and policy.yields for policy in policies_M]
        several = sum(self._yields_M) > 1 or not overlapping
        self.joins_M = tuple(several and policy.yields for policy in policies_M)
        self._members_C = [[model for model, each in enumerate(self._yields_M) if each == kind] for kind in (False, True)]
        self._sequence_C = [
            SliceSequence([policies_M[model] for model in members], [self.joins_M[model] for model in members])
            for members in self._members_C
        ]
        self._stopped_C = [0, 0]  # models that join this sequence now: no slice of it begins meanwhile
        self._urgent: set[int] = set()  # models whose exchange waits or is under way and goes before those that yield
        self._asking: set[int] = set()
        self._overtaken_M = [0] * len(policies_M)

    def single(self, model: int) -> bool:
        """Returns whether no other model is ever in the model's sequence."""
        return len(self._members_C[self._yields_M[model]]) == 1

    def ask(self, model: int) -> None:
        """Says that an exchange of the model waits from now on."""
        self._asking.add(model)
        if not self._yields_M[model]:
            self._urgent.add(model)

    def may_begin(self, model: int) -> bool:
        """Returns whether an exchange of the model that waits may begin now."""
        sequence, member = self._place(model)
        if self._stopped_C[self._yields_M[model]] or not sequence.has_next(member):
            return False
        return not (self._yields_M[model] and self._urgent) or self._overtaken_M[model] >= MOST_OVERTAKEN

    def begin(self, model: int) -> None:
        """Begins the model's exchange."""
        self._asking.discard(model)
        self._overtaken_M[model] = 0
        for other in self._asking:
            self._overtaken_M[other] += self._yields_M[other] and not self._yields_M[model]

    def end(self, model: int, hold_port: bool = False) -> None:
        """Ends the model's exchange, and its slice too unless that goes on through the next exchange."""
        self._urgent.discard(model)
        if not hold_port:
            sequence, member = self._place(model)
            sequence.finish(member)

    def leave(self, model: int) -> None:
        """Takes the model out of its sequence; see `SliceSequence.leave`."""
        self._urgent.discard(model)
        sequence, member = self._place(model)
        sequence.leave(member)

    def stop(self, model: int, more: int) -> None:
        """Counts one model `more` or less that joins this model's sequence, in which no slice begins while there are any."""
        self._stopped_C[self._yields_M[model]] += more

    def draw(self, model: int) -> float:
        """Returns a virtual time to join the model's sequence at; see `SliceSequence.draw`."""
        return self._place(model)[0].draw()

    def join(self, model: int, base: float, slices: int | None = None) -> None:
        """Puts the model into its sequence; see `SliceSequence.join`."""
        sequence, member = self._place(model)
        sequence.join(member, base, slices)

    def _place(self, model: int) -> tuple[SliceSequence, int]:
        """The model's sequence, and its number there."""
        kind = self._yields_M[model]
        return self._sequence_C[kind], self._members_C[kind].index(model)
