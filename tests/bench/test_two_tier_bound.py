"""The two-tier bound of deduplicated tokens, against a linear program of all ways to forward them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from aurora.algorithms.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.types import Hierarchy
from bench.network.two_tier import deduplicated_two_tier_bound


@st.composite
def few_tokens(draw):
    """(rank_UK, source_U, server_G) of up to six tokens on servers of any sizes."""
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks, tokens, top_k = sum(members), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    server_G = rng.permutation(np.repeat(np.arange(len(members)), members))
    return rng.integers(0, ranks, (tokens, top_k)), rng.integers(0, ranks, tokens), server_G


def bound_s(rank_UK, source_U, server_G, *rates):
    rows = hierarchical_rows(rank_UK, source_U, Hierarchy(server_G, 1))
    return deduplicated_two_tier_bound(rows.sent_GN, rows.needed_GCG.sum(axis=1), server_G, *rates)


def program_s(rank_UK, source_U, server_G, nic_Bps, inside_Bps, shared_nic):
    """Seconds in which tokens of a byte are dispatched at best, as fluids that are forwarded without delay.

    A token crosses to a server in any number of copies, each by any NIC at either end: to several NICs there, or once and then
    on inside. Shares of a copy are variables; every port's load is at most its rate times the seconds, which are minimised.
    """
    loads = []  # of each variable: what it loads with a byte, and the equation of which it is a part
    whole = 0

    def nic(side, rank):
        return side, "nic", int(server_G[rank]) if shared_nic else rank

    for token, source in zip(rank_UK.tolist(), source_U.tolist(), strict=True):
        for server in range(server_G.max() + 1):
            needing = sorted({rank for rank in token if server_G[rank] == server and rank != source})
            members = np.flatnonzero(server_G == server).tolist()
            if not needing:
                continue
            if server == server_G[source]:
                for rank in needing:
                    loads.append(([("out", source), ("in", rank)], whole))
                    for via in set(members) - {source, rank}:  # forwarded by another that needs it, whose copy is counted
                        if via in needing:
                            loads.append(([("out", via), ("in", rank)], whole))
                    whole += 1
                continue
            for landing in product((False, True), repeat=len(members)):
                at = [rank for rank, lands in zip(members, landing, strict=True) if lands]
                if not at:
                    continue
                for leaves, gives in product(np.flatnonzero(server_G == server_G[source]).tolist(), at):
                    load = [("out", source), ("in", leaves)] if leaves != source else []
                    for rank in at:
                        load += [nic("out", leaves), nic("in", rank)]
                    for rank in set(needing) - set(at):
                        load += [("out", gives), ("in", rank)]
                    loads.append((load, whole))
            whole += 1
    ports = sorted({port for load, _ in loads for port in load}, key=str)
    if not ports:
        return 0.0
    most = np.zeros((len(ports), len(loads) + 1))
    equal = np.zeros((whole, len(loads) + 1))
    for number, (load, part) in enumerate(loads):
        equal[part, number] = 1
        for port in load:
            most[ports.index(port), number] += 1
    most[:, -1] = [-nic_Bps if "nic" in port else -inside_Bps for port in ports]
    cost = np.append(np.zeros(len(loads)), 1.0)
    found = linprog(cost, most, np.zeros(len(ports)), equal, np.ones(whole))
    assert found.success, found.message
    return found.fun


@settings(max_examples=60)
@given(few_tokens(), st.sampled_from([0.5, 2.0, 9.0]), st.booleans())
def test_no_way_to_forward_is_faster(case, inside_Bps, shared_nic):
    rates = 1.0, inside_Bps, shared_nic
    assert bound_s(*case, *rates) <= program_s(*case, *rates) * (1 + 1e-9)


@settings(max_examples=60)
@given(few_tokens(), st.booleans())
def test_where_the_inside_is_fast_the_nics_alone_decide(case, shared_nic):
    rates = 1.0, 1e6, shared_nic
    assert bound_s(*case, *rates) == pytest.approx(program_s(*case, *rates), rel=1e-3, abs=1e-4)


@given(few_tokens(), st.integers(1, 3), st.sampled_from([0.5, 2.0, 9.0]))
def test_steps_of_a_hierarchical_all_to_all_are_not_faster(case, chunks, inside_Bps):
    """Neither their NICs nor their inside ports, each over all steps, and back again."""
    rank_UK, source_U, server_G = case
    hierarchy = Hierarchy(server_G, chunks)
    rows_GG = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy).sum(axis=0)
    apart_GG = server_G[:, None] != server_G
    for way_GG in (rows_GG, rows_GG.T):
        nic, inside = (
            max(part_GG.sum(axis=0).max(), part_GG.sum(axis=1).max())
            for part_GG in (np.where(apart_GG, way_GG, 0), np.where(apart_GG, 0, way_GG))
        )
        assert bound_s(*case, 1.0, inside_Bps) <= max(nic, inside / inside_Bps) * (1 + 1e-9)


def test_by_hand():
    """Two tokens of rank 0 for both ranks of the other server: each crosses once, by two NICs or one."""
    case = np.array([[2, 3], [2, 3]]), np.array([0, 0]), np.array([0, 0, 1, 1])
    assert bound_s(*case, 1.0, 100.0) == 1.0
    assert bound_s(*case, 1.0, 100.0, True) == 2.0
    assert bound_s(*case, 100.0, 0.5) == pytest.approx(4 / 201)
    assert bound_s(np.array([[1], [1]]), *case[1:], 1.0, 0.5) == 4.0
