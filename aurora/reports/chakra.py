"""Traces as MLCommons Chakra execution traces: what each rank computes, sends and receives, and what each of these awaits.

ASTRA-sim and other simulators replay them on networks of their own. Waits for all ranks ("counts") have no node."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np

from aurora.errors import BadInput
from aurora.reports.inputs import ReportInputs
from aurora.reports.trace_times import transfer_ends
from aurora.types import TRACE_PHASES, Trace
from aurora.types.arrays import IntArray

COMPUTE, SEND, RECEIVE = 4, 5, 6  # of NodeType: COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE
_PACKAGE = "ChakraProtoMsg"
_FIELDS: dict[str, tuple[tuple[str, int, str], ...]] = {  # by message: name, number and type of each field
    "AttributeProto": (
        ("name", 1, "string"),
        ("int32_val", 7, "int32"),
        ("int64_val", 9, "int64"),
        ("bool_val", 27, "bool"),
        ("string_val", 29, "string"),
    ),
    "GlobalMetadata": (("version", 1, "string"), ("attr", 2, "AttributeProto")),
    "Node": (
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "NodeType"),
        ("data_deps", 5, "uint64[]"),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("attr", 10, "AttributeProto"),
    ),
}
_NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)  # fmt: skip


@cache
def chakra_messages() -> SimpleNamespace:
    """Returns the message classes AttributeProto, GlobalMetadata and Node."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type: Any = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="aurora/et_def.proto", package=_PACKAGE, syntax="proto3")
    node_type = file.enum_type.add(name="NodeType")
    for number, name in enumerate(_NODE_TYPES):
        node_type.value.add(name=name, number=number)
    for message, fields in _FIELDS.items():
        made = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = made.field.add(name=name, number=number, label=field_type.LABEL_OPTIONAL)
            if kind.endswith("[]") or kind in _FIELDS:
                field.label = field_type.LABEL_REPEATED
            if kind in _FIELDS or kind == "NodeType":
                field.type = field_type.TYPE_MESSAGE if kind in _FIELDS else field_type.TYPE_ENUM
                field.type_name = f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field_type, f"TYPE_{kind.removesuffix('[]').upper()}")
            if name.endswith("_val"):
                field.oneof_index = 0
        if message == "AttributeProto":
            made.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}
    return SimpleNamespace(**classes)


VERSION = "0.0.4"  # of the schema
MOST_TAGS = 2**31 - 1  # tags are int32
_AFTER_LAYERS = [TRACE_PHASES.index(phase) for phase in ("head", "moves")]


@dataclass
class _Operation:
    """The rows of one compute phase or all-to-all on one rank: a trace's row indices, by start."""

    rows: list[int]
    start_s: float
    deps: dict[int, list[int]] = field(default_factory=dict)  # by row, the rows that it awaits


