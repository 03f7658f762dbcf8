"""Makes `omnistage.v1.GenerateRequest` of Python arguments."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from omnistage.client.about import type_text
from omnistage.client.conversation import Conversation as Conversation
from omnistage.client.conversation import Part, ReadMedium, checked_text, listed_media, turn_of
from omnistage.client.errors import BadRequestError, RequestError
from omnistage.client.limits import Limit, checked_retries
from omnistage.client.media import Audios, Images, Medium, Videos, is_one, to_medium, to_part
from omnistage.client.options import (
    ABOUT,
    CONSTRAINTS,
    DEFAULT_TIMEOUT_S,
    GUIDES,
    OF_CLIENT,
    OPTIONS,
    SETTINGS,
    fault_of,
    plain,
    show_value,
)
from omnistage.client.options import DIFFUSION as DIFFUSION
from omnistage.client.options import Options as Options
from omnistage.client.reader import PRODUCTS
from omnistage.client.routers import MAX_MESSAGE_BYTES
from omnistage.client.upload import MIN_BYTES, PORTS, Upload
from omnistage.client.wording import PYTHON, unknown_options
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

T = TypeVar("T")

MAX_SECONDS = 10**9
"""The longest time limit, some thirty years. A limit that gRPC's clock cannot hold would count as passed at once."""

MAX_TEXT_CHARACTERS = 1 << 20
"""The most characters of all texts in a request, or of a text to be spoken: no router takes more."""

PROGRESS = "progress"
"""The port that says how far a drawing is."""
METHODS = {"video": "film", "audio": "sound"}
"""The method that was called, by the output port that a drawing asks for; for any other port it is `draw`."""
Unread = Callable[[list[Medium]], int]
"""A function that reads one medium into the request and returns how many bytes it takes there. Its argument is the list of the media of
turns that were read before; it appends its own."""


class Request:
    """A request whose form is checked; `complete` reads its media."""

    def __init__(
        self,
        request: omni_pb2.GenerateRequest,
        options: Options,
        unread: Sequence[Unread] = (),
        names: Mapping[str, str] = MappingProxyType({}),
        method: str = "generate",
    ) -> None:
        """request: the message to fill; no option is set in it yet. unread: a function for each medium, which reads it. names: the caller's
        names of fields, by the contract's names. method: the method that was called, one of `wording.OF_METHODS`. Raises BadRequestError
        for an impossible value of an option, TypeError for an unknown option."""
        self._request, self._unread = request, (*unread, *_guides(request, options))
        self._names = names
        self._media: list[Medium] = []
        self.timeout_s = time_limit_s(options)
        retries = options.get("max_retries")
        self.max_retries = None if retries is None else checked_retries(retries)
        """None: the client's default."""
        _set_options(request, options, method)
        self._background = _colour(options.get("background"))

    @property
    def uploads(self) -> dict[str, Upload]:
        """The media that are streamed instead of being put into the request, by port; empty until `complete` has read the media."""
        return {port: medium.part for port, medium in _streamed_media(self._media).items() if isinstance(medium.part, Upload)}

    def complete(self) -> omni_pb2.GenerateRequest:
        """The whole request. The first call reads the media, which may block: do not call it on an event loop. Raises BadRequestError
        for a medium that cannot be read, and for a request that is larger than any router takes."""
        size = 0
        unread, self._unread = self._unread, ()
        for read in unread:
            size += read(self._media)
            _check_size(size)
        if self._background:
            _lay_on(self._request, self._background)
        _check_size(self._request.ByteSize())
        return self._request

    async def read(self, limit: Limit) -> omni_pb2.GenerateRequest:
        """`complete`, for callers on an event loop: media are read on a thread. Raises DeadlineError if that takes longer than `limit`."""
        return await _read_on_thread(self.complete, limit) if self._unread else self.complete()

    def translate_refusal(self, error: RequestError) -> RequestError | None:
        """The error to raise in place of a server's refusal of a medium; None if no medium was refused. It has the caller's name for the
        medium; the server knows only the medium's number or port. If a field was refused, its name in the text of `error` itself becomes
        the caller's name."""
        numbered = {str(number): medium for number, medium in enumerate(self._media, 1)}
        for name, media in (("medium", numbered), ("port", _streamed_media(self._media))):
            key = error.metadata.get(name, "")
            if key in media:
                # The server's text is FIELD: medium 2: FAULT, or FIELD: port media0: FAULT.
                refusal = media[key].refused(error.message.partition(f": {name} {key}: ")[2])
                refusal.metadata = error.metadata
                return refusal
        for field, callers_name in self._names.items():
            python_name = PYTHON.name_of(field)
            if error.metadata.get("field") == field and callers_name != python_name and error.message.startswith(f"{python_name}:"):
                error.message = callers_name + error.message.removeprefix(python_name)
                error.args = (error.message,)
        return None


