from google.protobuf import duration_pb2 as _duration_pb2
from omnistage.v1 import chunk_pb2 as _chunk_pb2
from omnistage.v1 import options_pb2 as _options_pb2
from omnistage.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_KIND_UNSPECIFIED: _ClassVar[StageKind]
    STAGE_KIND_THINKER: _ClassVar[StageKind]
    STAGE_KIND_TALKER: _ClassVar[StageKind]
    STAGE_KIND_CODE2WAV: _ClassVar[StageKind]
    STAGE_KIND_DIFFUSION: _ClassVar[StageKind]

class Payload(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAYLOAD_UNSPECIFIED: _ClassVar[Payload]
    PAYLOAD_TEXT: _ClassVar[Payload]
    PAYLOAD_CODES: _ClassVar[Payload]
    PAYLOAD_AUDIO: _ClassVar[Payload]
    PAYLOAD_IMAGE: _ClassVar[Payload]
    PAYLOAD_VIDEO: _ClassVar[Payload]
    PAYLOAD_TENSOR: _ClassVar[Payload]
    PAYLOAD_PROGRESS: _ClassVar[Payload]
    PAYLOAD_MEDIA: _ClassVar[Payload]
    PAYLOAD_ALIGNMENT: _ClassVar[Payload]

class Replay(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAY_UNSPECIFIED: _ClassVar[Replay]
    REPLAY_ALL: _ClassVar[Replay]
    REPLAY_WINDOW: _ClassVar[Replay]
STAGE_KIND_UNSPECIFIED: StageKind
STAGE_KIND_THINKER: StageKind
STAGE_KIND_TALKER: StageKind
STAGE_KIND_CODE2WAV: StageKind
STAGE_KIND_DIFFUSION: StageKind
PAYLOAD_UNSPECIFIED: Payload
PAYLOAD_TEXT: Payload
PAYLOAD_CODES: Payload
PAYLOAD_AUDIO: Payload
PAYLOAD_IMAGE: Payload
PAYLOAD_VIDEO: Payload
PAYLOAD_TENSOR: Payload
PAYLOAD_PROGRESS: Payload
PAYLOAD_MEDIA: Payload
PAYLOAD_ALIGNMENT: Payload
REPLAY_UNSPECIFIED: Replay
REPLAY_ALL: Replay
REPLAY_WINDOW: Replay

class RunRequest(_message.Message):
    __slots__ = ("open", "chunk", "credit", "release", "answer", "interrupt", "chunks")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    open: Open
    chunk: _chunk_pb2.Chunk
    credit: Credit
    release: _tensor_pb2.Release
    answer: _tensor_pb2.Answer
    interrupt: Interrupt
    chunks: _chunk_pb2.Chunks
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., chunk: _Optional[_Union[_chunk_pb2.Chunk, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., release: _Optional[_Union[_tensor_pb2.Release, _Mapping]] = ..., answer: _Optional[_Union[_tensor_pb2.Answer, _Mapping]] = ..., interrupt: _Optional[_Union[Interrupt, _Mapping]] = ..., chunks: _Optional[_Union[_chunk_pb2.Chunks, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("opened", "chunk", "credit", "release", "keep", "report", "ended", "failover", "chunks")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    chunk: _chunk_pb2.Chunk
    credit: Credit
    release: _tensor_pb2.Release
    keep: Keep
    report: Report
    ended: Ended
    failover: Failover
    chunks: _chunk_pb2.Chunks
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., chunk: _Optional[_Union[_chunk_pb2.Chunk, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., release: _Optional[_Union[_tensor_pb2.Release, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., failover: _Optional[_Union[Failover, _Mapping]] = ..., chunks: _Optional[_Union[_chunk_pb2.Chunks, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session_id", "model", "params", "seed", "credits", "route", "resume", "revision", "offers", "checkpoints", "attempts", "batches", "unwanted", "client", "scope")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    params: StageParams
    seed: int
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    route: _containers.RepeatedCompositeFieldContainer[Hop]
    resume: Resume
    revision: str
    offers: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Offer]
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    batches: bool
    unwanted: _containers.RepeatedScalarFieldContainer[str]
    client: str
    scope: str
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., params: _Optional[_Union[StageParams, _Mapping]] = ..., seed: _Optional[int] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., route: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., revision: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[_tensor_pb2.Offer, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., batches: bool = ..., unwanted: _Optional[_Iterable[str]] = ..., client: _Optional[str] = ..., scope: _Optional[str] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("kind", "model", "addresses", "params", "takes", "checkpoints", "revision", "unwanted")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    kind: StageKind
    model: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    params: StageParams
    takes: _containers.RepeatedScalarFieldContainer[str]
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    revision: str
    unwanted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[StageKind, str]] = ..., model: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., params: _Optional[_Union[StageParams, _Mapping]] = ..., takes: _Optional[_Iterable[str]] = ..., checkpoints: _Optional[_Iterable[str]] = ..., revision: _Optional[str] = ..., unwanted: _Optional[_Iterable[str]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("credits", "needs", "revisions", "answer", "offers", "silent", "batches")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    needs: _containers.RepeatedCompositeFieldContainer[Position]
    revisions: _containers.RepeatedScalarFieldContainer[str]
    answer: _tensor_pb2.Answer
    offers: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.Offer]
    silent: _containers.RepeatedScalarFieldContainer[str]
    batches: bool
    def __init__(self, credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., needs: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., revisions: _Optional[_Iterable[str]] = ..., answer: _Optional[_Union[_tensor_pb2.Answer, _Mapping]] = ..., offers: _Optional[_Iterable[_Union[_tensor_pb2.Offer, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ..., batches: bool = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata", "retry_delay")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("port", "total")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    port: str
    total: int
    def __init__(self, port: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("port", "first")
    PORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    port: str
    first: int
    def __init__(self, port: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class Failover(_message.Message):
    __slots__ = ("kind", "lost", "replica", "reason", "pause")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    kind: StageKind
    lost: str
    replica: str
    reason: str
    pause: _duration_pb2.Duration
    def __init__(self, kind: _Optional[_Union[StageKind, str]] = ..., lost: _Optional[str] = ..., replica: _Optional[str] = ..., reason: _Optional[str] = ..., pause: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("port", "seq", "first", "ended")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    port: str
    seq: int
    first: int
    ended: bool
    def __init__(self, port: _Optional[str] = ..., seq: _Optional[int] = ..., first: _Optional[int] = ..., ended: bool = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("positions", "history")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    history: _containers.RepeatedCompositeFieldContainer[_chunk_pb2.Chunk]
    def __init__(self, positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[_chunk_pb2.Chunk, _Mapping]]] = ...) -> None: ...

class Interrupt(_message.Message):
    __slots__ = ("heard_samples",)
    HEARD_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    heard_samples: int
    def __init__(self, heard_samples: _Optional[int] = ...) -> None: ...

class StageParams(_message.Message):
    __slots__ = ("thinker", "talker", "code2wav", "diffusion")
    THINKER_FIELD_NUMBER: _ClassVar[int]
    TALKER_FIELD_NUMBER: _ClassVar[int]
    CODE2WAV_FIELD_NUMBER: _ClassVar[int]
    DIFFUSION_FIELD_NUMBER: _ClassVar[int]
    thinker: ThinkerParams
    talker: TalkerParams
    code2wav: Code2WavParams
    diffusion: DiffusionParams
    def __init__(self, thinker: _Optional[_Union[ThinkerParams, _Mapping]] = ..., talker: _Optional[_Union[TalkerParams, _Mapping]] = ..., code2wav: _Optional[_Union[Code2WavParams, _Mapping]] = ..., diffusion: _Optional[_Union[DiffusionParams, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class ThinkerParams(_message.Message):
    __slots__ = ("messages", "sampling", "max_tokens", "min_tokens", "stop", "ignore_eos", "verbatim", "logprobs", "constraint", "top_logprobs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    VERBATIM_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    verbatim: str
    logprobs: bool
    constraint: Constraint
    top_logprobs: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ..., verbatim: _Optional[str] = ..., logprobs: bool = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: Choices
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, role: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "media", "port", "media_type", "use_audio", "total_bytes", "background")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    USE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    text: str
    media: Media
    port: str
    media_type: str
    use_audio: bool
    total_bytes: int
    background: str
    def __init__(self, text: _Optional[str] = ..., media: _Optional[_Union[Media, _Mapping]] = ..., port: _Optional[str] = ..., media_type: _Optional[str] = ..., use_audio: bool = ..., total_bytes: _Optional[int] = ..., background: _Optional[str] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("data", "media_type", "use_audio", "background")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    USE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    media_type: str
    use_audio: bool
    background: str
    def __init__(self, data: _Optional[bytes] = ..., media_type: _Optional[str] = ..., use_audio: bool = ..., background: _Optional[str] = ...) -> None: ...

class TalkerParams(_message.Message):
    __slots__ = ("voice", "sampling", "speed", "markdown", "plain", "max_frames")
    VOICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    MARKDOWN_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    voice: str
    sampling: Sampling
    speed: float
    markdown: bool
    plain: bool
    max_frames: int
    def __init__(self, voice: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., speed: _Optional[float] = ..., markdown: bool = ..., plain: bool = ..., max_frames: _Optional[int] = ...) -> None: ...

class Code2WavParams(_message.Message):
    __slots__ = ("profile", "sample_rate_hz", "encoding", "voice")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    VOICE_FIELD_NUMBER: _ClassVar[int]
    profile: str
    sample_rate_hz: int
    encoding: _chunk_pb2.AudioEncoding
    voice: str
    def __init__(self, profile: _Optional[str] = ..., sample_rate_hz: _Optional[int] = ..., encoding: _Optional[_Union[_chunk_pb2.AudioEncoding, str]] = ..., voice: _Optional[str] = ...) -> None: ...

class DiffusionParams(_message.Message):
    __slots__ = ("prompt", "negative_prompt", "images", "width", "height", "steps", "guidance_scale", "results", "previews", "preview_side", "step_cache", "frames", "frames_per_second", "duration_s", "begin_s", "guidance_scale_2", "flow_shift", "sigmas", "strength", "mask_image", "control_image", "options", "layers", "media_type")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_SIDE_FIELD_NUMBER: _ClassVar[int]
    STEP_CACHE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_2_FIELD_NUMBER: _ClassVar[int]
    FLOW_SHIFT_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    MASK_IMAGE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_IMAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    negative_prompt: str
    images: _containers.RepeatedCompositeFieldContainer[Media]
    width: int
    height: int
    steps: int
    guidance_scale: float
    results: int
    previews: int
    preview_side: int
    step_cache: float
    frames: int
    frames_per_second: float
    duration_s: float
    begin_s: float
    guidance_scale_2: float
    flow_shift: float
    sigmas: _containers.RepeatedScalarFieldContainer[float]
    strength: float
    mask_image: Media
    control_image: Media
    options: _containers.ScalarMap[str, str]
    layers: int
    media_type: str
    def __init__(self, prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., steps: _Optional[int] = ..., guidance_scale: _Optional[float] = ..., results: _Optional[int] = ..., previews: _Optional[int] = ..., preview_side: _Optional[int] = ..., step_cache: _Optional[float] = ..., frames: _Optional[int] = ..., frames_per_second: _Optional[float] = ..., duration_s: _Optional[float] = ..., begin_s: _Optional[float] = ..., guidance_scale_2: _Optional[float] = ..., flow_shift: _Optional[float] = ..., sigmas: _Optional[_Iterable[float]] = ..., strength: _Optional[float] = ..., mask_image: _Optional[_Union[Media, _Mapping]] = ..., control_image: _Optional[_Union[Media, _Mapping]] = ..., options: _Optional[_Mapping[str, str]] = ..., layers: _Optional[int] = ..., media_type: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("kind", "replica", "queued", "first_output", "total", "input_items", "output_items", "failovers", "cached_tokens", "audio_underruns", "audio_starved", "prompt_tokens", "unspoken", "unspoken_words", "notes", "drew")
    class InputItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OutputItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    INPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_UNDERRUNS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_STARVED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNSPOKEN_FIELD_NUMBER: _ClassVar[int]
    UNSPOKEN_WORDS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DREW_FIELD_NUMBER: _ClassVar[int]
    kind: StageKind
    replica: str
    queued: _duration_pb2.Duration
    first_output: _duration_pb2.Duration
    total: _duration_pb2.Duration
    input_items: _containers.ScalarMap[str, int]
    output_items: _containers.ScalarMap[str, int]
    failovers: int
    cached_tokens: int
    audio_underruns: int
    audio_starved: _duration_pb2.Duration
    prompt_tokens: int
    unspoken: int
    unspoken_words: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    drew: bool
    def __init__(self, kind: _Optional[_Union[StageKind, str]] = ..., replica: _Optional[str] = ..., queued: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_output: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., input_items: _Optional[_Mapping[str, int]] = ..., output_items: _Optional[_Mapping[str, int]] = ..., failovers: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., audio_underruns: _Optional[int] = ..., audio_starved: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., unspoken: _Optional[int] = ..., unspoken_words: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ..., drew: bool = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("kind", "model", "revision", "accepts", "produces", "boot_id", "max_sessions", "voices", "transports", "pid", "settings", "inputs", "constraints")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    PRODUCES_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    VOICES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    kind: StageKind
    model: str
    revision: str
    accepts: _containers.RepeatedCompositeFieldContainer[Port]
    produces: _containers.RepeatedCompositeFieldContainer[Port]
    boot_id: str
    max_sessions: int
    voices: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[_tensor_pb2.TransportKind]
    pid: int
    settings: _containers.ScalarMap[str, str]
    inputs: _containers.RepeatedScalarFieldContainer[str]
    constraints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[StageKind, str]] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., accepts: _Optional[_Iterable[_Union[Port, _Mapping]]] = ..., produces: _Optional[_Iterable[_Union[Port, _Mapping]]] = ..., boot_id: _Optional[str] = ..., max_sessions: _Optional[int] = ..., voices: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[_Union[_tensor_pb2.TransportKind, str]]] = ..., pid: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., inputs: _Optional[_Iterable[str]] = ..., constraints: _Optional[_Iterable[str]] = ...) -> None: ...

class Port(_message.Message):
    __slots__ = ("name", "payload", "rate_millihertz", "compact", "replay", "element_type", "width")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    RATE_MILLIHERTZ_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    payload: Payload
    rate_millihertz: int
    compact: bool
    replay: Replay
    element_type: _tensor_pb2.ElementType
    width: int
    def __init__(self, name: _Optional[str] = ..., payload: _Optional[_Union[Payload, str]] = ..., rate_millihertz: _Optional[int] = ..., compact: bool = ..., replay: _Optional[_Union[Replay, str]] = ..., element_type: _Optional[_Union[_tensor_pb2.ElementType, str]] = ..., width: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("period",)
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    period: _duration_pb2.Duration
    def __init__(self, period: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("sessions", "queued", "draining", "kv_pages_used", "kv_pages_total", "arena_bytes_used", "arena_bytes_total", "leases", "transports", "period")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    queued: int
    draining: bool
    kv_pages_used: int
    kv_pages_total: int
    arena_bytes_used: int
    arena_bytes_total: int
    leases: int
    transports: _containers.ScalarMap[str, int]
    period: _duration_pb2.Duration
    def __init__(self, sessions: _Optional[int] = ..., queued: _Optional[int] = ..., draining: bool = ..., kv_pages_used: _Optional[int] = ..., kv_pages_total: _Optional[int] = ..., arena_bytes_used: _Optional[int] = ..., arena_bytes_total: _Optional[int] = ..., leases: _Optional[int] = ..., transports: _Optional[_Mapping[str, int]] = ..., period: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
