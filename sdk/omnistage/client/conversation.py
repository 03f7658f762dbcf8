"""Makes messages from turns as people and other clients write them: first it checks their form, later it reads their media."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from omnistage.client.allowed import show_value
from omnistage.client.errors import BadRequestError
from omnistage.client.guesses import near
from omnistage.client.media import KINDS, Medium, Video, is_one, of_base64, to_medium
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


def turn_of(turn: object, where: str) -> tuple[str, list[Part]]:
    """The role of a turn, in the contract's words, and its parts in order. where: the caller's name for the turn, for errors. Raises
    BadRequestError for a turn of the wrong form."""
    if not isinstance(turn, Mapping):
        what = "must be a dict with role and content: {'role': 'user', 'content': 'Hello'}"
        raise BadRequestError.of(where, f"is {show_value(turn)}; it {what}")
    role = _role(turn["role"], f"{where}.role") if "role" in turn else ""
    for key, fault in EMPTY_KEYS.items():
        given = turn.get(key)
        if given is not None and not (isinstance(given, Sized) and len(given) == 0):
            raise BadRequestError.of(f"{where}.{key}", fault)
    _check_keys({key: value for key, value in turn.items() if key not in EMPTY_KEYS}, TURN_KEYS, where)
    for key in ("role", "content"):
        if key not in turn:
            raise BadRequestError.of(where, f"has no {key}; a turn is {{'role': 'user', 'content': 'Hello'}}")
    content = turn["content"]
    media = list(listed_media({name: turn.get(name) for name in LISTS}, f"{where}.", to_medium))
    where = f"{where}.content"
    if isinstance(content, str):
        text = [stage_pb2.Part(text=checked_text(where, content))] if content or not media else []
        return role, [*media, *text]
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        what = "must be text, or a list of parts such as {'type': 'text', 'text': 'Hello'}"
        raise BadRequestError.of(where, f"is {show_value(content)}; it {what}")
    if media:
        raise BadRequestError.of(where, "is a list of parts: the media belong into it")
    if not content:
        raise BadRequestError.of(where, "is empty")
    return role, [_part(item, f"{where}[{i}]") for i, item in enumerate(content)]


def _role(role: object, where: str) -> str:
    """The role in the contract's words. where: the caller's name for it. Raises BadRequestError for an unknown role."""
    if not isinstance(role, str) or role not in ROLES:
        *most, last = ROLES
        if isinstance(role, str) and role.lower() in ("tool", "function"):
            raise BadRequestError.of(where, f"is {role!r}; no pipeline calls tools or functions: leave this turn out")
        like = (OTHER_ROLES.get(role.lower(), "") or near(role.lower(), ROLES)) if isinstance(role, str) else ""
        meant = f"; did you mean {like}?" if like else f"; it must be {', '.join(most)} or {last}"
        raise BadRequestError.of(where, f"is {show_value(role)}{meant}")
    return ROLES[role]


def listed_media(given: Mapping[str, object], where: str, to_read: Callable[[object, str, str], T]) -> Iterator[Callable[[], T]]:
    """Yields for each medium a function that reads it. given: by the key images (or image), audios or videos: one medium, several, or None.
    where: the text before this key in errors. to_read: reads a medium; its arguments are the source, the kind (image, audio, video) and the
    name for errors."""
    for name, sources in given.items():
        kind = LISTS.get(name, name)
        if sources is None:
            continue
        if is_one(sources):
            yield partial(to_read, sources, kind, f"{where}{name}")
        elif isinstance(sources, Iterable):
            for i, source in enumerate(sources):
                yield partial(to_read, source, kind, f"{where}{name}[{i}]")


def checked_text(field: str, value: object) -> str:
    """Returns `value` if it is text that can be sent. field: its name for errors. Raises BadRequestError otherwise."""
    if not isinstance(value, str):
        raise BadRequestError.of(field, f"is {show_value(value)}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is {value[error.start]!a}, half of a pair, which UTF-8 cannot say"
        raise BadRequestError.of(field, f"{what}; decode your input with errors='replace'") from None
    return value


def _part(item: object, where: str) -> Part:
    """One part of a `content` that is a list. where: the caller's name for the part. Raises BadRequestError."""
    if isinstance(item, Medium):
        return lambda: item
    if not isinstance(item, Mapping):
        what = "must be a dict with a type, such as {'type': 'text', 'text': 'Hello'}"
        raise BadRequestError.of(where, f"is {show_value(item)}; it {what}")
    kind = item.get("type")
    if "type" not in item and (meant := next((key for key in item if key in _READERS), "")):
        raise BadRequestError.of(where, f"has no type; did you mean {{'type': {meant!r}, {meant!r}: ...}}?")
    if not isinstance(kind, str) or kind not in _READERS:
        like = (OTHER_TYPES.get(kind) or near(kind, _READERS)) if isinstance(kind, str) else ""
        text = f"did you mean {like}?" if like else f"known: {', '.join(_READERS)}"
        raise BadRequestError.of(f"{where}.type", f"is {show_value(kind)}; {text}")
    keys, reader = _READERS[kind]
    _check_keys(item, ("type", kind, *keys), where)
    if kind not in item:
        raise BadRequestError.of(where, f"has no {kind}")
    return reader(item, kind, f"{where}.{kind}")


