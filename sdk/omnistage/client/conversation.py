"""Makes messages from turns as people and other clients write them: first it checks their form, later it reads their media."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from omnistage.client.errors import BadRequestError
from omnistage.client.media import KINDS, Medium, Video, is_one, of_base64, to_medium
from omnistage.client.options import show_value
from omnistage.client.wording import find_similar
from omnistage.v1 import stage_pb2

Conversation = Sequence[Mapping[str, Any]]
"""Turns, oldest first. Each has `role` (system, or developer with the same meaning; user; assistant) and `content`. An `Answer` is a turn
too: append it to go on.

`content` may be a text. Then the turn may also have `images`, `audios` and `videos`, each an ImageLike, AudioLike or VideoLike, or a list
of them; they come before the text, pictures first, then sounds, then films, as in the published examples of Qwen2.5-Omni.

Or `content` is a list of parts in any order, such as OpenAI's clients send: {"type": "text", "text": ...}; {"type": "image", "image":
...}, in the same way "audio" and "video" (which may have "use_audio"); {"type": "image_url", "image_url": {"url": "data:..."}}, in the
same way "audio_url" and "video_url"; {"type": "input_audio", "input_audio": {"data": BASE64 or a data: URL}}; and {"type": "refusal",
"refusal": ...}, which an assistant said and which is read as text. Other keys of such messages, `tool_calls` for one, may be None."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The role that the contract has for a turn's role."""
OTHER_ROLES = {**dict.fromkeys(("bot", "model", "ai", "gpt", "agent"), "assistant"), **dict.fromkeys(("human", "me", "person"), "user")}
"""The names of roles in other libraries, and our roles."""
LISTS = {"images": "image", "audios": "audio", "videos": "video"}
"""The keys of a turn that hold media, and the kind of each."""
TURN_KEYS = ("role", "content", *LISTS)
EMPTY_KEYS = {
    "name": "speakers have no names here: leave it out",
    "refusal": "is said as text: give it as content",
    "annotations": "no pipeline reads them: leave them out",
    "audio": "sounds go into audios, and what an assistant said into content, as text",
    "function_call": "no pipeline calls functions: leave it out",
    "tool_calls": "no pipeline calls tools: leave them out",
}
"""Keys of the messages of OpenAI's clients that may be None or empty, and the error text for one that is not."""

OTHER_KEYS = {
    **dict.fromkeys(("text", "message", "prompt", "value", "parts"), "content"),
    **dict.fromkeys(("from", "speaker", "author"), "role"),
    **dict.fromkeys(("image", "picture", "pictures", "image_url"), "images"),
    **dict.fromkeys(("sound", "sounds", "audio_url", "input_audio"), "audios"),
    **dict.fromkeys(("video", "film", "films", "video_url"), "videos"),
    **dict.fromkeys(("path", "url", "file", "source", "data"), ""),
}
"""Other names of keys of a turn or a part, and our names; empty: the key that the part's type names."""

T = TypeVar("T")

ReadMedium = Callable[[], Medium]
"""Reads a medium. Raises BadRequestError."""

Part = stage_pb2.Part | ReadMedium
"""Text, or a medium that is not read yet."""


def turn_of(turn: object, field: str) -> tuple[str, list[Part]]:
    """The role of a turn, in the contract's words, and its parts in order. field: the caller's name for the turn, for errors. Raises
    BadRequestError for a turn of the wrong form."""
    if not isinstance(turn, Mapping):
        rule = "must be a dict with role and content: {'role': 'user', 'content': 'Hello'}"
        raise BadRequestError.of(field, f"is {show_value(turn)}; it {rule}")
    role = _role(turn["role"], f"{field}.role") if "role" in turn else ""
    for key, fault in EMPTY_KEYS.items():
        value = turn.get(key)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise BadRequestError.of(f"{field}.{key}", fault)
    _check_keys({key: value for key, value in turn.items() if key not in EMPTY_KEYS}, TURN_KEYS, field)
    for key in ("role", "content"):
        if key not in turn:
            raise BadRequestError.of(field, f"has no {key}; a turn is {{'role': 'user', 'content': 'Hello'}}")
    content = turn["content"]
    media = list(listed_media({name: turn.get(name) for name in LISTS}, f"{field}.", to_medium))
    field = f"{field}.content"
    if isinstance(content, str):
        # An empty text beside media is left out.
        text = [stage_pb2.Part(text=checked_text(field, content))] if content or not media else []
        return role, [*media, *text]
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        rule = "must be text, or a list of parts such as {'type': 'text', 'text': 'Hello'}"
        raise BadRequestError.of(field, f"is {show_value(content)}; it {rule}")
    if media:
        raise BadRequestError.of(field, "is a list of parts: the media belong into it")
    if not content:
        raise BadRequestError.of(field, "is empty")
    return role, [_part(item, f"{field}[{i}]") for i, item in enumerate(content)]


