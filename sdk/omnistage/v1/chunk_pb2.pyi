from omnistage.v1 import options_pb2 as _options_pb2
from omnistage.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_INTERRUPTED: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]

class AudioEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIO_ENCODING_UNSPECIFIED: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_PCM16: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_FLOAT32: _ClassVar[AudioEncoding]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_INTERRUPTED: FinishReason
FINISH_REASON_REPETITION: FinishReason
AUDIO_ENCODING_UNSPECIFIED: AudioEncoding
AUDIO_ENCODING_PCM16: AudioEncoding
AUDIO_ENCODING_FLOAT32: AudioEncoding

class Chunk(_message.Message):
    __slots__ = ("port", "seq", "first", "count", "last", "text", "codes", "audio", "image", "video", "tensor", "progress", "media", "alignment")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    port: str
    seq: int
    first: int
    count: int
    last: bool
    text: TextChunk
    codes: CodeChunk
    audio: AudioChunk
    image: ImageChunk
    video: VideoChunk
    tensor: _tensor_pb2.Tensor
    progress: ProgressChunk
    media: MediaChunk
    alignment: AlignmentChunk
    def __init__(self, port: _Optional[str] = ..., seq: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., last: bool = ..., text: _Optional[_Union[TextChunk, _Mapping]] = ..., codes: _Optional[_Union[CodeChunk, _Mapping]] = ..., audio: _Optional[_Union[AudioChunk, _Mapping]] = ..., image: _Optional[_Union[ImageChunk, _Mapping]] = ..., video: _Optional[_Union[VideoChunk, _Mapping]] = ..., tensor: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., progress: _Optional[_Union[ProgressChunk, _Mapping]] = ..., media: _Optional[_Union[MediaChunk, _Mapping]] = ..., alignment: _Optional[_Union[AlignmentChunk, _Mapping]] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class TextChunk(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finish_reason", "top_logprobs", "pieces", "thought")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: FinishReason
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    thought: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., pieces: _Optional[_Iterable[bytes]] = ..., thought: _Optional[str] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "pieces")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CodeChunk(_message.Message):
    __slots__ = ("codes", "codebook_count")
    CODES_FIELD_NUMBER: _ClassVar[int]
    CODEBOOK_COUNT_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    codebook_count: int
    def __init__(self, codes: _Optional[_Iterable[int]] = ..., codebook_count: _Optional[int] = ...) -> None: ...

class AudioChunk(_message.Message):
    __slots__ = ("data", "encoding", "sample_rate_hz", "channel_count", "prebuffer_ms")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREBUFFER_MS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    encoding: AudioEncoding
    sample_rate_hz: int
    channel_count: int
    prebuffer_ms: int
    def __init__(self, data: _Optional[bytes] = ..., encoding: _Optional[_Union[AudioEncoding, str]] = ..., sample_rate_hz: _Optional[int] = ..., channel_count: _Optional[int] = ..., prebuffer_ms: _Optional[int] = ...) -> None: ...

class ImageChunk(_message.Message):
    __slots__ = ("data", "media_type", "preview_step", "layer")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_STEP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    data: _tensor_pb2.InlinePart
    media_type: str
    preview_step: int
    layer: int
    def __init__(self, data: _Optional[_Union[_tensor_pb2.InlinePart, _Mapping]] = ..., media_type: _Optional[str] = ..., preview_step: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...

class VideoChunk(_message.Message):
    __slots__ = ("data", "media_type", "codecs")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    media_type: str
    codecs: str
    def __init__(self, data: _Optional[bytes] = ..., media_type: _Optional[str] = ..., codecs: _Optional[str] = ...) -> None: ...

class MediaChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ProgressChunk(_message.Message):
    __slots__ = ("done", "total")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class AlignmentChunk(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedCompositeFieldContainer[SpokenWord]
    def __init__(self, words: _Optional[_Iterable[_Union[SpokenWord, _Mapping]]] = ...) -> None: ...

class SpokenWord(_message.Message):
    __slots__ = ("first_character", "character_count", "begin_us", "end_us")
    FIRST_CHARACTER_FIELD_NUMBER: _ClassVar[int]
    CHARACTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    first_character: int
    character_count: int
    begin_us: int
    end_us: int
    def __init__(self, first_character: _Optional[int] = ..., character_count: _Optional[int] = ..., begin_us: _Optional[int] = ..., end_us: _Optional[int] = ...) -> None: ...
