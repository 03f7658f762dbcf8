"""From Python arguments to `omnistage.v1.GenerateRequest`: the one place that knows how options are spelt in the proto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from omnistage.client.channel import MAX_MESSAGE_BYTES
from omnistage.client.errors import BadRequestError
from omnistage.client.media import MediaLike, to_media
from omnistage.v1 import omni_pb2, stage_pb2

Conversation = Sequence[Mapping[str, Any]]
"""Turns, oldest first. Each has `role` (system, user or assistant) and `content` (text), and may have `images` and `audios` (lists of
MediaLike). An `Answer` is a turn too: append it to go on."""

TURN_KEYS = ("role", "content", "images", "audios")


class Options(TypedDict, total=False):
    """What a single call may set. What is absent is the pipeline's default."""

    pipeline: str
    """Pipeline name, from `pipelines()`."""
    outputs: Sequence[str]
    """Ports wanted: text, audio, image."""
    seed: int
    """0 to 2**64 - 1: the same seed gives the same answer. Absent: random, and told in `Answer.seed`."""
    max_tokens: int
    """Tokens to make at most."""
    min_tokens: int
    """Tokens to make at least."""
    stop: Sequence[str]
    """The text ends before any of these; at most 16."""
    ignore_eos: bool
    """Go on after the end-of-text token."""
    temperature: float
    """0 (greedy) to 2."""
    top_k: int
    """0 is off."""
    top_p: float
    """(0, 1]."""
    min_p: float
    """[0, 1)."""
    repetition_penalty: float
    """> 0; 1 is off."""
    presence_penalty: float
    """-2 to 2."""
    frequency_penalty: float
    """-2 to 2."""
    voice: str
    """Voice name, from `pipelines()`."""
    speed: float
    """Speed of speech, 0.5 to 2."""
    profile: str
    """Sound chunks: latency, balanced, quality or offline."""
    sample_rate_hz: int
    """Sample rate of the sound; absent is the model's own."""
    negative_prompt: str
    """Pictures: what not to show."""
    width: int
    """Pictures: pixels."""
    height: int
    """Pictures: pixels."""
    steps: int
    """Pictures: denoising steps."""
    guidance_scale: float
    """Pictures: how closely to follow the prompt."""
    results: int
    """Pictures: how many, 1 to 8."""
    previews: int
    """Pictures: previews on the way, 0 to 16."""
    conversation_id: str
    """Turns of one conversation share it, for warm prefixes."""
    request_id: str
    """Name of this request, at most 64 of A-Z a-z 0-9 _ -. Asking again under the same name ends the answer that still runs under it.
    Absent: one of its own."""
    timeout_s: float
    """Time limit of the whole call, seconds (120)."""


DEFAULT_TIMEOUT_S = 120.0

MAX_TEXT_CHARACTERS = 1 << 20
"""Of all that one request says, together, or gives to be spoken: no router takes more."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
THINKER = ("max_tokens", "min_tokens", "stop", "ignore_eos")
TALKER = ("voice", "speed")
CODE2WAV = ("profile", "sample_rate_hz")
DIFFUSION = ("negative_prompt", "width", "height", "steps", "guidance_scale", "results", "previews")
NEVER_ZERO = ("max_tokens", "sample_rate_hz", "width", "height", "steps", "results")
PROTO_NAMES = {"pipeline": "model"}
"""Options that the protos call otherwise."""
TOP = ("pipeline", "outputs", "seed", "conversation_id", "request_id")


def for_prompt(prompt: str, images: Sequence[MediaLike], audios: Sequence[MediaLike], options: Options) -> omni_pb2.GenerateRequest:
    """One user turn, with media if any."""
    checked_text("prompt", prompt)
    return for_conversation([{"role": "user", "content": prompt, "images": images, "audios": audios}], options)


def for_conversation(conversation: Conversation, options: Options) -> omni_pb2.GenerateRequest:
    """The whole conversation. Raises BadRequestError for a turn that is not one."""
    if isinstance(conversation, (str, Mapping)) or not conversation:
        raise BadRequestError.of("conversation", "must be a list of turns: [{'role': 'user', 'content': 'Hello'}]")
    thinker = stage_pb2.ThinkerParams(messages=[_message(turn, f"conversation[{i}]") for i, turn in enumerate(conversation)])
    return _checked(omni_pb2.GenerateRequest(thinker=thinker), options)


def for_verbatim(text: str, options: Options) -> omni_pb2.GenerateRequest:
    """Speak exactly `text`."""
    if not checked_text("text", text).strip():
        raise BadRequestError.of("text", "is empty; give the words to speak")
    return _checked(omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(verbatim=text)), options)


def for_drawing(prompt: str, images: Sequence[MediaLike], options: Options) -> omni_pb2.GenerateRequest:
    """A picture of `prompt`, starting from `images` if there are any."""
    checked_text("prompt", prompt)
    media = [to_media(source, "image") for source in images]
    return _checked(omni_pb2.GenerateRequest(diffusion=stage_pb2.DiffusionParams(prompt=prompt, images=media)), options)


def checked_text(field: str, value: object) -> str:
    """`value`, if it is text that can be sent. Raises BadRequestError."""
    if not isinstance(value, str):
        raise BadRequestError.of(field, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is {value[error.start]!a}, half of a pair, which UTF-8 cannot say"
        raise BadRequestError.of(field, f"{what}; decode your input with errors='replace'") from None
    return value


def time_limit_s(options: Options) -> float:
    """The time limit of a call, seconds. Raises BadRequestError if it is none."""
    given = options.get("timeout_s")
    return DEFAULT_TIMEOUT_S if given is None else checked_seconds("timeout_s", given)


def checked_seconds(field: str, value: float) -> float:
    """`value`, if it is a time to wait. Raises BadRequestError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise BadRequestError.of(field, f"is {value!r}; give a number of seconds above 0")
    return value


