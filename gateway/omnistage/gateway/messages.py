"""Makes turns of the client library from messages as OpenAI's clients write them. No message makes the gateway read a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omnistage.client.about import max_count
from omnistage.client.conversation import FILM_URL, use_audio_of
from omnistage.client.errors import BadRequestError
from omnistage.client.media import Video, to_medium
from omnistage.client.request import MAX_TEXT_CHARACTERS
from omnistage.gateway.failure import invalid, unrecognized_error, unsupported_error
from omnistage.gateway.fetching import Fetch

URLS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
PARTS = ("text", *URLS, "input_audio", "refusal")
"""The kinds of parts that clients may send. The library has more kinds, which name files; they are only for users of this machine."""

MAX_PARTS = max_count("Message.parts")
"""The most parts of all messages together: no router takes more."""

THOUGHTS = ("reasoning_content", "reasoning")
"""The keys of a thought before an answer, which is no part of the conversation: ours, and that of other servers."""

IGNORED = ("name", "annotations", "cache_control", "extra_content", "id", "parsed", "provider_specific_fields", "reasoning_details")
"""Keys of a message that change nothing. Clients send them, or send back what some server put into its answer. A `name` tells speakers of
one role apart, for whom no model here has a place in its prompt."""

IGNORED_OF_PARTS = ("annotations", "cache_control", "logprobs", "prompt_cache_breakpoint")
"""The same of a part."""

KEYS = ("role", "content", "refusal", "audio", "function_call", "tool_calls", "tool_call_id", *THOUGHTS, *IGNORED)
"""The keys that a message may have. Tools are refused in words of their own."""

Turn = dict[str, Any]


async def turns_of(
    messages: Sequence[Mapping[str, Any]], transcript_of: Callable[[str], str | None], fetch: Fetch, *, use_audio: bool = False
) -> list[Turn]:
    """The turns for these messages. The media at web URLs are fetched. transcript_of: gives the text of an earlier sound by the sound's id;
    None: this client has heard no such sound. use_audio: whether a film is heard if its part does not say. Raises ApiError,
    BadRequestError."""
    turns = [_turn(message, f"messages[{i}]", transcript_of) for i, message in enumerate(messages)]
    if use_audio:
        turns = [_with_heard_films(turn, f"messages[{i}]") for i, turn in enumerate(turns)]
    return await with_fetched(turns, [f"messages[{i}]" for i in range(len(turns))], fetch)


async def with_fetched(turns: Sequence[Turn], names: Sequence[str], fetch: Fetch) -> list[Turn]:
    """The same turns, with the bytes in place of each web URL. names: the client's name of each turn. Raises ApiError, BadRequestError."""
    characters = sum(map(_characters, turns))
    if characters > MAX_TEXT_CHARACTERS:  # Refused here, because the client library reads all of it several times before it refuses it.
        raise BadRequestError.of("request", f"has {characters} characters of text; at most {MAX_TEXT_CHARACTERS} are allowed")
    if sum(len(turn["content"]) for turn in turns if isinstance(turn["content"], list)) > MAX_PARTS:
        raise BadRequestError.of("request", f"has too many parts; at most {MAX_PARTS} are allowed")
    fetched: list[Turn] = []
    for turn, name in zip(turns, names, strict=True):
        content = turn["content"]
        if isinstance(content, list):
            content = [await _fetch_part(part, f"{name}.content[{j}]", fetch) for j, part in enumerate(content)]
        fetched.append({**turn, "content": content})
    return fetched


def _characters(turn: Turn) -> int:
    """The number of characters in all texts of a turn."""
    content = turn["content"]
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get(kind) for part in parts for kind in ("text", "refusal")]
    return sum(len(text) for text in texts if isinstance(text, str))