def _role(role: object, field: str) -> str:
    """The role in the contract's words. field: the caller's name for it. Raises BadRequestError for an unknown role."""
    if isinstance(role, str) and role in ROLES:
        return ROLES[role]
    name = role.lower() if isinstance(role, str) else ""
    if name in ("tool", "function"):
        raise BadRequestError.of(field, f"is {role!r}; no pipeline calls tools or functions: leave this turn out")
    *others, last = ROLES
    similar = OTHER_ROLES.get(name, "") or find_similar(name, ROLES)
    advice = f"did you mean {similar}?" if similar else f"it must be {', '.join(others)} or {last}"
    raise BadRequestError.of(field, f"is {show_value(role)}; {advice}")


def listed_media(media: Mapping[str, object], prefix: str, to_read: Callable[[object, str, str], T]) -> Iterator[Callable[[], T]]:
    """Yields for each medium a function that reads it. media: by the key images (or image), audios or videos: one medium, several, or None.
    prefix: the text before this key in errors. to_read: reads a medium; its arguments are the source, the kind (image, audio, video) and
    the name for errors."""
    for name, sources in media.items():
        kind = LISTS.get(name, name)
        if sources is None:
            continue
        if is_one(sources):
            yield partial(to_read, sources, kind, f"{prefix}{name}")
        elif isinstance(sources, Iterable):
            for i, source in enumerate(sources):
                yield partial(to_read, source, kind, f"{prefix}{name}[{i}]")


