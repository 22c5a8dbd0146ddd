"""Loops over the pieces of hierarchical all-to-alls, compiled by Cython; see `hierarchical`."""

import cython
import numpy as np
from cython import nogil

if cython.compiled:
    from cython.cimports.aurora.algorithms.core_arrays import *
else:
    from aurora.algorithms.core_arrays import *


@cython.locals(first=Index, members=Index, givers=Index, giver=Index, least=Index, piece=Index)
@cython.locals(total=Int, rows=Int, size=Int, handed=cython.bint)
def hand_over(
    carrier_GNC: Ints3, sent_GN: ConstInts2, member_G: ConstInts1, first_N: ConstInts1, chunks: Index, level_from: Int
):
    """Sets the carriers of parts that are handed over."""
    carried_M: Ints1 = np.empty(len(member_G), np.int64)
    giver_M: Ints1 = np.empty(len(member_G), np.int64)
    pieces: Index = carrier_GNC.shape[2]
    parts: Index = pieces // chunks
    with nogil:
        for home in range(sent_GN.shape[1]):
            first, members = first_N[home], first_N[home + 1] - first_N[home]
            for server in range(sent_GN.shape[1] if members > 1 else 0):
                total = givers = 0
                for local in range(members):
                    total += sent_GN[member_G[first + local], server]
                for local in range(members):
                    carried_M[local] = 0
                    if server != home and members * (sent_GN[member_G[first + local], server] - level_from) >= total:
                        giver_M[givers] = local
                        givers += 1
                for chunk in range(chunks if givers > 0 else 0):
                    for local in range(members):
                        rows = sent_GN[member_G[first + local], server]
                        carried_M[local] += rows * (chunk + 1) // chunks - rows * chunk // chunks
                    handed, piece = True, (chunk + 1) * parts
                    while handed and piece > chunk * parts:
                        handed, piece = False, piece - 1
                        for at in range(givers):
                            giver, least = giver_M[at], server % members
                            rows = sent_GN[member_G[first + giver], server]
                            size = rows * (piece + 1) // pieces - rows * piece // pieces
                            for local in range(members):
                                if carried_M[local] < carried_M[least]:
                                    least = local
                            if size > 0 and carried_M[least] + size < carried_M[giver]:
                                carried_M[least] += size
                                carried_M[giver] -= size
                                carrier_GNC[member_G[first + giver], server, piece] = member_G[first + least]
                                handed = True


@cython.locals(step=Index, at=Index, carrier=Index, rows=Int)
def add_hops(
    carried_SGG: Ints3,
    forwarded_SGG: Ints3,
    sent_GN: ConstInts2,
    needed_GCG: ConstInts3,
    carrier_GNC: ConstInts3,
    server_G: ConstInts1,
    member_G: ConstInts1,
    first_N: ConstInts1,
    gateway_GN: ConstInts2,
    parts: Index,
):
    """Adds the rows of every piece: to its carrier, from there to the gateway, and from there to the ranks that need them."""
    pieces: Index = carrier_GNC.shape[2]
    with nogil:
        for source in range(sent_GN.shape[0]):
            for server in range(sent_GN.shape[1]):
                for piece in range(pieces):
                    rows = sent_GN[source, server] * (piece + 1) // pieces - sent_GN[source, server] * piece // pieces
                    if rows == 0:
                        continue
                    step, at = piece // parts, source
                    if server != server_G[source]:
                        carrier = carrier_GNC[source, server, piece]
                        if carrier != source:
                            carried_SGG[step, source, carrier] += rows
                            step += 1
                        at = gateway_GN[carrier, server]
                        carried_SGG[step, carrier, at] += rows
                        step += 1
                    for member in range(first_N[server], first_N[server + 1]):
                        forwarded_SGG[step, at, member_G[member]] += needed_GCG[source, piece, member_G[member]]
