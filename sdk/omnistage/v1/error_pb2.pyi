from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_MODEL: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_PROTOCOL: _ClassVar[ErrorReason]
    ERROR_REASON_CREDIT_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_HALF_CLOSED: _ClassVar[ErrorReason]
    ERROR_REASON_STAGE_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_REPLAY_EXPIRED: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_REFERENCE: _ClassVar[ErrorReason]
    ERROR_REASON_REVISION_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE: _ClassVar[ErrorReason]
    ERROR_REASON_CLIENT_STALLED: _ClassVar[ErrorReason]
    ERROR_REASON_SUPERSEDED: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_STARTING: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_BAD_REQUEST: ErrorReason
ERROR_REASON_UNKNOWN_MODEL: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_PROTOCOL: ErrorReason
ERROR_REASON_CREDIT_EXCEEDED: ErrorReason
ERROR_REASON_HALF_CLOSED: ErrorReason
ERROR_REASON_STAGE_LOST: ErrorReason
ERROR_REASON_REPLAY_EXPIRED: ErrorReason
ERROR_REASON_STALE_REFERENCE: ErrorReason
ERROR_REASON_REVISION_MISMATCH: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_DEADLINE: ErrorReason
ERROR_REASON_CLIENT_STALLED: ErrorReason
ERROR_REASON_SUPERSEDED: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_STARTING: ErrorReason
