"""When following pays: `python bench/follow_map.py` writes bench/results/follow-map-DATE.md.

Two tasks take turns on 32 GPUs of 9 slots: 256 experts, top-8. Windows differ by chance and by prompts (see bench/control.py).
A row says how many windows one port needs to carry all experts of a GPU, in all layers; a column, how many windows a task
lasts. A cell says how much less time expert compute takes with the controller than with the placement that it begins with,
which was planned for the first task. What moves add to steps is taken off. In brackets: of 100 windows, before how many experts
move.
"""

from concurrent.futures import ProcessPoolExecutor
from itertools import product

from control import DRAWN, TOKENS, contiguous
from machine import machine
from tables import Table, today, write

from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.simulator.changing_traffic import changing_traffic, follow_traffic
from aurora.types import ControlOptions, GpuSlots, SyntheticOptions

GPUS, SLOTS = 32, 9
CARRIED = (0.1, 1, 10, 100)  # windows in which a port carries all experts of a GPU
LASTING = (1, 2, 3, 10, 30, 100)
SKEWS = {"zipf:1": "Zipf 1: very uneven", "zipf:0.3": "Zipf 0.3: nearly even"}
LEAST_WINDOWS = 60


def saved(skew: str, carried: float, lasting: int) -> tuple[float, int]:
    """The part of expert compute's time that following saves, and how many windows a change came before, of 100."""
    domains = [draw_profile(skew, DRAWN, SyntheticOptions(windows=12, sources=1, seed=seed)) for seed in range(2)]
    windows = max(LEAST_WINDOWS, 4 * lasting)
    traffic = changing_traffic(domains, "alternating", windows, lasting, TOKENS * GPUS * domains[0].top_k, seed=lasting)
    layers, experts = traffic.load_WLE.shape[1:]
    options = ControlOptions()
    port_Bps = layers * SLOTS / (carried * options.period_s)  # for experts of one byte
    slots = GpuSlots.equal(GPUS, SLOTS)
    held_LGP = rebalance(traffic.mean_WLE[0], contiguous(layers, experts, GPUS, SLOTS), slots).held_LGP
    found = {each.name: each for each in follow_traffic(traffic, held_LGP, slots, 1, port_Bps, options, every=())}
    ours = found["controller"]
    followed = ours.slowest_W.mean() + ours.lengthened_s / (windows * options.period_s)
    return 1 - followed / found["as it is"].slowest_W.mean(), round(100 * ours.changes / windows)


def main() -> None:
    cells = list(product(SKEWS, CARRIED, LASTING))
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(cells, pool.map(saved, *zip(*cells, strict=True)), strict=True))
    tables = []
    for skew, title in SKEWS.items():
        tables.append(Table(title, " | ".join(("all experts of a GPU carried in", *map(str, LASTING)))))
        for carried in CARRIED:
            row = [found[skew, carried, lasting] for lasting in LASTING]
            tables[-1].add(f"{carried:g} windows", *(f"{part:.1%} ({changes})" for part, changes in row))
    assert __doc__ is not None
    heading = [f"# When following pays, {today()}", "", f"`python bench/follow_map.py` on {machine()}."]
    write("follow-map", heading, [__doc__.split("\n\n", 1)[1].strip()], *(table.lines for table in tables))


if __name__ == "__main__":
    main()