def execution_traces(inputs: ReportInputs) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of one file for each trace and rank, as `execution_trace`.

    Files are named by the trace's kind and the rank, as in predicted.0.et; a further trace of a kind has its number: measured2.

    Args:
        inputs: the plan, its traces, and the names of its models.

    Raises:
        BadInput: if there is no trace, or it holds more transfers than tags.
    """
    if not inputs.traces:
        raise BadInput("`format` chakra: expected a trace, found none; aurora simulate PLAN writes one")
    kinds: list[str] = []
    for _, trace in inputs.traces:
        kinds.append(trace.kind)
        many = kinds.count(trace.kind)
        tag_X, names_M = _tags(trace), inputs.names_in(trace)
        hierarchical_M = [model.hierarchy is not None for model in inputs.plan.models] * (len(names_M) // len(inputs.models))
        for rank in range(trace.ranks):
            content = execution_trace(trace, rank, tag_X, names_M, hierarchical_M)
            yield f"{trace.kind}{many if many > 1 else ''}.{rank}.et", content


def _tags(trace: Trace) -> IntArray:
    """(X,) the number of each transfer, on both of its ends; -1 for rows that are none, or that lack their other end."""
    tag_X, ends_F2 = np.full(len(trace), -1), transfer_ends(trace)
    if len(ends_F2) > MOST_TAGS:
        raise BadInput(f"`format` chakra: expected at most {MOST_TAGS} transfers, found {len(ends_F2)}")
    by_start = np.lexsort((ends_F2[:, 1], ends_F2[:, 0]))
    tag_X[ends_F2[by_start].T] = np.arange(len(ends_F2))
    return tag_X


def execution_trace(trace: Trace, rank: int, tag_X: IntArray, models: tuple[str, ...], hierarchical_M: list[bool]) -> bytes:
    """Returns one rank's file: GlobalMetadata, then its nodes, each with its length before it.

    A compute phase awaits all of the model's operation before it. So do transfers of an all-to-all, of which a send also awaits
    the send of its port that ended last before it began: the order of the plan. In hierarchical all-to-alls, which pass on what
    came, it awaits the last receive before it, too. Both ends of a transfer have one tag and one size. Times are whole
    microseconds from the trace's start, rounded so that errors do not add up.

    Args:
        trace: the trace.
        rank: the rank.
        tag_X: (X,) the number of each row's transfer; rows of transfers without one are left out.
        models: names of the models.
        hierarchical_M: (M,) whether each model's all-to-alls are hierarchical.
    """
    made, out = chakra_messages(), io.BytesIO()
    _write(made.GlobalMetadata(version=VERSION, attr=[made.AttributeProto(name="trace", string_val=trace.kind)]), out)
    counts = TRACE_PHASES.index("counts")
    kept_X = (trace.rank_X == rank) & ((tag_X >= 0) | (trace.peer_X < 0)) & (trace.phase_X != counts)
    operations = [
        each
        for model, hierarchical in enumerate(hierarchical_M)
        for each in _operations(trace, np.flatnonzero(kept_X & (trace.model_X == model)), hierarchical)
    ]
    operations.sort(key=lambda each: each.start_s)  # stable, so that each model's stay in sequence
    began_s = float(trace.start_s_X.min())
    number = {row: index for index, row in enumerate(row for each in operations for row in each.rows)}
    for operation in operations:
        for row in operation.rows:
            start_us, end_us = (round((float(column[row]) - began_s) * 1e6) for column in (trace.start_s_X, trace.end_s_X))
            node = made.Node(
                id=number[row],
                name=_name(trace, row, models),
                type=COMPUTE if trace.peer_X[row] < 0 else SEND if trace.sent_X[row] else RECEIVE,
                data_deps=sorted(number[other] for other in operation.deps[row]),
                start_time_micros=start_us,
                duration_micros=end_us - start_us,
                attr=[made.AttributeProto(name=name, **value) for name, value in _attributes(trace, row, int(tag_X[row]))],
            )
            _write(node, out)
    return out.getvalue()


def _operations(trace: Trace, rows: IntArray, hierarchical: bool) -> list[_Operation]:
    """One model's operations on one rank, in the sequence of its program, with what each row awaits."""
    layer_X = np.where(np.isin(trace.phase_X[rows], _AFTER_LAYERS), np.iinfo(np.int64).max, trace.layer_X[rows])
    key_4X = np.stack([trace.epoch_X[rows], trace.step_X[rows], layer_X, trace.phase_X[rows]])
    by_key = np.lexsort((trace.end_s_X[rows], trace.start_s_X[rows], *key_4X[::-1]))
    found: list[_Operation] = []
    reached_s, before = -np.inf, list[int]()
    for _, group in groupby(zip(key_4X.T[by_key].tolist(), rows[by_key].tolist(), strict=True), key=lambda pair: pair[0]):
        own = [row for _, row in group]
        reached_s = max(reached_s, float(trace.start_s_X[own[0]]))
        operation = _Operation(own, reached_s)
        awaited: set[int] = set()
        for row in own:
            inside = _freed_by(trace, row, own, hierarchical)
            awaited.update(inside)
            operation.deps[row] = inside or before
        before = [row for row in own if row not in awaited]
        found.append(operation)
    return found


def _freed_by(trace: Trace, row: int, own: list[int], hierarchical: bool) -> list[int]:
    """The rows of its own operation that a row awaits: in compute the piece before it, of a send as in `execution_trace`."""
    if trace.peer_X[row] >= 0 and not trace.sent_X[row]:
        return []
    earlier = [other for other in own[: own.index(row)] if trace.end_s_X[other] <= trace.start_s_X[row]]
    kinds = (True, False) if hierarchical and trace.peer_X[row] >= 0 else (bool(trace.sent_X[row]),)
    ended = [[other for other in earlier if trace.sent_X[other] == kind] for kind in kinds]
    return [max(each, key=lambda other: (trace.end_s_X[other], other)) for each in ended if each]


def _name(trace: Trace, row: int, models: tuple[str, ...]) -> str:
    """Returns a node's name for readers."""
    phase, peer = TRACE_PHASES[trace.phase_X[row]], int(trace.peer_X[row])
    way = "" if peer < 0 else f" {'to' if trace.sent_X[row] else 'from'} {peer}"
    return f"{models[trace.model_X[row]]} step {trace.step_X[row]} layer {trace.layer_X[row]} {phase}{way}"


def _attributes(trace: Trace, row: int, tag: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A node's attributes, of the types that Chakra's feeder reads."""
    yield "is_cpu_op", {"bool_val": False}
    if (peer := int(trace.peer_X[row])) >= 0:
        rank = int(trace.rank_X[row])
        src, dst = (rank, peer) if trace.sent_X[row] else (peer, rank)
        yield "comm_size", {"int64_val": int(trace.bytes_X[row])}
        yield "comm_src", {"int32_val": src}
        yield "comm_dst", {"int32_val": dst}
        yield "comm_tag", {"int32_val": tag}


def _write(message: Any, out: io.BytesIO) -> None:
    """Writes a message with its length before it, as a varint."""
    from google.protobuf import proto

    proto.serialize_length_prefixed(message, out)
