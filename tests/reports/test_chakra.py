"""Chakra's execution traces: transfers have two ends, dependencies run forward, and sizes are those of the traffic."""

import io
from collections import Counter

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.planner.plan import make_plan
from aurora.planner.workload.synthetic import draw_profile
from aurora.planner.workload.traffic import exchange_bytes, exchange_rows
from aurora.reports.inputs import ReportInputs
from aurora.simulator.interpreter import simulate_plan
from aurora.types import PlanOptions, SyntheticOptions, TraceRecorder
from tests.reports.conftest import CONFIG
from tests.simulator.test_hierarchical import machines

proto = pytest.importorskip("google.protobuf.proto")

from aurora.reports.chakra import (  # noqa: E402
    COMPUTE,
    RECEIVE,
    SEND,
    chakra_messages,
    execution_traces,
)


def read(content):
    """Metadata and nodes of a file."""
    made, file = chakra_messages(), io.BytesIO(content)
    head = proto.parse_length_prefixed(made.GlobalMetadata, file)
    nodes = []
    while (node := proto.parse_length_prefixed(made.Node, file)) is not None:
        nodes.append(node)
    return head, nodes


def value(node, name):
    """A node's attribute."""
    (attribute,) = (each for each in node.attr if each.name == name)
    return getattr(attribute, attribute.WhichOneof("value"))


def by_rank(inputs, kind="predicted"):
    """Nodes of each rank."""
    files = dict(execution_traces(inputs))
    return [read(files[f"{kind}.{rank}.et"])[1] for rank in range(len(inputs.plan.cluster))]


def ends(nodes_R, kind):
    """Sources, destinations, tags and sizes of the nodes of a kind, counted."""
    names = ("comm_src", "comm_dst", "comm_tag", "comm_size")
    return Counter(tuple(value(node, name) for name in names) for nodes in nodes_R for node in nodes if node.type == kind)


def test_bytes_are_those_of_chakras_schema():
    made = chakra_messages()
    attribute = made.AttributeProto(name="n", int64_val=300)
    node = made.Node(id=1, name="a", type=SEND, data_deps=[0, 2], start_time_micros=4, duration_micros=5, attr=[attribute])
    assert node.SerializeToString() == bytes.fromhex("080112016118052a0200023004380552060a016e48ac02")
    assert made.GlobalMetadata(version="x").SerializeToString() == bytes.fromhex("0a0178")
    values = {"int32_val": "3801", "bool_val": "d80101"}
    for name, expected in values.items():
        assert made.AttributeProto(**{name: 1}).SerializeToString() == bytes.fromhex(expected)
    assert made.AttributeProto(string_val="x").SerializeToString() == bytes.fromhex("ea010178")


def test_every_send_has_its_receive(together):
    nodes_R = by_rank(together)
    sent, received = ends(nodes_R, SEND), ends(nodes_R, RECEIVE)
    assert sent == received
    assert set(sent.values()) == {1}
    assert len({tag for _, _, tag, _ in sent}) == len(sent)
    for rank, nodes in enumerate(nodes_R):
        assert all(
            value(node, "comm_src" if node.type == SEND else "comm_dst") == rank for node in nodes if node.type != COMPUTE
        )


def test_bytes_are_the_traffics(alone):
    """Counted from the profile's routing and the plan's placement, not from the trace."""
    (model,), (profile,) = alone.plan.models, alone.profiles
    expected_GG = np.zeros((4, 4), dtype=np.int64)
    for layer in range(profile.layers):
        for window in range(profile.windows):
            rows_SGG = exchange_rows(profile, layer, model.placement.split_EG(layer), window=window)
            for phase in ("dispatch", "combine"):
                expected_GG += exchange_bytes(rows_SGG, profile, phase, False).sum(axis=0)
    np.fill_diagonal(expected_GG, 0)
    found_GG = np.zeros((4, 4), dtype=np.int64)
    for src, dst, _, size in ends(by_rank(alone), SEND).elements():
        found_GG[src, dst] += size
    assert np.array_equal(found_GG, expected_GG)


