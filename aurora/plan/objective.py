"""The time of one MoE layer from its phases' times: Aurora's Eq. 1 and Table 2, and the causal reading of the latter.

Every term is a maximum over GPUs of per-port or per-GPU seconds; the simulator, not these formulas, prices a Program.
"""

from dataclasses import dataclass

import numpy as np

from aurora.types.arrays import FloatArray


@dataclass(frozen=True)
class Terms:
    """One model's phases on each GPU, (G,) seconds each. send/recv: the dispatch's port times; csend/crecv: the combine's."""

    gate_G: FloatArray
    send_G: FloatArray
    recv_G: FloatArray
    csend_G: FloatArray
    crecv_G: FloatArray
    expert_G: FloatArray
    aggregate_G: FloatArray

    @property
    def dispatch_G(self) -> FloatArray:
        return np.maximum(self.send_G, self.recv_G)

    @property
    def combine_G(self) -> FloatArray:
        return np.maximum(self.csend_G, self.crecv_G)


def exclusive(a: Terms) -> float:
    """max(G + N) + max(F + C) + max(A). Source: Aurora Eq. 1."""
    return _max(a.gate_G + a.dispatch_G) + _max(a.expert_G + a.combine_G) + _max(a.aggregate_G)


def paper(a: Terms, b: Terms) -> float:
    """Two colocated models, Aurora's Table 2 as printed: a lower bound, not a timeline."""
    both_N = _both(a.send_G, a.recv_G, b.send_G, b.recv_G)
    f_a = max(_max(b.gate_G), _max(a.dispatch_G)) + _max(a.expert_G)
    f_b = max(f_a, both_N) + _max(b.expert_G)
    a_a = max(f_b, both_N + _max(a.combine_G)) + _max(a.aggregate_G)
    a_b = max(a_a, 2 * both_N) + _max(b.aggregate_G)
    return a_b + _max(a.gate_G)


def causal(a: Terms, b: Terms) -> float:
    """Two colocated models; no transfer ends before what it waits for. `paper` <= `causal` where combines mirror dispatches.

    As printed, Table 2 lets C_a end before F_a and N_b ignore G_b; this is the same table with those waits in it.
    """
    return causal_timeline(
        gate=(_max(a.gate_G), _max(b.gate_G)),
        dispatch=(_max(a.dispatch_G), _max(b.dispatch_G)),
        both_dispatch=_both(a.send_G, a.recv_G, b.send_G, b.recv_G),
        expert=(_max(a.expert_G), _max(b.expert_G)),
        combine=(_max(a.combine_G), _max(b.combine_G)),
        both_combine=_both(a.csend_G, a.crecv_G, b.csend_G, b.crecv_G),
        aggregate=(_max(a.aggregate_G), _max(b.aggregate_G)),
    )


def causal_timeline(
    *,
    gate: tuple[float, float],
    dispatch: tuple[float, float],
    both_dispatch: float,
    expert: tuple[float, float],
    combine: tuple[float, float],
    both_combine: float,
    aggregate: tuple[float, float],
) -> float:
    """The causal timeline of models (a, b) from maxima over GPUs in seconds; it never falls when one of them rises.

    N_b ends max(|N_a + N_b|, G_b + |N_b|); s = max(end N_b, end F_a); C_a ends s + |C_a|;
    C_b ends max(s + |C_a + C_b|, end F_b + |C_b|); the rest as in Table 2.
    """
    f_a = max(gate[1], dispatch[0]) + expert[0]
    n_b = max(both_dispatch, gate[1] + dispatch[1])
    f_b = max(f_a, n_b) + expert[1]
    s = max(n_b, f_a)
    a_a = max(f_b, s + combine[0]) + aggregate[0]
    a_b = max(a_a, s + both_combine, f_b + combine[1]) + aggregate[1]
    return a_b + gate[0]


def _max(values_G: FloatArray) -> float:
    return float(values_G.max(initial=0.0))


def _both(send_a: FloatArray, recv_a: FloatArray, send_b: FloatArray, recv_b: FloatArray) -> float:
    return max(_max(send_a + send_b), _max(recv_a + recv_b))
