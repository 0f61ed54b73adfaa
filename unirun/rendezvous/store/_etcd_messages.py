"""The messages of etcd's v3 API, with the fields that unirun uses.

From ``rpc.proto`` and ``kv.proto`` of etcd 3.4, whose field numbers never change. Generated modules are not used: they
work with few versions of protobuf, and register global names such as ``rpc.proto``, so that a second etcd client in
the same process would fail to import.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from unirun.errors import StoreRefused

_PACKAGE = "etcdserverpb"

# name: field=number:type; "*" is a repeated field, "|" a oneof, so that 0 and "" are sent too.
_MESSAGES = """
ResponseHeader: revision=3:int64
KeyValue: key=1:bytes mod_revision=3:int64 value=5:bytes
Event: type=1:int32 kv=2:KeyValue
RangeRequest: key=1:bytes range_end=2:bytes limit=3:int64 keys_only=8:bool
RangeResponse: header=1:ResponseHeader kvs=2:*KeyValue
PutRequest: key=1:bytes value=2:bytes lease=3:int64
DeleteRangeRequest: key=1:bytes range_end=2:bytes
RequestOp: request_put=2:PutRequest request_delete_range=3:DeleteRangeRequest
Compare: result=1:int32 target=2:int32 key=3:bytes mod_revision=6:|int64 value=7:|bytes
TxnRequest: compare=1:*Compare success=2:*RequestOp
TxnResponse: header=1:ResponseHeader succeeded=2:bool
LeaseGrantRequest: TTL=1:int64
LeaseGrantResponse: ID=2:int64 TTL=3:int64
LeaseRevokeRequest: ID=1:int64
LeaseRevokeResponse: header=1:ResponseHeader
LeaseKeepAliveRequest: ID=1:int64
LeaseKeepAliveResponse: ID=2:int64 TTL=3:int64
WatchCreateRequest: key=1:bytes range_end=2:bytes start_revision=3:int64 progress_notify=4:bool fragment=8:bool
WatchRequest: create_request=1:WatchCreateRequest
WatchResponse: header=1:ResponseHeader created=3:bool canceled=4:bool compact_revision=5:int64 \
 cancel_reason=6:string fragment=7:bool events=11:*Event
AuthenticateRequest: name=1:string password=2:string
AuthenticateResponse: token=2:string
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
}


def _describe(line: str) -> descriptor_pb2.DescriptorProto:
    name, _, fields = line.partition(": ")
    message = descriptor_pb2.DescriptorProto(name=name)
    for field in fields.split():
        label, _, rest = field.partition("=")
        number, _, kind = rest.partition(":")
        described = message.field.add(name=label, number=int(number), label=_Field.LABEL_OPTIONAL)
        if kind.startswith("*"):
            described.label = _Field.LABEL_REPEATED
        if kind.startswith("|"):
            described.oneof_index = 0
        kind = kind.lstrip("*|")
        if kind in _SCALARS:
            described.type = _SCALARS[kind]
        else:
            described.type, described.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if "|" in fields:
        message.oneof_decl.add(name="choice")
    return message


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="unirun/etcd.proto", package=_PACKAGE, syntax="proto3")
    file.message_type.extend(_describe(line) for line in _MESSAGES.strip().splitlines())
    # Not the default pool of the process: another etcd client may register the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes


_CLASSES = _classes()


def message(name: str, /, **fields: Any) -> Any:
    """Build a message of the class `name`."""
    return message_class(name)(**fields)


def text(data: bytes) -> str:
    """Decode a key or a value. Raises `StoreRefused` when it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreRefused(
            f"etcd holds {data[:80]!r}, which no unirun has written",
            "does the store's prefix belong to something else? choose another one",
        ) from error


def message_class(name: str) -> Any:
    """The class of the messages `name`."""
    return _CLASSES[f"{_PACKAGE}.{name}"]