def _turn(message: Mapping[str, Any], field: str, transcript_of: Callable[[str], str | None]) -> Turn:
    """The turn for one message; its media are not fetched yet. Raises ApiError."""
    check_keys(message, KEYS, field)
    check_name(message, field)
    if message.get("role") in ("tool", "function"):
        raise unsupported_error(f"{field}.role", f"is {message['role']}, and nothing here calls tools yet")
    for key in ("tool_calls", "function_call", "tool_call_id"):
        if message.get(key):
            raise unsupported_error(f"{field}.{key}", "nothing here calls tools yet; leave it out")
    for key in THOUGHTS:
        _check_thought(message.get(key), message.get("role"), f"{field}.{key}")
    turn = {key: value for key, value in message.items() if key not in ("audio", "tool_call_id", *THOUGHTS, *IGNORED)}
    if message.get("audio"):
        turn["content"] = message.get("content") or _earlier_text(message["audio"], f"{field}.audio", transcript_of)
    turn.setdefault("content", None)
    if turn["content"] is None and turn.get("refusal"):
        turn["content"] = turn.pop("refusal")
    if turn["content"] is None and any(message.get(key) is not None for key in THOUGHTS):
        turn["content"] = ""  # Clients make such a message of a stream that has thoughts and no text.
    if isinstance(turn["content"], list):
        turn["content"] = [_checked_part(part, f"{field}.content[{j}]") for j, part in enumerate(turn["content"])]
    return turn


def _with_heard_films(turn: Turn, field: str) -> Turn:
    """The turn, with `use_audio` in every part with a film that does not say whether the film is heard. Raises BadRequestError."""
    if not isinstance(turn["content"], list):
        return turn
    content = []
    for j, part in enumerate(turn["content"]):
        leaves_it_open = FILM_URL in part and use_audio_of(part, FILM_URL, f"{field}.content[{j}].{FILM_URL}") is None
        content.append({**part, "use_audio": True} if leaves_it_open else part)
    return {**turn, "content": content}


def check_keys(message: Mapping[str, Any], keys: Sequence[str], field: str) -> None:
    """Raises ApiError for a key that is not among `keys`. field: the name of the message in the request."""
    unknown = next((key for key in message if key not in keys), None)
    if unknown is not None:
        raise unrecognized_error(f"{field}.{unknown}"[:256])


def check_name(message: Mapping[str, Any], field: str) -> None:
    """Raises ApiError for a name of a speaker that is no text. field: the name of the message in the request."""
    if not isinstance(message.get("name"), str | None):
        raise invalid(f"{field}.name", "must be text")


def _check_thought(thought: object, role: object, field: str) -> None:
    """Raises ApiError if the thoughts are no text, or the message is not the assistant's."""
    if thought is not None and not isinstance(thought, str):
        raise invalid(field, "must be text")
    if thought and role != "assistant":
        raise invalid(field, "only messages of an assistant have it; leave it out")


def _earlier_text(audio: object, field: str, transcript_of: Callable[[str], str | None]) -> str:
    """The text of an earlier answer, found by the id of its sound. If no text is kept under the id, the transcript
    in `audio`, if the client has sent one. Raises ApiError."""
    name = audio.get("id") if isinstance(audio, Mapping) else None
    if not isinstance(audio, Mapping) or not isinstance(name, str):
        raise invalid(f"{field}.id", "is missing")
    words = transcript_of(name)
    if words is None and isinstance(audio.get("transcript"), str):
        words = audio["transcript"]
    if words is None:
        reason = "no answer of the last hour that was given to you has a sound of this id; send what it said as content"
        raise invalid(f"{field}.id", reason)
    return words


def _checked_part(part: object, field: str) -> dict[str, Any]:
    """The part without keys that change nothing. Raises ApiError if clients may not send parts of this kind."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in PARTS:
        raise invalid(f"{field}.type", f"is {str(kind)[:64]!r}; give {', '.join(PARTS[:-1])} or {PARTS[-1]}")
    return {key: value for key, value in part.items() if key not in IGNORED_OF_PARTS}


async def _fetch_part(part: Mapping[str, Any], field: str, fetch: Fetch) -> object:
    """The part unchanged, or, if it has a web URL, a part with the fetched medium. Raises ApiError, BadRequestError."""
    kind = part["type"]
    if kind not in URLS:
        return part
    value, field = part.get(kind), f"{field}.{kind}"
    use_audio = use_audio_of(part, kind, field) if kind == FILM_URL and kind in part else None
    if isinstance(value, Mapping):
        value, field = value.get("url"), f"{field}.url"
    if not isinstance(value, str) or value[:5].lower() == "data:":
        return part
    fetched = await fetch(value, field)
    return to_medium(fetched if use_audio is None else Video(fetched, use_audio), URLS[kind], field)
