"""Cost model of one MoE layer: tokens and seconds of each expert or group on each GPU, and the layer's time by Aurora's Eq. 1.

Placement strategies see a profile as LayerCosts, expert by expert: of the whole profile, of several traffic cases, or of a
forecast. `LayerCosts.grouped` has whole groups of experts in place of experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from aurora.algorithms.network.port_bounds import Nics, nics_of
from aurora.algorithms.placement.phase_times import SIDES, PhaseTimes, exclusive_XG, longest_of
from aurora.algorithms.search.phase_sums import PARTS, SUMS, PhaseSums
from aurora.algorithms.workload.serving_gpus import served_split
from aurora.algorithms.workload.traffic import (
    CountedTokens,
    KnownTokens,
    group_tokens,
    hierarchical_steps,
    known_or_counted,
)
from aurora.types import OVERHEAD, Cluster, Gpu, Hierarchy, Profile
from aurora.types.arrays import FloatArray, IntArray

AnyArray = IntArray | FloatArray


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of one model's layer by expert, in each of W traffic cases (windows or domains). Source rank g sits on GPU g.

    Attributes:
        own_WGE: (W, G, E) tokens that rank g sends to expert e; float64 where experts are split into replicas.
        expert_s_WGE: (W, G, E) seconds of expert e on GPU g.
        gate_s_WG: (W, G) seconds of the gate.
        aggregate_s_WG: (W, G) seconds of the aggregation.
        dispatch_bytes: bytes per token in the dispatch.
        combine_bytes: bytes per token in the combine.
        out_Bps: (G,) bytes per second of each sending port.
        in_Bps: (G,) bytes per second of each receiving port.
        worst: number of cases that count, longest first: all for the mean, some for the conditional value at risk, one for
            the worst case.
        routing: the tokens, if they are deduplicated; None if they are not.
        nics: the NICs of the servers; None if only ports limit.
        steps: the profile and the GPUs, if windows consist of steps of given sizes (`Profile.step_tokens`). A GPU then reads
            the weights of a replica in every step in which a token chooses it, so half of an expert's tokens take more than
            half of its seconds. None: seconds are proportional to the share of tokens.
    """

    own_WGE: IntArray | FloatArray
    expert_s_WGE: FloatArray
    gate_s_WG: FloatArray
    aggregate_s_WG: FloatArray
    dispatch_bytes: int
    combine_bytes: int
    out_Bps: FloatArray
    in_Bps: FloatArray
    worst: int = 1
    routing: KnownTokens | CountedTokens | None = None
    nics: Nics | None = None
    steps: tuple[Profile, Sequence[Gpu]] | None = None

    @cached_property
    def port_s_XG(self) -> FloatArray:
        """(4, G) seconds per token that each GPU sends and receives in the dispatch, sends and receives in the combine."""
        return np.stack(
            [size / rate for size in (self.dispatch_bytes, self.combine_bytes) for rate in (self.out_Bps, self.in_Bps)]
        )

    @cached_property
    def load_WE(self) -> FloatArray:
        """(W, E) tokens of each expert."""
        return np.asarray(self.own_WGE.sum(axis=1))

    @property
    def token_s_G(self) -> FloatArray:
        """(G,) cost of computing and moving a token on each GPU, relative to the mean of all; all 1 if any cost is zero."""
        _, recv_s_G, csend_s_G, _ = self.port_s_XG
        token_s_G = self.expert_s_WGE.sum(axis=(0, 2)) / max(1, int(self.load_WE.sum())) + recv_s_G + csend_s_G
        return np.asarray(token_s_G / token_s_G.mean()) if token_s_G.all() else np.ones(len(token_s_G))

    @property
    def summed(self) -> "LayerCosts":
        """The costs of a single traffic case that is the sum of all cases."""
        names = "own_WGE", "expert_s_WGE", "gate_s_WG", "aggregate_s_WG"
        return replace(self, **{name: getattr(self, name).sum(axis=0, keepdims=True) for name in names})

    @cached_property
    def nics_as_ports(self) -> "LayerCosts":
        """The costs without NICs, for searches that model ports only: port rates are lowered to the NICs'."""
        if self.nics is None:
            return self
        out_Bps, in_Bps = (np.minimum(Bps_G, self.nics.as_ports_Bps_G) for Bps_G in (self.out_Bps, self.in_Bps))
        return replace(self, out_Bps=out_Bps, in_Bps=in_Bps, nics=None)

    @cached_property
    def of_servers(self) -> "LayerCosts | None":
        """The costs with each server taken as one GPU, whose port is the server's NICs; None without servers.

        A phase of a server takes the mean of its GPUs' seconds. An expert takes its seconds on the server's fastest GPU,
        divided by the number of GPUs. So no placement takes longer here than on the GPUs: lower bounds hold for these too.
        """
        if self.nics is None:
            return None
        members_NG, size_N = self.nics.members_NG, self.nics.size_N
        inside = [np.flatnonzero(member_G) for member_G in members_NG]
        return replace(
            self,
            own_WGE=members_NG @ self.own_WGE,
            expert_s_WGE=np.stack([self.expert_s_WGE[:, gpu_X].min(axis=1) / len(gpu_X) for gpu_X in inside], axis=1),
            gate_s_WG=self.gate_s_WG @ members_NG.T / size_N,
            aggregate_s_WG=self.aggregate_s_WG @ members_NG.T / size_N,
            out_Bps=self.nics.server_Bps_N,
            in_Bps=self.nics.server_Bps_N,
            nics=None,
            steps=None,
        )

    def grouped(self, group_E: IntArray) -> "LayerCosts":
        """Returns the costs of groups of experts, one for each GPU, with ports but no NICs; only for a single traffic case.

        Args:
            group_E: (E,) int64, the group of each expert.
        """
        n = len(self.out_Bps)
        expert_s_GJ = np.stack([np.bincount(group_E, expert_s_E, n).astype(np.float64) for expert_s_E in self.expert_s_WGE[0]])
        own_WGE = group_tokens(self.own_WGE[0], group_E, n)[None]
        return replace(self, own_WGE=own_WGE, expert_s_WGE=expert_s_GJ[None], routing=None, nics=None, steps=None)

    def alone_s_GE(self, *phases: str) -> FloatArray:
        """Returns (G, E), the longest of some phases on each GPU in seconds if it holds one expert; only for a single case.

        Args:
            phases: as in `phase_s`.
        """
        alone = [fixed_WG[0][:, None] + cost_WGE[0] for fixed_WG, cost_WGE in map(self.phase_s, phases)]
        return np.asarray(np.broadcast_to(longest_of(alone), self.own_WGE.shape[1:]))

    def times_alone(self, expert_G: IntArray) -> PhaseTimes:
        """Returns the seconds of each phase if GPU g holds the expert, or group, expert_G[g] alone; only for a single case."""
        at = np.arange(len(expert_G)), expert_G
        port_4G = np.stack([self.alone_s_GE(side)[at] for side in SIDES])
        return PhaseTimes(self.gate_s_WG[0], port_4G, self.expert_s_WGE[0][at], self.aggregate_s_WG[0])

    def phase_sums(self, slots_G: IntArray) -> PhaseSums:
        """Returns the layer as searches and bounds see it; slots_G (G,) int64 is how many experts each GPU can hold."""
        cases, gpus, experts = self.own_WGE.shape
        part_s_GEXW, base_s_GXW = np.zeros((gpus, experts, PARTS, cases)), np.zeros((gpus, PARTS, cases))
        for x, phases in enumerate(SUMS):
            for phase in phases:
                fixed_WG, cost_WGE = self.phase_s(phase)
                base_s_GXW[:, x] += fixed_WG.T
                part_s_GEXW[:, :, x] += np.moveaxis(cost_WGE, 0, 2)
        slots_G = np.minimum(slots_G, experts).astype(np.int64)
        return PhaseSums(part_s_GEXW, base_s_GXW, self.aggregate_s_WG.max(axis=1), slots_G, self.worst)

    def value_s(self, split_EG: FloatArray) -> float:
        """Returns the seconds of the layer: the mean of Aurora's Eq. 1 over the `worst` longest traffic cases.

        Args:
            split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes.

        Source:
            Aurora (arXiv:2410.17043) Eq. 1.
        """
        seconds_XWG = exclusive_XG(self._phase_times(split_EG, slice(None)))
        return float(np.sort(seconds_XWG.max(axis=2, initial=0.0).sum(axis=0))[-self.worst :].mean())

    def evenly_s(self, held_GP: IntArray) -> float:
        """Returns `value_s` if replicas take even shares; held_GP is (G, P) int64, the expert in each slot, -1 for none."""
        gpu_X, slot_X = np.nonzero(held_GP >= 0)
        held_EG = np.zeros((self.own_WGE.shape[2], len(held_GP)))
        np.add.at(held_EG, (held_GP[gpu_X, slot_X], gpu_X), 1.0)
        return self.value_s(held_EG / held_EG.sum(axis=1, keepdims=True))

    def phase_times(self, split_EG: FloatArray, hierarchy: Hierarchy | None = None) -> PhaseTimes:
        """Returns the seconds of each phase on each GPU; only for costs with a single traffic case.

        Args:
            split_EG: (E, G) float64, the share of each expert's tokens that each GPU takes; if all-to-alls are hierarchical, as
                `server_split` returns it.
            hierarchy: the servers and chunks of hierarchical all-to-alls, whose tokens are deduplicated; None if they are flat.
        """
        if hierarchy is not None:
            return self._hierarchical_times(split_EG, hierarchy)
        times = self._phase_times(split_EG, slice(1))
        of_phases = (times.expert_G[0], times.aggregate_G[0], times.nic_4G[:, 0], times.steps_2G[:, 0])
        return PhaseTimes(times.gate_G[0], times.port_4G[:, 0], *of_phases)

    def _hierarchical_times(self, split_EG: FloatArray, hierarchy: Hierarchy) -> PhaseTimes:
        """The phase times of hierarchical all-to-alls, whose rows are counted one by one in each step, or estimated."""
        assert self.routing is not None, "layer_costs counts deduplicated tokens"
        gpus = split_EG.shape[1]
        rows_SGG = hierarchical_steps(self.routing, split_EG, hierarchy)
        served_EG = served_split(self.own_WGE[0], split_EG, hierarchy.server_G)
        seconds = [_both_ways(rows_SGG.sum(axis=2), rows_SGG.sum(axis=1), self.port_s_XG)]
        if self.nics is not None:
            far_SGG = self.nics.across(rows_SGG)
            seconds.append(self._by_nic(self.nics, far_SGG.sum(axis=2), far_SGG.sum(axis=1)))
        steps_2G = np.zeros((2, gpus))
        if len(rows_SGG) > 1:
            longest_4S = np.max(seconds, axis=(0, 3))
            steps_2G += longest_4S.reshape(2, 2, -1).max(axis=1).sum(axis=1, keepdims=True)
        port_4G, *nic_4G = (seconds_4SG.sum(axis=1) for seconds_4SG in seconds)
        expert_s_G = self._expert_s_WG(np.ascontiguousarray(served_EG.T), slice(1))[0]
        gate_s_G, aggregate_s_G = self.gate_s_WG[0], self.aggregate_s_WG[0]
        return PhaseTimes(gate_s_G, port_4G, expert_s_G, aggregate_s_G, nic_4G[0] if nic_4G else np.zeros((4, 1)), steps_2G)

    def _phase_times(self, split_EG: FloatArray, cases: slice) -> PhaseTimes:
        """The phase times of several traffic cases, (W, G) each; einsum multiplies without arrays of (W, G, E)."""
        own_WGE, at_GE = self.own_WGE[cases], np.ascontiguousarray(split_EG.T)
        local_WG = np.einsum("wge,ge->wg", own_WGE, at_GE)
        send_WG = own_WGE.sum(axis=2) - local_WG
        recv_WG = np.einsum("we,ge->wg", self.load_WE[cases], at_GE) - local_WG
        port_4WG, nic_4WG = _both_ways(send_WG, recv_WG, self.port_s_XG), np.zeros((4, 1, 1))
        if self.nics is not None:
            nic_4WG = self._by_nic(self.nics, *_far_tokens(self.nics, own_WGE, at_GE))
        gate_WG, aggregate_WG = self.gate_s_WG[cases], self.aggregate_s_WG[cases]
        return PhaseTimes(gate_WG, port_4WG, self._expert_s_WG(at_GE, cases), aggregate_WG, nic_4WG, np.zeros((2, 1, 1)))

    def _expert_s_WG(self, at_GE: FloatArray, cases: slice) -> FloatArray:
        """(W, G) seconds of the experts, of which each GPU takes a share of tokens."""
        expert_s_WG: FloatArray = np.einsum("wge,ge->wg", self.expert_s_WGE[cases], at_GE)
        if self.steps is None:
            return expert_s_WG
        (profile, gpus), load_WE = self.steps, self.load_WE[cases]
        tokens_W1 = load_WE.sum(axis=1, keepdims=True) / profile.top_k
        for g, share_E in enumerate(at_GE):
            divided = np.flatnonzero((share_E > 0) & (share_E < 1))
            if len(divided):
                share_X, load_WX = share_E[divided], load_WE[:, divided]
                alone_WX = profile.seconds("expert", gpus[g], load_WX * share_X, tokens_W1)
                whole_WX = profile.seconds("expert", gpus[g], load_WX, tokens_W1)
                expert_s_WG[:, g] += (alone_WX - share_X * whole_WX).sum(axis=1)
        return expert_s_WG

    def _by_nic(self, nics: Nics, sent_XG: AnyArray, received_XG: AnyArray) -> FloatArray:
        """As `_both_ways`, for the NICs, from the tokens that each GPU sends and receives by them in the dispatch."""
        token_s_XG = np.repeat([[self.dispatch_bytes], [self.combine_bytes]], 2, axis=0) / nics.Bps_G
        return _both_ways(nics.carried(sent_XG), nics.carried(received_XG), token_s_XG)

    def phase_s(self, phase: str) -> tuple[FloatArray, FloatArray]:
        """Returns (fixed_WG, cost_WGE): in a phase, GPU g takes fixed_WG[w, g] plus its experts' cost_WGE[w, g, e].

        For sending, fixed_WG counts all tokens of the GPU, and cost_WGE is negative, because tokens of experts that the GPU
        holds are not sent.

        Args:
            phase: as in `PhaseTimes.of`, but none of NICs or steps.
        """
        nothing_WG, nothing_WGE = np.zeros(self.own_WGE.shape[:2]), np.zeros((1, 1, 1))
        if phase not in SIDES:
            if phase == "expert":
                return nothing_WG, self.expert_s_WGE
            return (self.gate_s_WG if phase == "gate" else self.aggregate_s_WG), nothing_WGE
        token_s_G = self.port_s_XG[SIDES.index(phase)]
        if phase in ("send", "crecv"):
            return self.own_WGE.cumsum(axis=2)[:, :, -1] * token_s_G, -self.own_WGE * token_s_G[:, None]
        return nothing_WG, (self.load_WE[:, None] - self.own_WGE) * token_s_G[:, None]