def for_prompt(prompt: str, images: Images, audios: Audios, videos: Videos, options: Options) -> Request:
    """A request of one user turn, with media if there are any."""
    if not isinstance(prompt, str):
        raise BadRequestError.of("prompt", f"is {show_value(prompt)}; it must be {_other_prompt(prompt)}")
    checked_text("prompt", prompt)
    parts: list[Part] = list(listed_media(_by_name(images, audios, videos), "", to_medium))
    if not prompt.strip() and not parts:
        raise BadRequestError.of("prompt", "is empty; give the words to answer")
    if prompt:
        parts.append(stage_pb2.Part(text=prompt))
    return _for_turns([("user", parts)], options)


def _other_prompt(prompt: object) -> str:
    """The end of the error text "it must be ..." for a prompt that is not a text; it names the call for such an object."""
    if isinstance(prompt, bytes | bytearray):
        return "text: decode it, such as b'...'.decode()"
    if isinstance(prompt, list | tuple | Mapping):
        return "a text; generate also takes a list of texts, and chat takes a conversation"
    return "a text, or in generate a list of texts: list(...) makes one" if isinstance(prompt, Iterable) else "text"


async def read_once(images: Images, audios: Audios, videos: Videos, limit: Limit) -> dict[str, list[Medium]]:
    """Read the media that several requests share: an open file can be read only once. Returns lists of media by the names images, audios
    and videos. Raises DeadlineError if that takes longer than `limit`."""
    readers = {name: list(listed_media({name: media}, "", to_medium)) for name, media in _by_name(images, audios, videos).items()}
    if not any(readers.values()):
        return {name: [] for name in readers}
    return await _read_on_thread(lambda: {name: [read() for read in reads] for name, reads in readers.items()}, limit)


