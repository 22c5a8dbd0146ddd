"""Divides tokens over replicas, compiled by Cython; see `serving_gpus`."""

import cython
import numpy as np
from cython import cast, nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cython.locals(server=Index, first=Index, stop=Index, before=Int, cut=Int, whole=Float, upto=Float)
def replica_tokens(tokens_SE: ConstInts2, share_NP: ConstFloats2, server_S: ConstInts1, expert_P: ConstInts1):
    """Returns (S, P) tokens of each expert and source, cut at the running sum of its replicas' shares."""
    sources: Index = tokens_SE.shape[0]
    replicas: Index = expert_P.shape[0]
    tokens_SP: Ints2 = np.empty((sources, replicas), np.int64)
    with nogil:
        for s in range(sources):
            server, stop = server_S[s], 0
            while stop < replicas:
                first, whole = stop, 0.0
                while stop < replicas and expert_P[stop] == expert_P[first]:
                    whole += share_NP[server, stop]
                    stop += 1
                upto, before = 0.0, 0
                for p in range(first, stop):
                    upto += share_NP[server, p]
                    cut = cast(Int, tokens_SE[s, expert_P[first]] * (upto / whole) + (s + 0.5) / sources)
                    tokens_SP[s, p], before = cut - before, cut
    return np.asarray(tokens_SP)
