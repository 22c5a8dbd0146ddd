"""The dense open shop, compiled: found in microseconds, into buffers that are allocated once.

Without numba's JIT (NUMBA_DISABLE_JIT=1) the same code runs in plain Python, for debugging.
"""

import numpy as np
from numba import njit

from aurora.types.arrays import FloatArray, IntArray

AMPLITUDES = (0.1, 0.3, 1.0)  # of drawn priorities, as shares of the bound, in turn


class DenseShop:
    """Dense open-shop schedules of `ranks` senders and receivers. One thread at a time.

    A schedule is dense when no sender and receiver that still have something for each other are ever both free. After `run`
    or `search` the rows [:count] of src_X, dst_X (int64), start_s_X and end_s_X (float64) are the transfers by start.
    """

    def __init__(self, ranks: int) -> None:
        rows = max(1, ranks * ranks)
        self.ranks = ranks
        self.count = 0
        self.src_X: IntArray = np.zeros(rows, dtype=np.int64)
        self.dst_X: IntArray = np.zeros(rows, dtype=np.int64)
        self.start_s_X: FloatArray = np.zeros(rows)
        self.end_s_X: FloatArray = np.zeros(rows)
        self._plain, self._drawn, self._best = np.zeros((3, 2 * ranks))
        self._scratch = (
            np.zeros(2 * ranks),  # remaining load of each port, senders first
            np.zeros(2 * ranks, dtype=np.int64),  # transfers left on each port
            np.zeros((ranks, ranks), dtype=np.bool_),  # pairs that wait
            np.zeros((2, ranks + 1), dtype=np.int64),  # free senders, free receivers
            np.zeros(2 * ranks, dtype=np.int64),  # place of a port in its list, -1 when busy
            np.zeros(ranks + 1),  # heap of ends
            np.zeros(ranks + 1, dtype=np.int64),  # and of the pairs that end
            np.zeros(2 * ranks, dtype=np.int64),  # ports that have just become free
        )

    def run(self, seconds_GG: FloatArray) -> float:
        """The makespan in seconds of the schedule that serves the port with the largest remaining load first.

        seconds_GG (ranks, ranks) float64: how long each transfer takes alone; zero means none.
        """
        return self._run(seconds_GG, self._plain)

    def search(self, seconds_GG: FloatArray, tries: int, bound_s: float, rng: np.random.Generator) -> float:
        """The shortest of `run` and `tries` schedules with drawn priorities; stops at bound_s. Deterministic for rng."""
        makespan_s = self._run(seconds_GG, self._plain)
        best = self._plain
        for number in range(tries):
            if makespan_s <= bound_s:
                break
            amplitude_s = AMPLITUDES[number % len(AMPLITUDES)] * bound_s
            self._drawn[:] = (rng.random(2 * self.ranks) - 0.5) * amplitude_s
            drawn_s = self._run(seconds_GG, self._drawn)
            if drawn_s < makespan_s:
                self._best, self._drawn = self._drawn, self._best
                makespan_s, best = drawn_s, self._best
        return self._run(seconds_GG, best)

    def _run(self, seconds_GG: FloatArray, favour: FloatArray) -> float:
        outputs = (self.src_X, self.dst_X, self.start_s_X, self.end_s_X)
        self.count, makespan_s = _dense(seconds_GG, favour, *outputs, *self._scratch)
        return float(makespan_s)


def warm_up() -> None:
    """Compile now (a second or two, once on a machine) instead of in the first schedule."""
    DenseShop(2).run(np.array([[0.0, 1.0], [1.0, 0.0]]))