def _both_ways(sent_XG: AnyArray, received_XG: AnyArray, token_s_XG: FloatArray) -> FloatArray:
    """(4, X, G) seconds of sending and of receiving in the dispatch, and in the combine, which goes the other way.

    sent_XG and received_XG are the tokens of the dispatch; token_s_XG (4, G) are the seconds of one.
    """
    return np.asarray(np.stack([sent_XG, received_XG, received_XG, sent_XG]) * token_s_XG[:, None])


def _far_tokens(nics: Nics, own_WGE: AnyArray, at_GE: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(W, G) tokens that each GPU sends to experts on other servers, and (W, G) those that its experts get from there."""
    out_WG, in_WG = np.zeros((2, *own_WGE.shape[:2]))
    load_WE = own_WGE.sum(axis=1)
    for member_G in nics.members_NG > 0:
        near_WGE = own_WGE[:, member_G]
        out_WG[:, member_G] = near_WGE @ (1 - at_GE[member_G].sum(axis=0))
        in_WG[:, member_G] = (load_WE - near_WGE.sum(axis=1)) @ at_GE[member_G].T
    return out_WG, in_WG


OWN = "own"  # the aim that takes the recorded counts as exact
SUMMED = ("sum", OWN)  # aims that add all windows or domains to one case
AIMS: dict[str, Callable[[int], int]] = {  # by name: how many of W cases count, the longest first
    "mean": lambda cases: cases,
    "cvar": lambda cases: -(-cases // 2),  # the longer half
    "worst": lambda cases: 1,
    **dict.fromkeys(SUMMED, lambda cases: 1),
}


def layer_costs(cluster: Cluster, profile: Profile, layer: int, deduplicated: bool = False) -> LayerCosts:
    """Returns the LayerCosts of one layer with the whole profile as a single traffic case.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        layer: index of the MoE layer.
        deduplicated: whether a token is counted once for a server that holds several of its experts.
    """
    costs = _scenario_costs(cluster, [(profile, slice(None))], layer)
    if not deduplicated:
        return costs
    return replace(costs, dispatch_bytes=profile.row_bytes(True), routing=known_or_counted(profile, layer))


def aimed_costs(cluster: Cluster, profile: Profile, domains: Sequence[Profile], layer: int, aim: str) -> LayerCosts:
    """Returns the LayerCosts of one layer in each traffic case that a placement must serve.

    A case is a profile or, if there are no `domains`, a window of the profile. With an aim in SUMMED, all cases are
    added to a single one.

    Args:
        cluster: the GPUs.
        profile: the model's traffic.
        domains: further profiles of the same model.
        layer: index of the MoE layer.
        aim: a name of AIMS.
    """
    windows = [slice(None)] if domains or aim in SUMMED else [slice(t, t + 1) for t in range(profile.windows)]
    parts = [(domain, window) for domain in (profile, *domains) for window in windows]
    costs = _scenario_costs(cluster, parts, layer)
    return costs.summed if aim in SUMMED else replace(costs, worst=AIMS[aim](len(parts)))


def expected_costs(
    cluster: Cluster, profile: Profile, tokens_WSE: FloatArray, windows_W: IntArray, aim: str, cases: int
) -> LayerCosts:
    """Returns the LayerCosts of one layer in forecast traffic cases.

    Args:
        cluster: the GPUs.
        profile: the model, for its bytes and compute curves.
        tokens_WSE: (W, S, E) float64, (token, expert) pairs from each source rank to each expert in each case.
        windows_W: (W,) int64, number of equal windows over which the pairs of each case are spread.
        aim: a name of AIMS.
        cases: number of cases of the forecast, of which the W are equally many draws each.
    """
    window_WSE = tokens_WSE / windows_W[:, None, None]
    seconds = [(seconds_W.T * windows_W).T for seconds_W in _window_seconds(cluster, profile, window_WSE, expected=True)]
    worst = AIMS[aim](cases) * len(windows_W) // cases
    return replace(_layer_costs(cluster, profile, tokens_WSE, seconds), worst=worst)


def _scenario_costs(cluster: Cluster, parts: Sequence[tuple[Profile, slice]], layer: int) -> LayerCosts:
    """The LayerCosts of several traffic cases, each the windows of a profile, whose tokens are summed. All are of one model."""
    distinct = {id(profile): profile for profile, _ in parts}
    of = {key: _window_seconds(cluster, profile, profile.tokens_TLSE[:, layer]) for key, profile in distinct.items()}
    sums_W = [[seconds_T[windows].sum(axis=0) for seconds_T in of[id(profile)]] for profile, windows in parts]
    own_WGE = np.stack([profile.tokens_TLSE[windows, layer].sum(axis=0) for profile, windows in parts])
    return _layer_costs(cluster, parts[0][0], own_WGE, [np.stack(column) for column in zip(*sums_W, strict=True)])


def _layer_costs(cluster: Cluster, profile: Profile, own_WGE: AnyArray, seconds: Sequence[FloatArray]) -> LayerCosts:
    """The LayerCosts of traffic cases from their tokens and their seconds, see `_window_seconds`."""
    (gpus, kind_G), network = _kinds(cluster), cluster.network
    expert_s_WVE, gate_s_WG, aggregate_s_WG = seconds
    return LayerCosts(
        own_WGE=own_WGE,
        expert_s_WGE=np.broadcast_to(expert_s_WVE, own_WGE.shape) if len(gpus) == 1 else expert_s_WVE[:, kind_G],
        gate_s_WG=gate_s_WG,
        aggregate_s_WG=aggregate_s_WG,
        dispatch_bytes=profile.dispatch_bytes,
        combine_bytes=profile.combine_bytes,
        out_Bps=network.out_Bps_G,
        in_Bps=network.in_Bps_G,
        nics=None if network.servers is None else nics_of(network),
        steps=None if profile.step_tokens is None else (profile, cluster.gpus),
    )


def _kinds(cluster: Cluster) -> tuple[list[Gpu], IntArray]:
    """One GPU of each kind that computes at a speed of its own, and (G,) the index of each GPU's kind."""
    first = {(gpu.kind, gpu.speed): gpu for gpu in cluster.gpus[::-1]}
    number = {kind: index for index, kind in enumerate(first)}
    return list(first.values()), np.array([number[gpu.kind, gpu.speed] for gpu in cluster.gpus])


def _window_seconds(
    cluster: Cluster, profile: Profile, tokens_TSE: IntArray | FloatArray, expected: bool = False
) -> tuple[FloatArray, ...]:
    """Seconds of a layer in each window: (T, V, E) of each expert on each of V kinds, (T, G) of gates and of aggregations.

    Overheads of grouped kernels, which no placement changes, are counted with the aggregations. With `expected`, or where a
    window counts as many steps, counts are means: an expert is active as probably as a token of a step chooses it.
    """
    (gpus, kind_G), tokens_TE, own_TG = _kinds(cluster), tokens_TSE.sum(axis=1), tokens_TSE.sum(axis=2) // profile.top_k
    all_T1 = tokens_TE.sum(axis=1, keepdims=True) / profile.top_k
    of_T1, fixed_XTG = None if profile.step_tokens is None else all_T1, np.empty((2, *own_TG.shape))
    for kind, gpu in enumerate(gpus):
        alike_G = kind_G == kind
        fixed_XTG[:, :, alike_G] = [profile.seconds(phase, gpu, own_TG[:, alike_G], of_T1) for phase in ("gate", "aggregate")]
        fixed_XTG[1][:, alike_G] += profile.seconds(OVERHEAD, gpu, tokens_TE.sum(axis=1, keepdims=True), of_T1)
    expert_TE = [profile.seconds("expert", gpu, tokens_TE, all_T1 if expected else of_T1) for gpu in gpus]
    return np.stack(expert_TE, axis=1), *fixed_XTG