@pytest.mark.parametrize("kind", ["predicted", "measured"])
def test_nodes_await_nodes_before_them_and_end_in_their_time(alone, kind):
    trace = dict(zip(("predicted", "measured"), (trace for _, trace in alone.traces), strict=True))[kind]
    for rank, nodes in enumerate(by_rank(alone, kind)):
        assert [node.id for node in nodes] == list(range(len(nodes)))
        end_us = [node.start_time_micros + node.duration_micros for node in nodes]
        for node in nodes:
            assert all(other < node.id for other in node.data_deps)
            assert all(end_us[other] <= node.start_time_micros + 1 for other in node.data_deps if node.type == COMPUTE)
        last_s = trace.end_s_X[trace.rank_X == rank].max() - trace.start_s_X.min()
        assert max(end_us) == pytest.approx(last_s * 1e6, abs=1)
        assert sum(not node.data_deps for node in nodes) == 1, "all but the first gate await something"


def test_experts_await_all_transfers_and_sends_of_a_port_their_turn(alone):
    for nodes in by_rank(alone):
        experts = [node for node in nodes if node.name.endswith("step 1 layer 1 expert")]
        dispatch = {node.id for node in nodes if " step 1 layer 1 dispatch " in node.name}
        sends = [node.id for node in nodes if node.id in dispatch and node.type == SEND]
        (expert,) = experts
        awaited = set(expert.data_deps)
        for node in reversed(nodes):
            awaited |= set(node.data_deps) if node.id in awaited & dispatch else set()
        assert dispatch <= awaited
        chained = [other for other in sends if set(nodes[other].data_deps) & set(sends)]
        assert len(chained) == len(sends) - 1, "one send of a port at a time"


def test_hierarchical_sends_await_what_they_pass_on():
    given = draw_profile("zipf:1", CONFIG, SyntheticOptions(4, window_tokens=24, windows=1, token_level=True))
    plan = make_plan(machines([0, 0, 1, 1], nic_Bps=1e6, inside_Bps=1e9), [given], PlanOptions(all_to_all="hierarchical"))
    assert plan.models[0].hierarchy is not None
    nodes_R = by_rank(ReportInputs(plan, (("p.npz", simulate_plan(plan, [given])),), (given,)))
    assert ends(nodes_R, SEND) == ends(nodes_R, RECEIVE)
    kinds_R = [{node.id: node.type for node in nodes} for nodes in nodes_R]
    assert any(
        kinds[other] == RECEIVE and " dispatch " in node.name and " dispatch " in nodes[other].name
        for nodes, kinds in zip(nodes_R, kinds_R, strict=True)
        for node in nodes
        if node.type == SEND
        for other in node.data_deps
    )


def test_a_transfer_without_its_other_end_is_left_out(alone):
    recorder = TraceRecorder("measured", ("one",), 4)
    recorder.add(0, 0, 0, 0, "gate", 0.0, 1.0)
    for peer, sent, rank in ((1, True, 0), (0, False, 1), (2, True, 0)):
        recorder.add(rank, 0, 0, 0, "dispatch", 1.0, 2.0, (peer, sent, 8))
    names = [node.name for node in by_rank(ReportInputs(alone.plan, (("m.npz", recorder.trace()),)), "measured")[0]]
    assert names == [f"{alone.models[0]} step 0 layer 0 {what}" for what in ("gate", "dispatch to 1")]


def test_files_are_named_by_kind_and_rank(alone):
    (_, predicted), measured = alone.traces
    inputs = ReportInputs(alone.plan, (("x", predicted), measured, ("y", predicted)))
    assert [name for name, _ in execution_traces(inputs)] == [
        f"{name}.{rank}.et" for name in ("predicted", "measured", "predicted2") for rank in range(4)
    ]
    with pytest.raises(BadInput, match="`format` chakra: expected a trace, found none"):
        list(execution_traces(ReportInputs(alone.plan)))
