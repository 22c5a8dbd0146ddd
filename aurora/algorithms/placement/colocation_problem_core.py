"""Simulated annealing of colocated groups, compiled by Cython; `colocation_problem` says what it is for."""

import cython
import numpy as np
from cython import cast, cclass, cfunc, exceptval, final, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
    from cython.cimports.libc.math import exp
else:
    from math import exp

    from aurora.algorithms.core_arrays import *


@final
@cclass
class ColocationAnnealing:
    """An assignment that is annealed: the groups that GPUs hold, and the seconds that follow from them; see `Arrays`."""

    seconds_GKMJ: ConstFloats4
    term_K: ConstInts1
    base_Z: ConstFloats1
    count_ZX: ConstFloats2
    movers_M: ConstInts1
    group_GM: Ints2
    best_GM: Ints2
    held_GX: Floats2  # seconds of each moved term on each GPU
    step_4X: Floats2  # the same on its slowest GPU; on the two GPUs of a step, and on the slowest GPU after it
    value_s: Float
    best_s: Float

    def __init__(self, arrays, group_GM, movers_M: ConstInts1):
        self.seconds_GKMJ, self.term_K, self.base_Z, self.count_ZX = arrays
        self.group_GM, self.best_GM, self.movers_M = group_GM, group_GM.copy(), movers_M
        self.held_GX, self.step_4X = np.zeros((len(group_GM), self.count_ZX.shape[1])), np.zeros((4, self.count_ZX.shape[1]))
        for g in range(len(group_GM)):
            _price(self, g, self.held_GX[g])
        np.max(self.held_GX, axis=0, out=np.asarray(self.step_4X)[0])
        self.value_s = self.best_s = _longest_path(self, self.step_4X[0])


@cython.locals(gpus=Index, movers=Index, g=Index, h=Index, mover=Index, after_s=Float)
def anneal(problem: ColocationAnnealing, draws_S4: ConstFloats2, heat: Float, cooling: Float):
    """Makes a step for each row of draws, which are from 0 to 1; returns the best assignment so far (G, M) and its seconds.

    heat is the temperature in seconds, which falls by the factor `cooling` in each step.
    """
    gpus, movers = problem.group_GM.shape[0], problem.movers_M.shape[0]
    most_X, at_g, at_h, after_X = problem.step_4X[0], problem.step_4X[1], problem.step_4X[2], problem.step_4X[3]
    with nogil:
        for step in range(draws_S4.shape[0]):
            heat *= cooling
            g, h = cast(Index, draws_S4[step, 0] * gpus), cast(Index, draws_S4[step, 1] * (gpus - 1))
            h += h >= g
            mover = cast(Index, draws_S4[step, 2] * (movers + 1)) if movers > 1 else 0  # the last number: all of them
            _swap(problem, mover, g, h)
            _price(problem, g, at_g)
            _price(problem, h, at_h)
            for x in range(most_X.shape[0]):  # other GPUs count only where g or h had the maximum
                after_X[x] = larger(at_g[x], at_h[x])
                if after_X[x] < most_X[x] and problem.held_GX[g, x] < most_X[x] and problem.held_GX[h, x] < most_X[x]:
                    after_X[x] = most_X[x]
                elif after_X[x] < most_X[x]:
                    for i in range(gpus):
                        if i != g and i != h:
                            after_X[x] = larger(after_X[x], problem.held_GX[i, x])
            after_s = _longest_path(problem, after_X)
            if after_s > problem.value_s and draws_S4[step, 3] >= exp((problem.value_s - after_s) / heat):
                _swap(problem, mover, g, h)
                continue
            problem.value_s = after_s
            problem.held_GX[g], problem.held_GX[h] = at_g, at_h
            most_X[:] = after_X
            if after_s < problem.best_s:
                problem.best_s = after_s
                problem.best_GM[:, :] = problem.group_GM
    return np.asarray(problem.best_GM), problem.best_s


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(seconds=Float)
def _price(problem: ColocationAnnealing, g: Index, out_X: Floats1) -> cython.void:
    """Writes the seconds of each moved term on GPU g."""
    out_X[:] = 0.0
    for k in range(problem.term_K.shape[0]):
        seconds = 0.0
        for m in range(problem.group_GM.shape[1]):
            seconds += problem.seconds_GKMJ[g, k, m, problem.group_GM[g, m]]
        out_X[problem.term_K[k]] = larger(out_X[problem.term_K[k]], seconds)


@cfunc
@nogil
@exceptval(check=False)
@cython.locals(path_s=Float)
def _longest_path(problem: ColocationAnnealing, most_X: Floats1) -> Float:
    """Returns the seconds of the longest path; most_X are the seconds of each moved term on its slowest GPU."""
    longest_s: Float = 0.0
    for z in range(problem.base_Z.shape[0]):
        path_s = problem.base_Z[z]
        for x in range(most_X.shape[0]):
            path_s += problem.count_ZX[z, x] * most_X[x]
        longest_s = larger(longest_s, path_s)
    return longest_s


@cfunc
@nogil
@exceptval(check=False)
def _swap(problem: ColocationAnnealing, mover: Index, g: Index, h: Index) -> cython.void:
    """Swaps the groups of movers_M[mover] between GPUs g and h; those of all movers_M if there is no such mover."""
    for i in range(problem.movers_M.shape[0]):
        if mover == i or mover == problem.movers_M.shape[0]:
            m = problem.movers_M[i]
            problem.group_GM[g, m], problem.group_GM[h, m] = problem.group_GM[h, m], problem.group_GM[g, m]
