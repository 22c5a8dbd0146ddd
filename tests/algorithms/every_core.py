"""Calls the compiled modules of aurora.algorithms, and prints what they give."""

from dataclasses import replace

import numpy as np

from aurora.algorithms.alltoall.decomposition import slots
from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, hop_rows
from aurora.algorithms.alltoall.open_shop import search
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check import plans
from aurora.algorithms.network import switch
from aurora.algorithms.placement.server_search import ServerLimits
from aurora.algorithms.replicas.failure_resilient import place_for_failures
from aurora.algorithms.replicas.per_batch import split_least_largest
from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.replicas.registry import place
from aurora.algorithms.search import annealing_core
from aurora.algorithms.search.slot_search import fill, slot_search
from aurora.algorithms.workload.serving_gpus import replica_tokens
from aurora.algorithms.workload.synthetic import draw
from aurora.errors import BrokenPlan
from aurora.types import FailureDomains, GpuSlots, Hierarchy, Network, Order, Servers
from tests.algorithms.search.test_slot_search import drawn


def show(*arrays):
    print(*(array.tolist() if hasattr(array, "tolist") else array for array in arrays))


def orders(rng):
    show(*slots(rng.integers(0, 9, (6, 6)), 20))
    apart_GG = 1 - np.eye(9)
    many_GG = np.minimum(np.arange(1600).reshape(40, 40) % 3, 1.0)
    for seconds_GG, tries in (
        (rng.integers(0, 99, (9, 9)) * apart_GG, 9),
        (rng.uniform(0.95, 1.05, (9, 9)) * apart_GG, 9),
        (many_GG, 0),
    ):
        show(*search(seconds_GG, tries, np.random.default_rng(0)))
    hierarchy = Hierarchy(np.array([0, 0, 0, 1, 1, 2]), 2, 1)
    show(*hop_rows(hierarchical_rows(rng.integers(0, 6, (60, 2)), np.minimum(rng.integers(0, 9, 60), 5), hierarchy), hierarchy))


def network(rng):
    """Shared NICs, incast, start-ups, tiers, stages, paced rows, steps; a log and rows that grow; ranks that join late."""
    switch.FIRST_LOG = 4
    steps_SGG = rng.integers(0, 9, (2, 5, 5)) * (1 - np.eye(5, dtype=int))
    servers = Servers.of([0, 0, 1, 1, 2], 2.5, shared_nic=True)
    over = Network(np.array([1.0, 2, 3, 4, 5]), np.full(5, 3.0), np.full(5, 0.25), servers, 0.1)
    pairs_X2 = rng.permutation(np.argwhere(~np.eye(5, dtype=bool)))
    order = Order("any", pairs_X2, tier_X=pairs_X2.sum(axis=1) % 2)
    for made in (order, replace(order, sends_open=4, recvs_open=4), replace(order, sends_open=4, recvs_open=4, paced=True)):
        for staged in (False, True):
            show(*vars(switch.fluid_pieces(made, steps_SGG, over, staged)).values())
    show(*switch.one_to_one_columns(order, steps_SGG[0], over))
    late = switch.Switch(over)
    for bytes_GG in steps_SGG:
        number = late.open(order, bytes_GG)
        for rank in range(5):
            show(late.join(number, rank), late.run(late.now_s + 0.5), late.now_s)
    while late.busy:
        show(late.run(), late.now_s)
    show(late.close(1).end_s_X)


def checks(rng):
    over = replace(Network.equal(4, 9.0), servers=Servers.of([0, 0, 1, 1], 2.0, shared_nic=True))
    bytes_SGG = rng.integers(1, 99, (2, 4, 4)) * (1 - np.eye(4, dtype=int))
    for method in ("openshop", "birkhoff", "all-at-once"):
        order = ORDER[method](bytes_SGG[0], over, rng=np.random.default_rng(0))
        made = switch.timed_steps(order, bytes_SGG, over)
        halved = replace(made, start_s_X=made.start_s_X / 2, end_s_X=made.end_s_X / 2, rate_Bps_X=made.rate_Bps_X * 2)
        for check, *arguments in (
            (plans.check_order, order, 4),
            (plans.check_order, replace(order, tier_X=np.arange(len(order.pairs_X2)) % 2), 4),
            (plans.check_order, order, 5),
            (plans.check_steps, made, bytes_SGG, over),
            (plans.check_steps, made, bytes_SGG + 1, over),
            (plans.check_steps, replace(made, one_to_one=True), bytes_SGG, over),
            (plans.check_steps, halved, bytes_SGG, over),
        ):
            try:
                show(check(*arguments))
            except BrokenPlan as error:
                show(error)


def placements(rng):
    show(rebalance(rng.random(20) ** 3, np.arange(24).reshape(1, 6, 4) % 20, enough=0.0).held_LGP)
    layer = drawn(rng, 4, 8, 2).phase_sums(np.full(4, 3))
    pairs_GP = np.append(np.arange(8).reshape(4, 2), np.full((4, 1), -1), axis=1)
    held_GP, _ = slot_search(layer, pairs_GP, rng, 2)
    show(held_GP, fill(layer, held_GP)[0])
    tokens = np.argsort(rng.random((300, 8)), axis=1)[:, :3], rng.integers(0, 2, 300)
    costs = np.full(4, 3), rng.random((4, 8)), rng.random((2, 8)), 1.0, 2.0, rng.random(4), rng.random(2)
    limits = ServerLimits(np.array([0, 0, 1, 1]), *costs)
    annealing = annealing_core.Annealing(limits.layer, pairs_GP, tokens, limits, 0.0, 1e-9)
    found_GP, (over_s, rows) = annealing_core.anneal(annealing, rng.random((200, 3)), 30.0, 0.99, 1.0, 1.01)
    show(found_GP, float(over_s), rows, *map(np.asarray, annealing.now))
    load_E = rng.random(12) ** 3
    placed = place(load_E, GpuSlots.equal(4, 4), seed=1).placement
    show(*placed.slots_LG, split_least_largest(load_E[None], placed.held_LGP()[0]))
    show(*place_for_failures(load_E[:6], FailureDomains.equal(5, 3)).slots_LN)


def tokens(rng):
    split_EG = np.array([[0.3, 0.6, 0.1], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    show(replica_tokens(np.arange(9).reshape(3, 3) * 7, split_EG)[0])
    counts_TSE, kept_UK = np.zeros((1, 3, 16), dtype=np.int64), np.zeros((3000, 2), dtype=np.uint8)
    draw(np.arange(1.0, 17), 0.0, 1000, counts_TSE, kept_UK, 2, rng, (4, 2))
    show(counts_TSE, kept_UK)


if __name__ == "__main__":
    for each in (orders, network, checks, placements, tokens):
        each(np.random.default_rng(0))
