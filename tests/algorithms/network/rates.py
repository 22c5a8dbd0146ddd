"""The switch's rates for flows that start together."""

import numpy as np

from aurora.algorithms.network.switch import Switch
from aurora.types import Order


def fair_rates(src, dst, network):
    """(X,) the rates of flows that start together, as the switch shares them; of each pair there is one."""
    n, switch = network.gpus, Switch(network.without_startup)
    bytes_GG = np.zeros((n, n), dtype=int)
    bytes_GG[src, dst] = 10**6
    number = switch.open(Order("flows", np.stack([src, dst], axis=1), n, n), bytes_GG)
    for rank in range(n):
        switch.join(number, rank)
    switch.run(0.0)
    rates = rates_of(switch)
    return np.array([rates[pair] for pair in zip(src.tolist(), dst.tolist(), strict=True)])


def rates_of(switch):
    """The bytes per second of each transfer under way, by (source, destination), as of the last `run`."""
    events_s = switch._event_s[len(switch._event_s) // 2 :]
    rows = switch._rows[np.flatnonzero(events_s < np.inf)]
    return dict(zip(map(tuple, rows["rank"].tolist()), rows["rate_Bps"].tolist(), strict=True))