async def _read_on_thread(read: Callable[[], T], limit: Limit) -> T:
    """Return the result of `read`, which reads media and may block. Raises DeadlineError if that takes longer than `limit`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit.left_s):
            return await asyncio.to_thread(read)
    # Raised outside the `except`, or it would refer to the TimeoutError, which keeps the task and with it the media in memory.
    raise limit.passed("its media were not read by then")


def for_conversation(conversation: Conversation, options: Options) -> Request:
    """A request of the whole conversation. Raises BadRequestError for a turn of the wrong form."""
    is_no_list = isinstance(conversation, str | bytes | bytearray | Mapping) or not isinstance(conversation, Iterable)
    turn_list = [] if is_no_list else list(conversation)
    if not turn_list:
        advice = "; generate takes a text" if isinstance(conversation, str) else ""
        raise BadRequestError.of("conversation", f"must be a list of turns: [{{'role': 'user', 'content': 'Hello'}}]{advice}")
    turns = [turn_of(turn, f"conversation[{i}]") for i, turn in enumerate(turn_list)]
    user_parts = [part for role, parts in turns if role == "user" for part in parts]
    if not any(not isinstance(part, stage_pb2.Part) or part.text.strip() for part in user_parts):
        fault = "has no turn of the user with text or media in it; give one: {'role': 'user', 'content': 'Hello'}"
        raise BadRequestError.of("conversation", fault)
    return _for_turns(turns, options)


def for_verbatim(text: str, options: Options) -> Request:
    """A request to speak exactly `text`."""
    if not _one_text("text", text).strip():
        raise BadRequestError.of("text", "is empty; give the words to speak")
    return Request(omni_pb2.GenerateRequest(thinker=stage_pb2.ThinkerParams(verbatim=text)), options, method="say")


def for_drawing(prompt: str, images: Images, options: Options, port: str = "", name: str = "images") -> Request:
    """A request to draw `prompt`, starting from `images` if there are any. name: the caller's name of `images`. port: if the option
    `outputs` is absent, the request asks for this output (image, video or audio) and for progress; empty: for the pipeline's default
    outputs."""
    _one_text("prompt", prompt)
    request = omni_pb2.GenerateRequest(diffusion=stage_pb2.DiffusionParams(prompt=prompt))
    if port and options.get("outputs") is None:
        options = Options(**{**options, "outputs": (port, PROGRESS)})
    unread = [partial(_read_picture, read, request.diffusion.images.add()) for read in listed_media({name: images}, "", to_part)]
    return Request(request, options, unread, {"diffusion.images": name}, METHODS.get(port, "draw"))


def due(request: omni_pb2.GenerateRequest) -> tuple[str, ...]:
    """Names of output ports. An answer in which none of them has an item counts as failed. For a drawing: the ports of pictures, films
    and sounds that the request names. For a text to speak: "audio", unless `outputs` leaves it out. Otherwise empty."""
    if request.HasField("diffusion"):
        return tuple(port for port in PRODUCTS if port in request.outputs)
    is_to_be_heard = request.thinker.verbatim and (not request.outputs or "audio" in request.outputs)
    return ("audio",) if is_to_be_heard else ()


def _guides(request: omni_pb2.GenerateRequest, options: Mapping[str, Any]) -> Iterable[Unread]:
    """Yields for each option that is a picture a function that reads it. Raises BadRequestError if an option has several pictures."""
    for name in GUIDES:
        if (source := options.get(name)) is None:
            continue
        if not is_one(source):
            raise BadRequestError.of(name, "must be one picture: a path, bytes, an open file or a picture of Pillow")
        yield partial(_read_picture, partial(to_part, source, "image", name), getattr(request.diffusion, name))


def _one_text(field: str, text: object) -> str:
    """`text`, if it is one text that can be sent. Raises BadRequestError."""
    if isinstance(text, list | tuple):
        raise BadRequestError.of(field, "must be one text: generate takes a list of texts, the others take one at a time")
    return checked_text(field, text)


def check_options(options: Options) -> None:
    """Raises BadRequestError for options that no request can have, and TypeError for one that does not exist."""
    Request(omni_pb2.GenerateRequest(), options)


def _by_name(images: Images, audios: Audios, videos: Videos) -> dict[str, object]:
    return {"images": images, "audios": audios, "videos": videos}


def _for_turns(turns: Sequence[tuple[str, Sequence[Part]]], options: Options) -> Request:
    """A request of these turns; its media are not read yet. turns: the role and the parts of each."""
    request, unread = omni_pb2.GenerateRequest(), list[Unread]()
    for role, parts in turns:
        message = request.thinker.messages.add(role=role)
        for part in parts:
            if isinstance(part, stage_pb2.Part):
                message.parts.append(part)
            else:
                unread.append(partial(_read_medium, part, message.parts.add()))
    return Request(request, options, unread)


def _read_medium(read: ReadMedium, place: stage_pb2.Part, media: list[Medium]) -> int:
    """Read a medium into the request, as `Unread` describes. read: returns the medium. place: the empty part of the request for it; of a
    streamed medium it gets only the name of a port."""
    medium, port_number = read(), len(_streamed_media(media))
    part = medium.part
    media.append(medium)
    if isinstance(part, stage_pb2.Part):
        place.CopyFrom(part)
        return len(part.media.data)
    if port_number == len(PORTS):
        raise BadRequestError.of(medium.field, f"is one file above {MIN_BYTES >> 20} MiB too many; a request has at most {len(PORTS)}")
    place.CopyFrom(part.part(PORTS[port_number]))
    return 0


def _read_picture(read: Callable[[], stage_pb2.Part], place: stage_pb2.Media, media: list[Medium]) -> int:
    """Read a picture that a drawing starts from, as `Unread` describes. read: returns the picture. place: the empty field for it."""
    part = read()
    place.CopyFrom(part.media)
    return len(part.media.data)


def _streamed_media(media: Iterable[Medium]) -> dict[str, Medium]:
    """The media that are streamed instead of being put into the request, by port."""
    return dict(zip(PORTS, (medium for medium in media if isinstance(medium.part, Upload)), strict=False))


def time_limit_s(options: Options) -> float:
    """The time limit of a call, in seconds. Raises BadRequestError if the option is no time."""
    value = options.get("timeout_s")
    return DEFAULT_TIMEOUT_S if value is None else checked_seconds("timeout_s", value)


def checked_seconds(field: str, value: float, *, may_be_0: bool = False) -> float:
    """`value` as a float. Raises BadRequestError if it is no number of seconds to wait. may_be_0: whether 0 is allowed."""
    seconds = plain(value)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_SECONDS or (seconds == 0 and not may_be_0):
        range_words = "from 0, which is never" if may_be_0 else "above 0"
        bound = f", at most {MAX_SECONDS}" if is_number and seconds > MAX_SECONDS else ""
        raise BadRequestError.of(field, f"is {show_value(value)}; give a number of seconds {range_words}{bound}")
    return float(seconds)


def _set_options(request: omni_pb2.GenerateRequest, options: Options, method: str) -> None:
    """Set the fields of the request for all options but the pictures. method: see `Request`. Raises TypeError for options that do not
    exist, and BadRequestError for an impossible value and for more text than any router takes."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise unknown_options({name: dict(options)[name] for name in unknown}, OPTIONS, (*OF_CLIENT, *SETTINGS), method)
    values = {name: value for name, value in options.items() if value is not None}
    for name in OPTIONS:  # In this order, whatever the caller's is: the first fault is told.
        if name in values and ABOUT[name].name and name not in (*CONSTRAINTS, *GUIDES):
            # A message stays absent if none of its fields is set, and the pipeline uses its defaults.
            _fill(reduce(getattr, filter(None, ABOUT[name].place.split(".")), request), name, plain(values[name]))
    _constrain(request.thinker, values)
    characters = len(request.thinker.verbatim) + sum(len(part.text) for turn in request.thinker.messages for part in turn.parts)
    if characters > MAX_TEXT_CHARACTERS:
        raise BadRequestError.of("request", f"has {characters} characters of text; at most {MAX_TEXT_CHARACTERS} are allowed")