def checked_text(field: str, value: object) -> str:
    """Returns `value` if it is text that can be sent. field: its name for errors. Raises BadRequestError otherwise."""
    if not isinstance(value, str):
        raise BadRequestError.of(field, f"is {show_value(value)}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        fault = f"character {error.start} is {value[error.start]!a}, half of a pair, which UTF-8 cannot say"
        raise BadRequestError.of(field, f"{fault}; decode your input with errors='replace'") from None
    return value


def _part(item: object, field: str) -> Part:
    """One part of a `content` that is a list. field: the caller's name for the part. Raises BadRequestError."""
    if isinstance(item, Medium):
        return lambda: item
    if not isinstance(item, Mapping):
        rule = "must be a dict with a type, such as {'type': 'text', 'text': 'Hello'}"
        raise BadRequestError.of(field, f"is {show_value(item)}; it {rule}")
    kind = item.get("type")
    if "type" not in item and (kind_meant := next((key for key in item if key in _READERS), "")):
        raise BadRequestError.of(field, f"has no type; did you mean {{'type': {kind_meant!r}, {kind_meant!r}: ...}}?")
    if not isinstance(kind, str) or kind not in _READERS:
        similar = (OTHER_TYPES.get(kind) or find_similar(kind, _READERS)) if isinstance(kind, str) else ""
        text = f"did you mean {similar}?" if similar else f"known: {', '.join(_READERS)}"
        raise BadRequestError.of(f"{field}.type", f"is {show_value(kind)}; {text}")
    keys, reader = _READERS[kind]
    _check_keys(item, ("type", kind, *keys), field)
    if kind not in item:
        raise BadRequestError.of(field, f"has no {kind}")
    return reader(item, kind, f"{field}.{kind}")


def _text(item: Mapping[str, Any], kind: str, field: str) -> Part:
    return stage_pb2.Part(text=checked_text(field, item[kind]))


def _medium(item: Mapping[str, Any], kind: str, field: str) -> Part:
    return partial(to_medium, item[kind], kind, field)


def _film(item: Mapping[str, Any], kind: str, field: str) -> Part:
    """A film, which the model also hears if the part says `use_audio`."""
    source, use_audio = item[kind], use_audio_of(item, kind, field)
    return partial(to_medium, source if use_audio is None else Video(source, use_audio), kind, field)


def use_audio_of(item: Mapping[str, Any], kind: str, field: str) -> bool | None:
    """Whether the model also hears the film of this part: `use_audio` in the part, or beside its URL; None: the part does not say. field:
    the caller's name for the film. Raises BadRequestError."""
    film, use_audio = item[kind], item.get("use_audio")
    beside_url = film.get("use_audio") if isinstance(film, Mapping) else None
    is_repeated = use_audio is not None and (beside_url is not None or isinstance(film, Video))  # A Video says it itself.
    use_audio = beside_url if use_audio is None else use_audio
    if is_repeated or not isinstance(use_audio, bool | None):
        raise BadRequestError.of(field.removesuffix(kind) + "use_audio", "must be True or False, and said once")
    return use_audio


def _url(item: Mapping[str, Any], kind: str, field: str) -> Part:
    """A medium at a data: URL. As OpenAI's clients send it, the part's value is the URL or a mapping with the key `url`."""
    url = item[kind]
    use_audio = use_audio_of(item, kind, field) if kind == FILM_URL else None
    if isinstance(url, Mapping):
        _check_keys(url, ("url", "detail", *_READERS[kind][0]), field)
        url, field = url.get("url"), f"{field}.url"
    if not isinstance(url, str):
        raise BadRequestError.of(field, "must be text: data:image/png;base64,...")
    if url[:5].lower() != "data:" and "://" not in url:  # The first check saves a search through the base64 of a whole picture.
        raise BadRequestError.of(field, "is no URL; what lies here goes as {'type': 'image', 'image': path}")
    return partial(to_medium, url if use_audio is None else Video(url, use_audio), kind.removesuffix("_url"), field)


def _input_audio(item: Mapping[str, Any], kind: str, field: str) -> Part:
    """A sound in base64, or by a data: URL."""
    sound = item[kind]
    if not isinstance(sound, Mapping):
        raise BadRequestError.of(field, "must be a dict with data, the sound in base64")
    _check_keys(sound, ("data", "format"), field)
    if sound.get("data") is None:
        raise BadRequestError.of(field, "has no data; give the sound in base64")
    data, field = sound["data"], f"{field}.data"
    if isinstance(data, str) and data[:5].lower() == "data:":
        return partial(to_medium, data, "audio", field)
    return lambda: to_medium(of_base64(data, field), "audio", field)


FILM_URL = "video_url"

_READERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], str, str], Part]]] = {
    "text": ((), _text),
    "image": ((), _medium),
    "audio": ((), _medium),
    "video": (("use_audio",), _film),
    **{f"{kind}_url": ((), _url) for kind in KINDS},
    FILM_URL: (("use_audio",), _url),
    "input_audio": ((), _input_audio),
    "refusal": ((), _text),
}
"""By the type of a part: further keys that it may have, and the function that makes it, whose arguments are the given part, its type and
the caller's name for the value under that type."""


OTHER_TYPES = {"input_text": "text", "output_text": "text", "input_image": "image_url", "input_video": "video_url", "sound": "audio"}
"""Other names of types of parts, and our names."""


def _check_keys(item: Mapping[str, Any], keys: Sequence[str], field: str) -> None:
    """Raises BadRequestError for a key of `item` that is not in `keys`; the text guesses which key was meant."""
    unknown = sorted(map(str, set(item) - set(keys)))
    if unknown:
        content_key = keys[1] if keys[0] == "type" else keys[0]  # The key for the contents: in a part it has the name of its type.
        # An empty entry of OTHER_KEYS stands for the key of the contents.
        guesses = [OTHER_KEYS[key] or content_key if key in OTHER_KEYS else find_similar(key.lower(), keys) for key in unknown]
        text = f"did you mean {', '.join(guesses)}?" if all(one in keys for one in guesses) else f"known: {', '.join(keys)}"
        raise BadRequestError.of(field, f"has unknown keys {', '.join(unknown)}; {text}")
