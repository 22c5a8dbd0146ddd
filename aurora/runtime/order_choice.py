"""Order choice while serving: each exchange takes the order that calibration found for its size, alike on all ranks."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aurora.runtime.order_calibration import FLAT, OVER_SERVERS, OrderCalibration
from aurora.types import Order
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class OrdersUsed:
    """Counts of the methods that one model's exchanges used.

    Args:
        exchanges: number of exchanges by method.
        servers: calibrated times of flat and hierarchical all-to-alls by size, as text; empty if the model uses only one kind.
    """

    exchanges: Mapping[str, int]
    servers: str = ""

    def lines(self, name: str) -> Iterator[str]:
        """Yields lines for users: the number of exchanges by method of the model `name`, and the times over servers."""
        counts = sorted(self.exchanges.items(), key=lambda entry: -entry[1])
        yield f"{name}: exchanges by {', '.join(f'{method} {count}' for method, count in counts)}"
        if self.servers:
            yield f"{name}, before serving: {self.servers}"


class OrderChoice:
    """Chooses the order of each exchange of one model by its size, from times measured before serving.

    Ranks know the sizes of all exchanges, and choose alike.

    Args:
        calibration: the methods, and their times.
        servers: calibration of flat against hierarchical all-to-alls; None: the plan decides.
    """

    def __init__(self, calibration: OrderCalibration, servers: OrderCalibration | None = None) -> None:
        self._calibration, self._servers = calibration, servers
        self._exchanges: Counter[str] = Counter()

    @property
    def used(self) -> OrdersUsed:
        """Counts of the methods used so far."""
        return OrdersUsed(dict(self._exchanges), "" if self._servers is None else str(self._servers))

    def is_hierarchical(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns True if the next dispatch and combine are to be hierarchical, False if flat.

        Args:
            flat_RR: (R, R) rows that a flat dispatch would send from each rank (row) to each rank (column).
            row_bytes: size of a row in bytes.
        """
        if self._servers is None:
            return True
        return self._servers.method(float(flat_RR.sum() - flat_RR.trace()) * row_bytes / len(flat_RR)) == OVER_SERVERS

    def order(self, planned: Order, phase: str, bytes_SRR: IntArray) -> Order | None:
        """Returns the order to use for an exchange in place of `planned`; None: torch's own collective.

        Args:
            planned: the plan's order.
            phase: "dispatch" or "combine".
            bytes_SRR: (S, R, R) bytes from each rank (second axis) to each rank (third axis) in each step; S is 1 if flat.
        """
        way = FLAT if len(bytes_SRR) == 1 else OVER_SERVERS
        other = None if self._servers is None else self._servers.orders.get(way)
        if other is not None:  # the plan has no order for the way that it does not take
            planned = other if phase == "dispatch" else other.reversed
        method = self._calibration.method(float(bytes_SRR.sum()) / bytes_SRR.shape[-1])
        self._exchanges[method if way == FLAT else f"{method} {OVER_SERVERS}"] += 1
        return self._calibration.order(planned, method)
