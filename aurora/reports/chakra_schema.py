"""Messages of MLCommons Chakra execution traces that aurora writes, as protobuf classes made at run time.

Source: schema/protobuf/et_def.proto of github.com/mlcommons/chakra: same names, numbers and types. Fields that aurora never
writes are left out; readers take their absence as empty.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

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
