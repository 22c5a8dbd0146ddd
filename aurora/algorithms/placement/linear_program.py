"""The linear program of one layer, whose variables are shares of experts on GPUs.

It minimises the mean of the longest paths of `objective.Formula`. For one model, the paths are the seconds of its traffic
cases. Bounds are computed from the dual solution apart from the solver, so that its tolerance never enters.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, coo_array, csr_array, eye_array, hstack, kron

from aurora.algorithms.placement.cost_model import LayerCosts
from aurora.algorithms.search.phase_sums import PhaseSums
from aurora.types.arrays import FloatArray, IntArray

SMALL = 4096  # experts times GPUs times cases of a program at most; one of that size takes about 50 ms


class PathProgram(NamedTuple):
    """Linear program of one layer: the shares of edges that minimise the mean of the `worst` longest paths.

    Part, term and path are those of `objective.Formula`. An edge puts an expert, or a group, on a GPU; its share is from 0 to
    1. A term is at least each of its parts on each GPU. If not all paths count, nor only the longest, there is a variable for
    each path's excess over a threshold (conditional value at risk).

    Attributes:
        cost_KV: (K, V) seconds that each edge adds to each part on the edge's GPU.
        gpu_V: (V,) int64, the GPU of each edge.
        fixed_KG: (K, G) seconds that each part takes on each GPU besides its edges.
        term_K: (K,) int64, the term of each part.
        count_ZX: (Z, X) how often each term occurs in each path.
        base_Z: (Z,) seconds of each path that no share changes.
        least_X: (X,) lower bounds on the seconds of each term.
        sum_EV: (E, V), one row for each expert or group: 1 for its edges, whose shares sum to one, 0 for others.
        worst: number of paths that count, longest first.
        slots_G: (G,) sum of the shares on each GPU at most; None: any.

    Source:
        The conditional value at risk as a linear program: Rockafellar & Uryasev 2000.
    """

    cost_KV: FloatArray
    gpu_V: IntArray
    fixed_KG: FloatArray
    term_K: IntArray
    count_ZX: IntArray | FloatArray
    base_Z: FloatArray
    least_X: FloatArray
    sum_EV: csr_array
    worst: int = 1
    slots_G: IntArray | None = None

    @property
    def unit_s(self) -> float:
        """Seconds of one unit of time for the solver."""
        return float(self.fixed_KG.max() + self.cost_KV.max()) or 1.0

    def prices(self) -> FloatArray | None:
        """Returns (R,) dual prices of the rows in the optimum, zero or more; None if the solver gives up."""
        cost_V, at_most_RV, limit_R, sum_EV, lower_V = self._matrices()
        bounds_V2 = np.column_stack([lower_V, np.full(len(lower_V), np.inf)])
        solution = linprog(  # type: ignore[call-overload]  # its stubs know no sparse matrices
            cost_V, at_most_RV, limit_R, sum_EV, np.ones(sum_EV.shape[0]), bounds_V2, method="highs-ds"
        )
        return np.maximum(0.0, -solution.ineqlin.marginals) if solution.status == 0 else None

    def _matrices(self) -> tuple[FloatArray, csr_array, FloatArray, csr_array, FloatArray]:
        """(cost_V, at_most_RV, limit_R, sum_EV, lower_V): minimise cost_V @ v with at_most_RV @ v <= limit_R, sum_EV @ v = 1.

        The variables v, lower_V or more, are the shares, the terms, the threshold of paths and their excess; the rows are those
        of parts, GPU by GPU, of slots and of paths.
        """
        (edges, (paths, terms)), (parts, gpus) = (len(self.gpu_V), self.count_ZX.shape), self.fixed_KG.shape
        part, edge = np.nonzero(self.cost_KV)
        at = self.gpu_V[edge] * parts + part, edge
        of_part = coo_array((self.cost_KV[part, edge] / self.unit_s, at), shape=(parts * gpus, edges))
        of_term = np.tile(self.term_K[:, None] == np.arange(terms), (gpus, 1)).astype(np.float64)
        rows, limits = [[of_part, coo_array(-of_term), None]], [-self.fixed_KG.T.ravel() / self.unit_s]
        if self.slots_G is not None:
            rows.append([coo_array((np.ones(edges), (self.gpu_V, np.arange(edges))), shape=(gpus, edges)), None, None])
            limits.append(self.slots_G.astype(np.float64))
        if self.worst == paths:
            cost_Y, over_ZY, rows = self.count_ZX.mean(axis=0), np.zeros((paths, 0)), [row[:2] for row in rows]
        else:
            over_ZY = np.eye(paths, 1 + paths * (self.worst > 1), 1)
            over_ZY[:, 0] = 1.0
            cost_Y = np.concatenate([np.zeros(terms), [1.0], np.full(over_ZY.shape[1] - 1, 1 / self.worst)])
            rows.append([None, coo_array(self.count_ZX), coo_array(-over_ZY)])
            limits.append(-self.base_Z / self.unit_s)
        return (
            np.concatenate([np.zeros(edges), cost_Y]),
            csr_array(block_array(rows)),
            np.concatenate(limits),
            csr_array(hstack([self.sum_EV, coo_array((self.sum_EV.shape[0], len(cost_Y)))])),
            np.concatenate([np.zeros(edges), self.least_X / self.unit_s, np.zeros(over_ZY.shape[1])]),
        )

    def dual_s(self, price_R: FloatArray) -> float:
        """Returns the lower bound on the objective in seconds that prices of the rows give, if every edge is there.

        Prices are first corrected, so that they give a bound whatever the solver's tolerance: weights of paths (Z,) are
        1 / worst each and one in all at most, a term's weight is the sum of its paths', and weights of its parts on all GPUs
        (K, G) add up to no more; rest_X is what they leave of it. With s(k, g) the seconds of part k on GPU g,
        weight_Z @ base_Z + rest_X @ least_X + sum of weight_KG * s is then a lower bound on the mean of the longest paths.

        Args:
            price_R: (R,) zero or more; those of the optimum give the best bound.
        """
        (paths, terms), (parts, gpus) = self.count_ZX.shape, self.fixed_KG.shape
        price_KG, slot_G, price_Z = np.split(price_R, [parts * gpus, len(price_R) - paths * (self.worst < paths)])
        price_KG, weight_Z = price_KG.reshape(gpus, parts).T, np.full(paths, 1 / paths)
        if self.worst < paths:
            weight_Z = np.minimum(price_Z / max(float(price_Z.sum()), 1e-300), 1 / self.worst)
        weight_X = weight_Z @ self.count_ZX
        used_X = np.bincount(self.term_K, price_KG.sum(axis=1), minlength=terms)
        shrink_X = np.divide(weight_X, used_X, out=np.ones(terms), where=used_X > weight_X)
        rest_X = np.maximum(weight_X - used_X * shrink_X, 0.0)
        weight_KG = price_KG * shrink_X[self.term_K][:, None]
        share_s_GE = np.einsum("kg,kge->ge", weight_KG, self.cost_KV.reshape(parts, gpus, -1))
        least_s = weight_Z @ self.base_Z + (weight_KG * self.fixed_KG).sum() + rest_X @ self.least_X
        if self.slots_G is not None:
            share_s_GE = share_s_GE + slot_G[:, None] * self.unit_s
            least_s -= slot_G @ self.slots_G * self.unit_s
        return float(least_s + share_s_GE.min(axis=0).sum())

    def relaxed_s(self) -> float:
        """Returns the lower bound in seconds that follows from the dual solution, if every edge is there."""
        term_X = self.least_X.copy()
        if self.fixed_KG.shape[1] == 1:  # a single GPU has all shares
            np.maximum.at(term_X, self.term_K, self.fixed_KG[:, 0] + self.cost_KV.sum(axis=1))
        elif (price_R := self.prices()) is not None:
            return self.dual_s(price_R)
        return float(np.sort(self.count_ZX @ term_X + self.base_Z)[-self.worst :].mean())


def shares_program(
    cost_KGE: FloatArray,
    fixed_KG: FloatArray,
    term_K: IntArray,
    count_ZX: IntArray | FloatArray,
    base_Z: FloatArray,
    least_X: FloatArray,
    block_G: IntArray,
    worst: int = 1,
    slots_G: IntArray | None = None,
) -> PathProgram:
    """Builds the linear program over the share of every expert on every block of GPUs. A block with one GPU is exact.

    A block's fixed seconds are the mean of its GPUs'. An expert adds its seconds on the block's fastest GPU, divided by the
    number of GPUs. So no placement takes longer on its slowest block than on its slowest GPU, and bounds hold for the GPUs too.
    Larger blocks make the program smaller and the bound looser.

    Args:
        cost_KGE: (K, G, E) seconds that each expert adds to each part on each GPU.
        block_G: (G,) int64, the block of each GPU, numbered from 0 without a gap.
        fixed_KG, term_K, count_ZX, base_Z, least_X, worst, slots_G: as in `PathProgram`, of GPUs.
    """
    members = [block_G == block for block in range(int(block_G.max()) + 1)]
    cost_KBE = np.stack([cost_KGE[:, member_G].min(axis=1) / member_G.sum() for member_G in members], axis=1)
    parts, gpus, experts = cost_KBE.shape
    return PathProgram(
        cost_KBE.reshape(parts, -1),
        np.repeat(np.arange(gpus), experts),
        np.stack([fixed_KG[:, member_G].mean(axis=1) for member_G in members], axis=1),
        term_K,
        count_ZX,
        base_Z,
        least_X,
        csr_array(kron(np.ones((1, gpus)), eye_array(experts))),
        worst,
        None if slots_G is None else np.array([slots_G[member_G].sum() for member_G in members]),
    )


def phase_program(layer: PhaseSums, least_YW: FloatArray, block_G: IntArray) -> PathProgram:
    """Builds the program whose optimum is a lower bound on a layer's seconds over all placements.

    A term is a phase in a traffic case, a path a case, whose seconds are those of Eq. 1.

    Args:
        layer: one layer in W traffic cases.
        least_YW: (2, W) lower bounds in seconds on the two phases: gate with dispatch, and experts with combine.
        block_G: as in `shares_program`.

    Source:
        Eq. 1: Aurora (arXiv:2410.17043).
    """
    gpus, experts, sums, cases = layer.part_s_GEXW.shape
    return shares_program(
        layer.part_s_GEXW.transpose(2, 3, 0, 1).reshape(-1, gpus, experts),
        layer.base_s_GXW.transpose(1, 2, 0).reshape(-1, gpus),
        (np.arange(2).repeat(sums // 2)[:, None] * cases + np.arange(cases)).ravel(),
        layer.paths_ZYW.reshape(len(layer.fixed_s_Z), -1),
        layer.fixed_s_Z,
        least_YW.ravel(),
        block_G,
        layer.worst,
        layer.slots_G,
    )


def blocks(costs: LayerCosts, most: int) -> IntArray:
    """Returns (G,) int64, the block of each GPU: GPUs with equal ports and expert times share one; there are at most `most`."""
    kind_GX = np.column_stack([costs.expert_s_WGE.sum(axis=(0, 2)), *costs.port_s_XG])
    kinds_KX, kind_G = np.unique(kind_GX, axis=0, return_inverse=True)
    return np.asarray(kind_G.reshape(-1) * min(most, len(kinds_KX)) // len(kinds_KX), dtype=np.int64)
