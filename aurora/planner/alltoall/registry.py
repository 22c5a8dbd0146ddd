"""ORDER: how one all-to-all is ordered, by name. A new order is one function like OrderStrategy and one line here.

`schedule_time.timed` computes how long an order takes, so that all orders and baselines are timed by one model of the network.
"""

from typing import Protocol

import numpy as np

from aurora.planner.alltoall.baselines import all_at_once, aurora_alg1, paced, random_order, smallest_first, spread_out
from aurora.planner.alltoall.birkhoff import birkhoff
from aurora.planner.alltoall.hierarchical_order import hierarchical
from aurora.planner.alltoall.open_shop import openshop
from aurora.planner.alltoall.split_transfers import openshop_best
from aurora.planner.alltoall.stages import matchings
from aurora.planner.alltoall.sub_channels import sub_channels
from aurora.types import Network, Order
from aurora.types.arrays import IntArray


class OrderStrategy(Protocol):
    """Signature of every entry of ORDER.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: the network that carries them.
        rng: for drawn priorities; equal generator states give equal orders.

    Returns:
        An Order of all ordered pairs of ranks.
    """

    def __call__(self, bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order: ...


ORDER: dict[str, OrderStrategy] = {
    "openshop": openshop,
    "openshop-best": openshop_best,
    "birkhoff": birkhoff,
    "sub-channels": sub_channels,
    "matchings": matchings,
    "paced": paced,
    "hierarchical": hierarchical,
    "aurora-alg1": aurora_alg1,
    "sjf": smallest_first,
    "random": random_order,
    "spread-out": spread_out,
    "all-at-once": all_at_once,
}
