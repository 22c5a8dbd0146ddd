"""Prices of deliveries: by hand, against the bound, and from which size an order pays."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.network.bounds import fluid_bound
from aurora.algorithms.network.delivery import (
    DELIVERY,
    FLAG_S,
    LAUNCH_S,
    PUT_S,
    STAGE_S,
    Delivery,
    chosen,
    delivery_seconds,
    pays_from,
)
from aurora.errors import BadInput
from aurora.types import Network, Order

RING = np.array([[0, 6, 0], [0, 0, 6], [6, 0, 0]]) * 10**6  # each rank sends to the next


def test_two_stages_by_hand():
    """Two transfers of a rank, of 1 s each: what comes before each of them, and once."""
    order = Order("by hand", np.array([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]]))
    bytes_SGG = (10**6 * (1 - np.eye(3, dtype=np.int64)))[None]
    network = Network.equal(3, 1e6, startup_s=5.0)  # start-ups of messages do not count
    took = {name: each.seconds(order, bytes_SGG, network) for name, each in DELIVERY.items()}
    assert took == pytest.approx(
        {
            "unordered push": LAUNCH_S + FLAG_S + 2,
            "ordered push": LAUNCH_S + FLAG_S + 2,
            "gated push": LAUNCH_S + FLAG_S + 2 * (1 + 2 * FLAG_S),
            "put and signal": FLAG_S + 2 * (1 + PUT_S),
            "stages": 2 * (1 + STAGE_S),
        },
        abs=1e-12,
    )


def test_senders_that_keep_their_sequence_share_a_receiver():
    """Two senders reach one receiver at once: gated they come one after the other, both ways within the bound's limits."""
    order = Order("by hand", np.array([[0, 2], [1, 2], [0, 1], [1, 0], [2, 0], [2, 1]]))
    bytes_GG = np.array([[0, 10**6, 10**6], [0, 0, 10**6], [0, 0, 0]])
    network = Network.equal(3, 1e6)
    free, gated = (Delivery(0.0, 0.0, keeps).seconds(order, bytes_GG[None], network) for keeps in ("senders", "stages"))
    assert free == pytest.approx(3)  # 0 -> 2 and 1 -> 2 take 2 s, and only then comes 0 -> 1
    assert gated == pytest.approx(2) == pytest.approx(fluid_bound(bytes_GG, network))


def test_an_order_pays_where_receivers_lose_to_several_senders():
    rng = np.random.default_rng(0)
    bytes_GG = rng.integers(1, 100, (8, 8)) * (1 - np.eye(8, dtype=np.int64))
    sizes_X = [1e4, 1e6, 1e8]
    lossless, lossy = (replace(Network.equal(8, 50e9), incast=incast) for incast in (0.0, 0.1))
    fair, unfair = (delivery_seconds(bytes_GG, network, sizes_X) for network in (lossless, lossy))
    assert pays_from(fair, sizes_X) == dict.fromkeys((name for name in DELIVERY if name != "unordered push"), np.inf)
    assert pays_from(unfair, sizes_X)["gated push"] <= 1e8 < np.inf
    for seconds in (fair, unfair):
        for name, seconds_X in seconds.items():
            assert (np.diff(seconds_X) > 0).all(), name
            for size, took_s in zip(sizes_X, seconds_X, strict=True):
                assert took_s >= fluid_bound(bytes_GG, lossless) * size * 8 / bytes_GG.sum() * (1 - 1e-3)
    assert chosen({name: float(seconds_X[0]) for name, seconds_X in fair.items()}) == "unordered push"
    assert chosen({name: float(seconds_X[-1]) for name, seconds_X in unfair.items()}) in ("ordered push", "gated push")


def test_an_unknown_order_is_refused():
    with pytest.raises(BadInput, match="methods"):
        delivery_seconds(RING, Network.equal(3), [1.0], ["none"])
