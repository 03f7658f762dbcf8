from omnistage.v1 import options_pb2 as _options_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_BFLOAT16: _ClassVar[ElementType]
    ELEMENT_TYPE_INT64: _ClassVar[ElementType]
    ELEMENT_TYPE_INT32: _ClassVar[ElementType]
    ELEMENT_TYPE_INT16: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]
    ELEMENT_TYPE_BOOL: _ClassVar[ElementType]

class TransportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_KIND_UNSPECIFIED: _ClassVar[TransportKind]
    TRANSPORT_KIND_INLINE: _ClassVar[TransportKind]
    TRANSPORT_KIND_SHARED_MEMORY: _ClassVar[TransportKind]
    TRANSPORT_KIND_CUDA_IPC: _ClassVar[TransportKind]
    TRANSPORT_KIND_REMOTE: _ClassVar[TransportKind]
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_FLOAT16: ElementType
ELEMENT_TYPE_BFLOAT16: ElementType
ELEMENT_TYPE_INT64: ElementType
ELEMENT_TYPE_INT32: ElementType
ELEMENT_TYPE_INT16: ElementType
ELEMENT_TYPE_UINT8: ElementType
ELEMENT_TYPE_BOOL: ElementType
TRANSPORT_KIND_UNSPECIFIED: TransportKind
TRANSPORT_KIND_INLINE: TransportKind
TRANSPORT_KIND_SHARED_MEMORY: TransportKind
TRANSPORT_KIND_CUDA_IPC: TransportKind
TRANSPORT_KIND_REMOTE: TransportKind

class Tensor(_message.Message):
    __slots__ = ("element_type", "shape", "inline", "shared_memory", "cuda_ipc", "remote", "crc32c")
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    element_type: ElementType
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: InlinePart
    shared_memory: SharedMemorySlot
    cuda_ipc: CudaIpcSlot
    remote: RemoteSlot
    crc32c: int
    def __init__(self, element_type: _Optional[_Union[ElementType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[_Union[InlinePart, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemorySlot, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcSlot, _Mapping]] = ..., remote: _Optional[_Union[RemoteSlot, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class InlinePart(_message.Message):
    __slots__ = ("data", "offset", "total_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    total_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class SharedMemorySlot(_message.Message):
    __slots__ = ("arena", "segment", "offset", "length", "generation")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    arena: bytes
    segment: int
    offset: int
    length: int
    generation: int
    def __init__(self, arena: _Optional[bytes] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class CudaIpcSlot(_message.Message):
    __slots__ = ("arena", "offset", "length", "generation", "ready_event")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    READY_EVENT_FIELD_NUMBER: _ClassVar[int]
    arena: bytes
    offset: int
    length: int
    generation: int
    ready_event: int
    def __init__(self, arena: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ..., ready_event: _Optional[int] = ...) -> None: ...

class RemoteSlot(_message.Message):
    __slots__ = ("agent", "address", "length", "generation")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    agent: str
    address: int
    length: int
    generation: int
    def __init__(self, agent: _Optional[str] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("kind", "arena", "boot_id", "device", "probe", "metadata")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    kind: TransportKind
    arena: bytes
    boot_id: str
    device: str
    probe: Tensor
    metadata: bytes
    def __init__(self, kind: _Optional[_Union[TransportKind, str]] = ..., arena: _Optional[bytes] = ..., boot_id: _Optional[str] = ..., device: _Optional[str] = ..., probe: _Optional[_Union[Tensor, _Mapping]] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("kind", "probe", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: TransportKind
    probe: bytes
    reason: str
    def __init__(self, kind: _Optional[_Union[TransportKind, str]] = ..., probe: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    def __init__(self, slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("segment", "offset", "generation", "done_event")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DONE_EVENT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    generation: int
    done_event: int
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., generation: _Optional[int] = ..., done_event: _Optional[int] = ...) -> None: ...
