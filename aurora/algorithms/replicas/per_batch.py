"""Balances single batches from their own token counts: divides the tokens of an expert over its replicas.

The placement was planned before, from other traffic. The loops are in per_batch_core, which is compiled.
"""

import numpy as np

from aurora.algorithms.replicas import per_batch_core as core
from aurora.types.arrays import FloatArray, IntArray


def split_least_largest(load_DE: FloatArray, held_GP: IntArray) -> FloatArray:
    """Divides each batch's tokens over replicas so that the largest number of tokens on a GPU is the least possible.

    This is LPLB's linear program, for any number of replicas, solved exactly as a flow. Load moves from a GPU above a target to
    a GPU below it, along the shortest chain of GPUs that share experts. If no chain reaches one, the load of the reached GPUs
    cannot go elsewhere: their mean is a lower bound, and becomes the target (Newton's method on the cuts of a flow).

    Args:
        load_DE: (D, E) float64, tokens of each expert in each batch.
        held_GP: (G, P) int64, the expert in each slot, -1 for none.

    Returns:
        (D, G, P) float64, the tokens of each slot.

    Source:
        github.com/deepseek-ai/LPLB; SGLang's `--ep-dispatch-algorithm lp` (pull request 24515).
    """
    held_X = held_GP.ravel()
    count_E = np.bincount(held_X[held_X >= 0], minlength=load_DE.shape[1])
    owner_X = np.argsort(held_X, kind="stable")[(held_X < 0).sum() :]  # empty slots come first
    tokens_DGP = np.where(held_GP >= 0, load_DE.take(held_GP, axis=1) / count_E[held_GP].clip(min=1), 0.0)
    load_DG = tokens_DGP.sum(axis=2)
    replicas = core.Replicas(held_GP, np.append(0, count_E.cumsum()), owner_X)
    for batch in zip(tokens_DGP, load_DG, load_DG.mean(axis=1), load_DG.max(axis=1), strict=True):
        core.split(replicas, *batch)
    return tokens_DGP
