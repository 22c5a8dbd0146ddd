"""Who wins where: ways of using GPUs compared over batches, bandwidths and skews."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aurora.advisor.colocation_ways import compare_ways
from aurora.advisor.ways import SIMULATED_STEPS, WAYS, WaysCompared
from aurora.errors import BadInput
from aurora.types import Cluster, Profile

BATCHES = tuple(1 << power for power in range(10))  # 1 to 512
BANDWIDTHS = (0.25, 1.0, 4.0)
SKEWS = (0.0, 1.0)
MOST_CELLS = 10_000
MOST_BATCH, MOST_FACTOR, MOST_SKEW = 1 << 20, 1e6, 99.0


@dataclass(frozen=True)
class GridCell:
    """One setting, and what each way brings there.

    Attributes:
        bandwidth: factor on the bytes per second of the cluster's ports.
        skew: exponent on the experts' shares: 1 as in the profiles, 0 all equal.
        compared: the ways.
    """

    bandwidth: float
    skew: float
    compared: WaysCompared

    @property
    def batch(self) -> int:
        """Tokens of each rank in a step of each model."""
        return self.compared.batch


def compare_over_grid(
    cluster: Cluster,
    profiles: Sequence[Profile],
    batches: Sequence[int] = BATCHES,
    bandwidths: Sequence[float] = BANDWIDTHS,
    skews: Sequence[float] = SKEWS,
    steps: int = SIMULATED_STEPS,
    seed: int = 0,
    ways: Sequence[str] = WAYS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[GridCell]:
    """Simulates each way at each combination of skews, bandwidths and batches, batches fastest.

    Args:
        cluster, profiles, steps, seed, ways: as in `compare_ways`.
        batches: tokens of each rank in a step.
        bandwidths: factors on the bytes per second of the cluster's ports.
        skews: exponents on the experts' shares.
        progress: called with (what is being done, cells done, cells in all).

    Raises:
        BadInput: if a value is out of range or given twice, there are more than MOST_CELLS cells, or as in `compare_ways`.
        InfeasiblePlan: as in `compare_ways`.
    """
    limits = (("batch", batches, 1, MOST_BATCH), ("bandwidth", bandwidths, 1 / MOST_FACTOR, MOST_FACTOR))
    for name, values, least, most in (*limits, ("skew", skews, 0, MOST_SKEW)):
        wrong = [value for value in values if not least <= value <= most]
        if wrong or not values or len(set(values)) != len(values):
            found = ", ".join(f"{value:g}" for value in wrong or values) or "none"
            raise BadInput(f"`{name}`: expected different values from {least:g} to {most:.12g}, found {found}")
    settings = list(itertools.product(skews, bandwidths, batches))
    if len(settings) > MOST_CELLS:
        raise BadInput(f"`batch`: expected at most {MOST_CELLS} cells, found {len(settings)}")
    cells = []
    for done, (skew, bandwidth, batch) in enumerate(settings):
        progress("cells", done, len(settings))
        compared = compare_ways(cluster.scaled(bandwidth), profiles, batch, skew, steps, seed, ways)
        cells.append(GridCell(bandwidth, skew, compared))
    progress("cells", len(settings), len(settings))
    return cells
