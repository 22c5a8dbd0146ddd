"""Deliveries: ways in which GPUs carry out an all-to-all, such as ordered push; their fixed costs, and when each is fastest.

The costs are estimates from the source code of NCCL, DeepEP and Triton; none was measured on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aurora.errors import check_one_of
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray

LAUNCH_S = 4e-6  # of a kernel, from the host
FLAG_S = 1.5e-6  # from a flag's writing to its reading by a peer
STAGE_S = 30e-6  # of the host for a grouped call of NCCL
PUT_S = 4e-6  # of a copy engine for a put and its signal, which are operations of a stream
SIZES = tuple(float(1 << power) for power in range(14, 31, 2))  # bytes that a rank sends, at which deliveries are compared
PAYS = 0.98  # of the seconds without an order: an order must take less to be chosen


@dataclass(frozen=True)
class Delivery:
    """A way in which GPUs carry out an all-to-all; DELIVERY has them by name.

    Attributes:
        once_s: fixed seconds of an exchange: kernel launches, and the flag that ends it.
        transfer_s: fixed seconds of a transfer; zero if its flags are sent while the next transfer's bytes are.
        keeps: the part of an order that it obeys: "nothing"; "senders": the sequence at each sender; "stages": stages, at
            senders and receivers.
        brings_counts: whether counts travel with the rows, so that ranks need not exchange counts before.
    """

    once_s: float
    transfer_s: float
    keeps: str
    brings_counts: bool = False

    def order(self, order: Order) -> Order:
        """Returns the order relaxed to the part that this delivery obeys (`keeps`)."""
        most = max(int(order.pairs_X2.max(initial=0)), 1)  # transfers of a rank
        if self.keeps == "nothing":
            return replace(order, sends_open=most, recvs_open=most, paced=False)
        return replace(order, recvs_open=most) if self.keeps == "senders" and order.one_to_one else order

    def network(self, network: Network) -> Network:
        """Returns the network with this delivery's start-ups in place of its own, and without link curves."""
        return replace(network, startup_s_G=np.full(network.gpus, self.transfer_s), curves=())

    def seconds(self, order: Order, bytes_SGG: IntArray, network: Network) -> float:
        """Returns the predicted seconds of one all-to-all by this delivery.

        Args:
            order: the order of the all-to-all.
            bytes_SGG: (S, G, G) int64 with zero diagonals, bytes from each rank to each other in each step.
            network: ports, fabric and incast.
        """
        from aurora.algorithms.network.switch import steps_seconds  # which workers that only push need not

        steps_s = steps_seconds(self.order(order), bytes_SGG, self.network(network), self.keeps == "stages")
        return self.once_s * len(bytes_SGG) + steps_s


DELIVERY: Mapping[str, Delivery] = {
    "unordered push": Delivery(LAUNCH_S + FLAG_S, 0.0, "nothing", True),
    "ordered push": Delivery(LAUNCH_S + FLAG_S, 0.0, "senders", True),  # flags travel beside the next transfer
    "gated push": Delivery(LAUNCH_S + FLAG_S, 2 * FLAG_S, "stages", True),  # the arrival before, and the permit
    "put and signal": Delivery(FLAG_S, PUT_S, "senders"),
    "stages": Delivery(0.0, STAGE_S, "stages"),
}


def delivery_seconds(
    bytes_GG: IntArray, network: Network, sizes_X: Sequence[float], methods: Sequence[str] = ("openshop", "matchings")
) -> dict[str, FloatArray]:
    """Returns a dict from each delivery's name to (X,) float64, the predicted seconds of one all-to-all at each size.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other; they are scaled to each size.
        network: ports, fabric and incast.
        sizes_X: (X,) bytes that a rank sends on average.
        methods: names in ORDER. For each delivery the fastest of these orders counts.

    Raises:
        BadInput: if there is no such order.
    """
    from aurora.algorithms.alltoall.registry import ORDER

    for method in methods:
        check_one_of("methods", method, ORDER)
    seconds: dict[str, list[float]] = {name: [] for name in DELIVERY}
    for size in sizes_X:
        sized_GG = np.rint(bytes_GG * (size * len(bytes_GG) / max(int(bytes_GG.sum()), 1))).astype(np.int64)
        for name, delivery in DELIVERY.items():
            delivery_network = delivery.network(network)
            orders = (ORDER[method](sized_GG, delivery_network, rng=np.random.default_rng(0)) for method in methods)
            seconds[name].append(min(delivery.seconds(order, sized_GG[None], network) for order in orders))
    return {name: np.array(seconds_X) for name, seconds_X in seconds.items()}


def chosen(seconds: Mapping[str, float]) -> str:
    """Returns the name of the push delivery to use: "unordered push", "ordered push" or "gated push".

    A push that obeys an order is used only if it takes at most PAYS times the seconds of the unordered push.
    """
    ordered = min(("ordered push", "gated push"), key=lambda name: seconds[name])
    return ordered if seconds[ordered] <= PAYS * seconds["unordered push"] else "unordered push"


def pays_from(seconds: Mapping[str, FloatArray], sizes_X: Sequence[float]) -> dict[str, float]:
    """Returns, for each delivery that obeys an order, the smallest size from which on it is worth using.

    It pays if it takes at most PAYS times the seconds of the unordered push.

    Args:
        seconds: as `delivery_seconds` returns them.
        sizes_X: (X,) the sizes of these all-to-alls, rising.

    Returns:
        A dict from the delivery's name to the size; infinity if it does not pay at the largest size.
    """
    sizes = {}
    for name, seconds_X in seconds.items():
        if DELIVERY[name].keeps != "nothing":
            loses_X = np.flatnonzero(seconds_X > PAYS * seconds["unordered push"])
            first = 0 if not len(loses_X) else int(loses_X[-1]) + 1
            sizes[name] = float(sizes_X[first]) if first < len(sizes_X) else np.inf
    return sizes


def delivery_prices(bytes_GG: IntArray, network: Network) -> tuple[dict[str, float], dict[str, float]]:
    """Predicts the seconds of one all-to-all in each delivery, and the sizes from which orders pay.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: ports, fabric and incast.

    Returns:
        (seconds, pays_from): the seconds of each delivery by its name; and for each delivery that obeys an order the smallest
        of SIZES, in bytes that a rank sends, from which on it pays, or infinity.
    """
    seconds = delivery_seconds(bytes_GG, network, [int(bytes_GG.sum()) / len(bytes_GG), *SIZES])
    prices = {name: float(seconds_X[0]) for name, seconds_X in seconds.items()}
    return prices, pays_from({name: seconds_X[1:] for name, seconds_X in seconds.items()}, SIZES)
