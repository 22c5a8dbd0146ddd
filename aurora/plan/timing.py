"""How long an order takes: its schedule on given bytes and ports."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from aurora.plan.bounds import fluid, one_to_one
from aurora.plan.fabric import cut_bound
from aurora.plan.routes import route
from aurora.plan.switch import Gate, Switch
from aurora.types import Fabric, Order, Schedule
from aurora.types.arrays import FloatArray, IntArray

Row = tuple[float, int, int, int, float, float]  # start, source, destination, bytes, end, rate


def timed(
    order: Order,
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    startup_s: FloatArray | None = None,
    fabric: Fabric | None = None,
) -> Schedule:
    """The schedule that `order` gives for these bytes when all ranks begin together.

    bytes_GG (G, G) int64 with a zero diagonal, rates (G,) bytes per second, startup_s (G,) seconds a message. On a fabric its
    links are shared as well as the ports, and the schedule names the cut that limits it.
    """
    startup_s = np.zeros(len(bytes_GG)) if startup_s is None else startup_s
    if order.one_to_one and not order.paced and fabric is None:
        rows = one_to_one_rows(order, bytes_GG, out_Bps, in_Bps, startup_s)
    else:
        rows = fluid_rows(order, bytes_GG, out_Bps, in_Bps, startup_s, fabric)
    rows.sort()
    start_s, src_X, dst_X, part_X, end_s, rates = ([row[i] for row in rows] for i in range(6))
    return Schedule(
        order.method,
        order.one_to_one,
        np.array(src_X, dtype=np.int64),
        np.array(dst_X, dtype=np.int64),
        np.array(part_X, dtype=np.int64),
        np.array(start_s, dtype=np.float64),
        np.array(end_s, dtype=np.float64),
        np.array(rates, dtype=np.float64),
        fluid(bytes_GG, out_Bps, in_Bps),
        one_to_one(bytes_GG, out_Bps, in_Bps),
        None if fabric is None else cut_bound(bytes_GG, fabric, out_Bps, in_Bps),
    )


def one_to_one_rows(
    order: Order, bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, startup_s: FloatArray
) -> list[Row]:
    """With one partner at a time nothing is shared: a transfer starts when both of its ports are through with the last."""
    gate = Gate(order, bytes_GG, route(out_Bps, in_Bps))
    rate_GG = np.minimum(out_Bps[:, None], in_Bps[None, :]).tolist()
    startup = startup_s.tolist()
    free_out, free_in = [0.0] * len(bytes_GG), [0.0] * len(bytes_GG)
    rows: list[Row] = []
    for (src, dst), size in zip(gate.pairs, gate.size_X, strict=True):
        if size > 0:
            rate_Bps = rate_GG[src][dst]
            start_s = max(free_out[src], free_in[dst]) + max(startup[src], startup[dst])
            end_s = start_s + size / rate_Bps
            free_out[src] = free_in[dst] = end_s
            rows.append((start_s, src, dst, size, end_s, rate_Bps))
    return rows


@dataclass
class _Flight:
    """A transfer under way in `timed`: what it has carried since when at which rate."""

    row: int
    src: int
    dst: int
    size: int
    rate_Bps: float = 0.0
    since_s: float = 0.0
    carried: float = 0.0


def fluid_rows(
    order: Order,
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    startup_s: FloatArray,
    fabric: Fabric | None = None,
) -> list[Row]:
    """Event by event on the switch: whatever is open shares ports and links, and a row ends where its rate changes."""
    n = len(bytes_GG)
    routes = route(out_Bps, in_Bps, fabric)
    switch = Switch(routes, startup_s)
    gate = Gate(order, bytes_GG, routes)
    now = 0.0
    rows: list[Row] = []
    flying: dict[int, _Flight] = {}

    def change(flight: _Flight, rate_Bps: float, ended: bool = False) -> None:
        """Close the row that flowed until now; the next flows at rate_Bps."""
        if flight.rate_Bps > 0:
            before = round(flight.carried)
            flight.carried += flight.rate_Bps * (now - flight.since_s)
            part = (flight.size if ended else round(flight.carried)) - before
            rows.append((flight.since_s, flight.src, flight.dst, part, now, flight.rate_Bps))
        flight.rate_Bps, flight.since_s = rate_Bps, now

    fresh = deque(row for rank in range(n) for row in gate.join(rank))
    while fresh or flying:
        while fresh:
            row = fresh.popleft()
            (src, dst), size = gate.pairs[row], gate.size_X[row]
            flying[switch.open(src, dst, size, gate.most_Bps_X[row])] = _Flight(row, src, dst, size)
        for key, rate_Bps in switch.rates().items():
            if rate_Bps != flying[key].rate_Bps:
                change(flying[key], rate_Bps)
        now = switch.next_event()
        for key in switch.advance(now):
            flight = flying.pop(key)
            change(flight, 0.0, ended=True)
            fresh.extend(gate.finish(flight.row))
    return rows
