"""Server search: places experts by simulated annealing, so that few rows cross between servers.

A token crosses once to each server that holds experts of it, but not to its own. So the tokens are the edges of a hypergraph
over experts, and the rows that cross are its connectivity, the objective of hypergraph partitioning. Limits on the seconds of
each GPU and each server keep the load balanced.
"""

from typing import NamedTuple

import numpy as np

from aurora.algorithms.search import annealing_core as core
from aurora.algorithms.search.phase_sums import PhaseSums
from aurora.algorithms.search.slot_search import slot_search
from aurora.types import Placement
from aurora.types.arrays import FloatArray, IntArray

MOST_TOKENS = 8192  # that the search sees; of more, it takes some
STEPS_PER_EXPERT = 1500  # of a run, for each expert
RUNS, MOST_STEPS = 8, 700_000  # runs at most, and steps of all of them, unless one takes more
DRAWS = 1 << 16  # steps whose random numbers are drawn at once
HOT, COLD = 0.08, 0.016  # first and last temperature, as shares of the mean expert's tokens
LENIENT, STRICT = 1.0, 30.0  # first and last price of a token above a limit, in tokens that cross
MARGIN = 0.001  # limits are lower by this share while the search runs, since it ends a little above them
NONE = -1  # in place of an expert or a server
TINY = 1e-9  # of all seconds, where a float sum must not count as above a limit


class ServerLimits(NamedTuple):
    """Limits of a server search: slots and maximum seconds of GPUs and servers; and the seconds of each expert there.

    Attributes:
        server_G: (G,) int64, the server of each GPU.
        slots_G: (G,) int64, how many experts each GPU can hold.
        gpu_s_GE: (G, E) seconds of each expert on each GPU.
        server_s_NE: (N, E) seconds of each expert on each server, if all GPUs of the server share its tokens.
        most_gpu_s: maximum seconds of a GPU.
        most_server_s: maximum seconds of a server.
        beside_s_G: (G,) seconds of other work on each GPU.
        beside_s_N: (N,) seconds of other work on each server, if all of its GPUs share it.
    """

    server_G: IntArray
    slots_G: IntArray
    gpu_s_GE: FloatArray
    server_s_NE: FloatArray
    most_gpu_s: float
    most_server_s: float
    beside_s_G: FloatArray
    beside_s_N: FloatArray

    @property
    def layer(self) -> PhaseSums:
        """The seconds of GPUs as a slot search sees them."""
        return PhaseSums.of_times(self.gpu_s_GE, np.minimum(self.slots_G, self.gpu_s_GE.shape[1]), self.beside_s_G)


def server_search(
    experts_UK: IntArray, server_U: IntArray, limits: ServerLimits, gpu_E: IntArray, rng: np.random.Generator
) -> IntArray:
    """Moves and swaps experts, by simulated annealing, so that fewer rows cross between servers.

    Then it balances the GPUs inside each server, which changes no row between servers. The best of several runs is returned.
    Deterministic for a given `rng`.

    Args:
        experts_UK: (U, K) int, the experts of each token. If there are more than MOST_TOKENS tokens, that many are drawn.
        server_U: (U,) int64, the server that each token starts on; NONE: rows to every server count.
        limits: limits of the placement. If the start exceeds some, the search first lowers the excess.
        gpu_E: (E,) int64, the GPU of each expert to start from; not changed.
        rng: for the random draws.

    Returns:
        (E,) int64, the GPU of each expert. Its seconds in excess of limits are no more than gpu_E's. If gpu_E has no excess, it
        has no more rows between servers than gpu_E, counted for the tokens that the search used.
    """
    experts, gpus = len(gpu_E), len(limits.slots_G)
    steps = STEPS_PER_EXPERT * experts
    tokens = some_tokens(experts_UK, server_U, rng)
    slack_s = MARGIN * min(limits.most_gpu_s, limits.most_server_s)
    lower = limits._replace(most_gpu_s=(1 - MARGIN) * limits.most_gpu_s, most_server_s=(1 - MARGIN) * limits.most_server_s)
    choices, all_s = tokens[0].size, max(float(gpu_seconds(limits.gpu_s_GE, gpu_E).sum()), 1e-300)
    cooler, dearer = (COLD / HOT) ** (1 / steps), (STRICT / LENIENT) ** (1 / steps)
    layer, start_GP = limits.layer, Placement.unreplicated(gpu_E, gpus).held_LGP(int(limits.layer.slots_G.max()))[0]
    best_GP, best = start_GP, (np.inf, 0)
    for _ in range(int(np.clip(MOST_STEPS // steps, 1, RUNS)) if gpus > 1 else 0):
        annealing = core.Annealing(layer, start_GP, tokens, lower, slack_s, TINY * all_s)
        for begin in range(0, steps, DRAWS):
            draws_S3 = rng.random((min(DRAWS, steps - begin), 3))
            heat, price = HOT * choices / experts * cooler**begin, LENIENT * choices / all_s * dearer**begin
            next_GP, cost = core.anneal(annealing, draws_S3, heat, cooler, price, dearer)
        if cost < best:
            best_GP, best = next_GP, cost
    held_GP = level(limits, best_GP)
    gpu_X, slot_X = np.nonzero(held_GP != NONE)
    return np.asarray(gpu_X[np.argsort(held_GP[gpu_X, slot_X])])


def some_tokens(experts_UK: IntArray, server_U: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Returns (experts_UK, server_U) as int64, of MOST_TOKENS drawn tokens if there are more; Args: as in `server_search`."""
    some_U = rng.choice(len(server_U), MOST_TOKENS, replace=False) if len(server_U) > MOST_TOKENS else slice(None)
    return np.array(experts_UK[some_U], dtype=np.int64), np.array(server_U[some_U], dtype=np.int64)


def gpu_seconds(gpu_s_GE: FloatArray, gpu_E: IntArray) -> FloatArray:
    """Returns (G,) the seconds of the experts on each GPU.

    Args:
        gpu_s_GE: (G, E) seconds of each expert on each GPU.
        gpu_E: (E,) int64, the GPU of each expert.
    """
    return np.bincount(gpu_E, gpu_s_GE[gpu_E, np.arange(len(gpu_E))], len(gpu_s_GE)).astype(np.float64)


def level(limits: ServerLimits, held_GP: IntArray) -> IntArray:
    """Swaps and moves experts between the GPUs of each server as long as that shortens its fullest GPU.

    Args:
        limits: the servers, slots and seconds.
        held_GP: (G, P) int64, the expert in each slot, NONE for none.

    Returns:
        (G, P) int64, as held_GP.
    """
    level_GP, layer = held_GP.copy(), limits.layer
    for server in range(len(limits.server_s_NE)):
        at_G = limits.server_G == server
        part_s_GEXW, base_s_GXW = layer.part_s_GEXW[at_G], layer.base_s_GXW[at_G]
        of_server = layer._replace(part_s_GEXW=part_s_GEXW, base_s_GXW=base_s_GXW, slots_G=layer.slots_G[at_G])
        level_GP[at_G], _ = slot_search(of_server, held_GP[at_G], np.random.default_rng(0), 0, replicas=False)
    return level_GP
