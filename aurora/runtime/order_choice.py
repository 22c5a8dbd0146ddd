"""Order choice while serving: each exchange takes the order that calibration found for its size, alike on all ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from aurora.runtime.order_calibration import OrderCalibration
from aurora.types import Order
from aurora.types.arrays import IntArray


@dataclass(frozen=True)
class OrdersUsed:
    """Counts of the methods that one model's exchanges used.

    Args:
        exchanges: number of exchanges by method.
    """

    exchanges: Mapping[str, int]

    def __str__(self) -> str:
        counts = sorted(self.exchanges.items(), key=lambda entry: -entry[1])
        return f"exchanges by {', '.join(f'{method} {count}' for method, count in counts)}"


class OrderChoice:
    """Chooses the order of each exchange of one model by its size, from times measured before serving.

    Ranks know the sizes of all exchanges, and choose alike.

    Args:
        calibration: the methods, and their times.
    """

    def __init__(self, calibration: OrderCalibration) -> None:
        self._calibration = calibration
        self._exchanges: Counter[str] = Counter()

    @property
    def used(self) -> OrdersUsed:
        """Counts of the methods used so far."""
        return OrdersUsed(dict(self._exchanges))

    def order(self, planned: Order, bytes_SRR: IntArray) -> Order | None:
        """Returns the order to use for an exchange in place of `planned`; None: torch's own collective.

        Args:
            planned: the plan's order.
            bytes_SRR: (S, R, R) bytes from each rank (second axis) to each rank (third axis) in each step; S is 1 if flat.
        """
        method = self._calibration.method(float(bytes_SRR.sum()) / bytes_SRR.shape[-1])
        self._exchanges[method if len(bytes_SRR) == 1 else f"{method} over servers"] += 1
        return self._calibration.order(planned, method)
