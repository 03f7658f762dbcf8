from google.protobuf import duration_pb2 as _duration_pb2
from omnistage.v1 import chunk_pb2 as _chunk_pb2
from omnistage.v1 import options_pb2 as _options_pb2
from omnistage.v1 import stage_pb2 as _stage_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_SERVING: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_LOST: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_UNLOADED: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_SERVING: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_LOST: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_UNLOADED: ReplicaState

class GenerateRequest(_message.Message):
    __slots__ = ("model", "outputs", "seed", "thinker", "talker", "code2wav", "diffusion", "conversation_id", "request_id", "resume", "revisions", "batches")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    THINKER_FIELD_NUMBER: _ClassVar[int]
    TALKER_FIELD_NUMBER: _ClassVar[int]
    CODE2WAV_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    outputs: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    thinker: _stage_pb2.ThinkerParams
    talker: _stage_pb2.TalkerParams
    code2wav: _stage_pb2.Code2WavParams
    diffusion: _stage_pb2.DiffusionParams
    conversation_id: str
    request_id: str
    resume: _stage_pb2.Resume
    revisions: _containers.RepeatedScalarFieldContainer[str]
    batches: bool
    def __init__(self, model: _Optional[str] = ..., outputs: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., thinker: _Optional[_Union[_stage_pb2.ThinkerParams, _Mapping]] = ..., talker: _Optional[_Union[_stage_pb2.TalkerParams, _Mapping]] = ..., code2wav: _Optional[_Union[_stage_pb2.Code2WavParams, _Mapping]] = ..., diffusion: _Optional[_Union[_stage_pb2.DiffusionParams, _Mapping]] = ..., conversation_id: _Optional[str] = ..., request_id: _Optional[str] = ..., resume: _Optional[_Union[_stage_pb2.Resume, _Mapping]] = ..., revisions: _Optional[_Iterable[str]] = ..., batches: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "usage", "failover", "chunks")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: _chunk_pb2.Chunk
    usage: Usage
    failover: _stage_pb2.Failover
    chunks: _chunk_pb2.Chunks
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[_chunk_pb2.Chunk, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., failover: _Optional[_Union[_stage_pb2.Failover, _Mapping]] = ..., chunks: _Optional[_Union[_chunk_pb2.Chunks, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "model", "seed", "revisions")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    seed: int
    revisions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., revisions: _Optional[_Iterable[str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("stages", "queued", "first_text", "first_audio", "total", "finish_reason")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TEXT_FIELD_NUMBER: _ClassVar[int]
    FIRST_AUDIO_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[_stage_pb2.Report]
    queued: _duration_pb2.Duration
    first_text: _duration_pb2.Duration
    first_audio: _duration_pb2.Duration
    total: _duration_pb2.Duration
    finish_reason: _chunk_pb2.FinishReason
    def __init__(self, stages: _Optional[_Iterable[_Union[_stage_pb2.Report, _Mapping]]] = ..., queued: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_text: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_audio: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., finish_reason: _Optional[_Union[_chunk_pb2.FinishReason, str]] = ...) -> None: ...

class ConverseRequest(_message.Message):
    __slots__ = ("turn", "chunk", "credit", "interrupt")
    TURN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    turn: GenerateRequest
    chunk: _chunk_pb2.Chunk
    credit: _stage_pb2.Credit
    interrupt: _stage_pb2.Interrupt
    def __init__(self, turn: _Optional[_Union[GenerateRequest, _Mapping]] = ..., chunk: _Optional[_Union[_chunk_pb2.Chunk, _Mapping]] = ..., credit: _Optional[_Union[_stage_pb2.Credit, _Mapping]] = ..., interrupt: _Optional[_Union[_stage_pb2.Interrupt, _Mapping]] = ...) -> None: ...

class ConverseResponse(_message.Message):
    __slots__ = ("started", "chunk", "usage", "credit", "turn_failed", "failover", "chunks")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    TURN_FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: _chunk_pb2.Chunk
    usage: Usage
    credit: _stage_pb2.Credit
    turn_failed: TurnFailed
    failover: _stage_pb2.Failover
    chunks: _chunk_pb2.Chunks
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[_chunk_pb2.Chunk, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., credit: _Optional[_Union[_stage_pb2.Credit, _Mapping]] = ..., turn_failed: _Optional[_Union[TurnFailed, _Mapping]] = ..., failover: _Optional[_Union[_stage_pb2.Failover, _Mapping]] = ..., chunks: _Optional[_Union[_chunk_pb2.Chunks, _Mapping]] = ...) -> None: ...

class TurnFailed(_message.Message):
    __slots__ = ("code", "message", "reason", "metadata", "retry_delay")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    metadata: _containers.ScalarMap[str, str]
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "starting")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    starting: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., starting: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "stages", "inputs", "outputs", "voices", "description", "on_request", "unloaded", "names", "unsure_outputs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    VOICES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ON_REQUEST_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    UNSURE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    stages: _containers.RepeatedScalarFieldContainer[_stage_pb2.StageKind]
    inputs: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    voices: _containers.RepeatedScalarFieldContainer[str]
    description: str
    on_request: _containers.RepeatedScalarFieldContainer[str]
    unloaded: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    unsure_outputs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[_stage_pb2.StageKind, str]]] = ..., inputs: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[str]] = ..., voices: _Optional[_Iterable[str]] = ..., description: _Optional[str] = ..., on_request: _Optional[_Iterable[str]] = ..., unloaded: bool = ..., names: _Optional[_Iterable[str]] = ..., unsure_outputs: _Optional[_Iterable[str]] = ...) -> None: ...

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReplicasResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("pipeline", "kind", "model", "address", "pid", "state", "load", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    kind: _stage_pb2.StageKind
    model: str
    address: str
    pid: int
    state: ReplicaState
    load: _stage_pb2.WatchResponse
    settings: _containers.ScalarMap[str, str]
    def __init__(self, pipeline: _Optional[str] = ..., kind: _Optional[_Union[_stage_pb2.StageKind, str]] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., load: _Optional[_Union[_stage_pb2.WatchResponse, _Mapping]] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...