def is_to_be_heard(request: omni_pb2.GenerateRequest) -> bool:
    """True if an answer without any sound would not be what was asked for: a text to speak, and sound was not declined."""
    return bool(request.thinker.verbatim) and (not request.outputs or "audio" in request.outputs)


def _message(turn: Mapping[str, Any], where: str) -> stage_pb2.Message:
    if not isinstance(turn, Mapping):
        raise BadRequestError.of(where, "must be a dict with role and content")
    unknown = sorted(set(turn) - set(TURN_KEYS))
    if unknown:
        raise BadRequestError.of(where, f"has unknown keys {', '.join(unknown)}; known: {', '.join(TURN_KEYS)}")
    role, content = turn.get("role"), turn.get("content")
    if role not in ("system", "user", "assistant"):
        raise BadRequestError.of(f"{where}.role", "must be system, user or assistant")
    checked_text(f"{where}.content", content)
    parts = [stage_pb2.Part(media=to_media(source, "image")) for source in turn.get("images") or ()]
    parts += [stage_pb2.Part(media=to_media(source, "audio")) for source in turn.get("audios") or ()]
    if content or not parts:
        parts.append(stage_pb2.Part(text=content))
    return stage_pb2.Message(role=role, parts=parts)


def _checked(request: omni_pb2.GenerateRequest, options: Options) -> omni_pb2.GenerateRequest:
    """The request with its options, if they exist and if it is not too large for every router."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown options {', '.join(unknown)}; known: {', '.join(Options.__annotations__)}")
    given = {name: value for name, value in options.items() if value is not None}
    _fill(request, given, TOP)
    _fill(request.thinker, given, THINKER)
    _fill(request.thinker.sampling, given, SAMPLING)
    _fill(request.talker, given, TALKER)
    _fill(request.code2wav, given, CODE2WAV)
    _fill(request.diffusion, given, DIFFUSION)
    characters = len(request.thinker.verbatim) + sum(len(part.text) for turn in request.thinker.messages for part in turn.parts)
    if characters > MAX_TEXT_CHARACTERS:
        raise BadRequestError.of("request", f"has {characters} characters of text; at most {MAX_TEXT_CHARACTERS} are allowed")
    size = request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise BadRequestError.of("request", f"is {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed. Send smaller media.")
    return request


def _fill(message: Any, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Set the fields of a message that were given. An untouched message stays absent, which asks for the pipeline's defaults."""
    for name in names:
        if name not in given:
            continue
        value = given[name]
        if name in NEVER_ZERO and value == 0:
            # On the wire these say "the pipeline's default".
            raise BadRequestError.of(name, "is 0; give at least 1, or leave it out for the pipeline's default")
        try:
            if name in ("stop", "outputs"):
                texts = [value] if isinstance(value, str) else list(value)
                getattr(message, name).extend(checked_text(f"{name}[{i}]", text) for i, text in enumerate(texts))
            else:
                if isinstance(value, str):
                    checked_text(name, value)
                setattr(message, PROTO_NAMES.get(name, name), value)
        except (TypeError, ValueError) as error:
            raise BadRequestError.of(name, str(error)) from error