def _text(item: Mapping[str, Any], kind: str, where: str) -> Part:
    return stage_pb2.Part(text=checked_text(where, item[kind]))


def _medium(item: Mapping[str, Any], kind: str, where: str) -> Part:
    return partial(to_medium, item[kind], kind, where)


def _film(item: Mapping[str, Any], kind: str, where: str) -> Part:
    """A film, which the model also hears if the part says `use_audio`."""
    source, use_audio = item[kind], use_audio_of(item, kind, where)
    return partial(to_medium, source if use_audio is None else Video(source, use_audio), kind, where)


def use_audio_of(item: Mapping[str, Any], kind: str, where: str) -> bool | None:
    """Whether the model also hears the film of this part: `use_audio` in the part, or beside its URL; None: the part does not say. where:
    the caller's name for the film. Raises BadRequestError."""
    film, use_audio = item[kind], item.get("use_audio")
    of_url = film.get("use_audio") if isinstance(film, Mapping) else None
    is_repeated = use_audio is not None and (of_url is not None or isinstance(film, Video))
    use_audio = of_url if use_audio is None else use_audio
    if is_repeated or not isinstance(use_audio, bool | None):
        raise BadRequestError.of(where.removesuffix(kind) + "use_audio", "must be True or False, and said once")
    return use_audio


def _url(item: Mapping[str, Any], kind: str, where: str) -> Part:
    """A medium at a data: URL. As OpenAI's clients send it, the part's value is the URL or a mapping with the key `url`."""
    url, use_audio = item[kind], use_audio_of(item, kind, where) if kind == FILM_URL else None
    if isinstance(url, Mapping):
        _check_keys(url, ("url", "detail", *_READERS[kind][0]), where)
        url, where = url.get("url"), f"{where}.url"
    if not isinstance(url, str):
        raise BadRequestError.of(where, "must be text: data:image/png;base64,...")
    if url[:5].lower() != "data:" and "://" not in url:  # The first check saves a search through the base64 of a whole picture.
        raise BadRequestError.of(where, "is no URL; what lies here goes as {'type': 'image', 'image': path}")
    return partial(to_medium, url if use_audio is None else Video(url, use_audio), kind.removesuffix("_url"), where)


def _input_audio(item: Mapping[str, Any], kind: str, where: str) -> Part:
    """A sound in base64, or by a data: URL."""
    sound = item[kind]
    if not isinstance(sound, Mapping):
        raise BadRequestError.of(where, "must be a dict with data, the sound in base64")
    _check_keys(sound, ("data", "format"), where)
    if sound.get("data") is None:
        raise BadRequestError.of(where, "has no data; give the sound in base64")
    data, where = sound["data"], f"{where}.data"
    if isinstance(data, str) and data[:5].lower() == "data:":
        return partial(to_medium, data, "audio", where)
    return lambda: to_medium(of_base64(data, where), "audio", where)


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


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises BadRequestError for a key of `given` that is not in `known`; the text guesses which key was meant."""
    unknown = sorted(map(str, set(given) - set(known)))
    if unknown:
        own = known[1] if known[0] == "type" else known[0]  # The key for the contents: in a part it has the name of its type.
        meant = [OTHER_KEYS.get(key, "") or (own if key in OTHER_KEYS else near(key.lower(), known)) for key in unknown]
        text = f"did you mean {', '.join(meant)}?" if all(one in known for one in meant) else f"known: {', '.join(known)}"
        raise BadRequestError.of(where, f"has unknown keys {', '.join(unknown)}; {text}")