def _colour(background: object) -> str:
    """The colour as #rrggbb; empty for None. Raises BadRequestError for a value that is no colour."""
    if background is None:
        return ""
    if not isinstance(background, str) or re.fullmatch(r"#[0-9a-fA-F]{6}", background) is None:
        raise BadRequestError.of("background", f"is {str(background)[:64]!r}; it must be a colour as #rrggbb, such as #ffffff for white")
    return background


def _lay_on(request: omni_pb2.GenerateRequest, background: str) -> None:
    """Give every picture and film of the request this background colour. Raises BadRequestError if there is no picture or film."""
    parts = [part for message in request.thinker.messages for part in message.parts]
    # A part of a streamed medium has the type and the background itself.
    media = [part.media if part.HasField("media") else part for part in parts]
    visible = [medium for medium in (*media, *request.diffusion.images) if medium.media_type.startswith(("image/", "video/"))]
    if not visible:
        raise BadRequestError.of("background", "is for pictures and films that are sent, and there is none: leave it out")
    for medium in visible:
        medium.background = background


def _option_text(name: str, value: object) -> str:
    """The text to send for one entry of `options`, which has the options that only one pipeline knows. name: the entry's key. Raises
    BadRequestError."""
    value = plain(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return checked_text(f"options[{name!r}]", value)
    if isinstance(value, int | float):
        try:
            return repr(value)
        except ValueError:
            raise BadRequestError.of(f"options[{name!r}]", f"is {show_value(value)}; give a smaller one") from None
    raise BadRequestError.of(f"options[{name!r}]", f"is of type {type(value).__name__}; give True or False, a number, or a text")


def _check_size(size: int) -> None:
    """Raises BadRequestError if a message cannot have this size, in bytes."""
    if size > MAX_MESSAGE_BYTES:
        rule = f"at most {MAX_MESSAGE_BYTES >> 20} MiB are allowed. Send fewer or smaller media."
        raise BadRequestError.of("request", f"is {size / (1 << 20):.1f} MiB with its media; {rule}")


def _constrain(thinker: stage_pb2.ThinkerParams, options: Mapping[str, Any]) -> None:
    """Set the form that the text must have, by one of the options for it. Raises BadRequestError, also if there are several of them."""
    names = [name for name in CONSTRAINTS if name in options]
    if not names:
        return
    if len(names) > 1:
        raise BadRequestError.of(names[1], f"a text keeps to one thing only; leave out {' or '.join(names)}")
    name, value = names[0], options[names[0]]
    if name == "choice":
        texts = list(value) if _is_list(value) else []
        if not texts:
            raise BadRequestError.of(name, f"is {show_value(value)}; it must be a list of texts: ['yes', 'no']")
        thinker.constraint.choice.texts.extend(checked_text(f"{name}[{i}]", text) for i, text in enumerate(texts))
    elif name == "json_schema" and isinstance(value, Mapping):
        try:
            thinker.constraint.json_schema = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequestError.of(name, str(error)) from error
    else:
        if not isinstance(value, str):
            raise BadRequestError.of(name, fault_of(OPTIONS[name], value))
        setattr(thinker.constraint, name, checked_text(name, value))


def _is_list(value: object) -> bool:
    """Whether this holds several values and can be iterated several times: all prompts of a list use the same options."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _fill(message: Any, name: str, value: Any) -> None:
    """Set the field of an option. name: of the option. value: as `plain` gives it. Raises BadRequestError."""
    if ABOUT[name].never_zero and value == 0:
        # On the wire 0 means "the pipeline's default".
        minimum = "at least 1" if get_args(OPTIONS[name])[0] is int else "more"
        raise BadRequestError.of(name, f"is 0; give {minimum}, or leave it out for the pipeline's default")
    try:
        _set_field(message, name, value)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise BadRequestError.of(name, fault_of(OPTIONS[name], value) or str(error)) from error


def _set_field(message: Any, name: str, value: Any) -> None:
    """As `_fill`; also raises the errors of the protos and of Python for a value of another type or out of range."""
    field = getattr(message, ABOUT[name].name)
    if hasattr(field, "update"):
        field.update({checked_text(name, key): _option_text(key, option_value) for key, option_value in value.items()})
    elif hasattr(field, "extend") and "float" in type_text(get_args(OPTIONS[name])[0]):
        field.extend(map(plain, value))
    elif hasattr(field, "extend"):
        if not isinstance(value, str) and not _is_list(value):
            raise BadRequestError.of(name, f"is {show_value(value)}; it must be text, or a list of texts")
        texts = [value] if isinstance(value, str) else list(value)
        field.extend(checked_text(f"{name}[{i}]", text) for i, text in enumerate(texts))
    elif fault := fault_of(OPTIONS[name], value, of_kind=name != "encoding"):  # A server checks the range, and gets a number of an enum.
        raise BadRequestError.of(name, fault)
    elif name == "encoding":
        message.encoding = chunk_pb2.AudioEncoding.Value(f"AUDIO_ENCODING_{value.upper()}")
    else:
        setattr(message, ABOUT[name].name, checked_text(name, value) if isinstance(value, str) else value)