@njit(cache=True)
def _dense(seconds_GG, favour, src_X, dst_X, start_X, end_X, left, todo, waits, free, place, heap_s, heap_p, fresh):
    """Whenever ports become free, the busiest of them first takes its busiest free partner. Gives (transfers, makespan).

    Only pairs with a port that has just become free need a look: of two that have both been free for a while nothing waits.
    Ports are numbered senders first; favour is added to a port's load.
    """
    n = seconds_GG.shape[0]
    for port in range(2 * n):
        left[port] = favour[port]
        todo[port] = 0
        place[port] = -1
    for i in range(n):
        for j in range(n):
            waits[i, j] = seconds_GG[i, j] > 0.0
            if waits[i, j]:
                left[i] += seconds_GG[i, j]
                left[n + j] += seconds_GG[i, j]
                todo[i] += 1
                todo[n + j] += 1
    senders = 0
    receivers = 0
    arrivals = 0
    for i in range(n):
        if todo[i] > 0:
            free[0, senders] = i
            place[i] = senders
            senders += 1
            fresh[arrivals] = i
            arrivals += 1
        if todo[n + i] > 0:
            free[1, receivers] = i
            place[n + i] = receivers
            receivers += 1
            fresh[arrivals] = n + i
            arrivals += 1
    flying = 0
    done = 0
    now = 0.0
    while True:
        # Busiest first: insertion sort for the few of an event, a real sort for the many at the start.
        if arrivals > 32:
            fresh[:arrivals] = fresh[:arrivals][np.argsort(-left[fresh[:arrivals]])]
        else:
            for k in range(1, arrivals):
                port = fresh[k]
                at = k - 1
                while at >= 0 and left[fresh[at]] < left[port]:
                    fresh[at + 1] = fresh[at]
                    at -= 1
                fresh[at + 1] = port
        for k in range(arrivals):
            port = fresh[k]
            if place[port] < 0:
                continue
            partner = -1
            most = -np.inf
            if port < n:
                for at in range(receivers):
                    other = free[1, at]
                    if waits[port, other] and left[n + other] > most:
                        most = left[n + other]
                        partner = other
                src, dst = port, partner
            else:
                for at in range(senders):
                    other = free[0, at]
                    if waits[other, port - n] and left[other] > most:
                        most = left[other]
                        partner = other
                src, dst = partner, port - n
            if partner < 0:
                continue
            senders -= 1
            last = free[0, senders]
            free[0, place[src]] = last
            place[last] = place[src]
            place[src] = -1
            receivers -= 1
            last = free[1, receivers]
            free[1, place[n + dst]] = last
            place[n + last] = place[n + dst]
            place[n + dst] = -1
            took = seconds_GG[src, dst]
            end = now + took
            src_X[done] = src
            dst_X[done] = dst
            start_X[done] = now
            end_X[done] = end
            done += 1
            waits[src, dst] = False
            left[src] -= took
            left[n + dst] -= took
            todo[src] -= 1
            todo[n + dst] -= 1
            at = flying
            flying += 1
            while at > 0 and heap_s[(at - 1) >> 1] > end:
                heap_s[at] = heap_s[(at - 1) >> 1]
                heap_p[at] = heap_p[(at - 1) >> 1]
                at = (at - 1) >> 1
            heap_s[at] = end
            heap_p[at] = src * n + dst
        if flying == 0:
            return done, now
        now = heap_s[0]
        arrivals = 0
        while flying > 0 and heap_s[0] <= now:
            src = heap_p[0] // n
            dst = heap_p[0] - src * n
            flying -= 1
            end = heap_s[flying]
            pair = heap_p[flying]
            at = 0
            while 2 * at + 1 < flying:
                child = 2 * at + 1
                if child + 1 < flying and heap_s[child + 1] < heap_s[child]:
                    child += 1
                if heap_s[child] >= end:
                    break
                heap_s[at] = heap_s[child]
                heap_p[at] = heap_p[child]
                at = child
            heap_s[at] = end
            heap_p[at] = pair
            if todo[src] > 0:
                free[0, senders] = src
                place[src] = senders
                senders += 1
                fresh[arrivals] = src
                arrivals += 1
            if todo[n + dst] > 0:
                free[1, receivers] = dst
                place[n + dst] = receivers
                receivers += 1
                fresh[arrivals] = n + dst
                arrivals += 1
