"""Makes turns, as chat has them, from the items of a response's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnistage.gateway.failure import invalid, unrecognized_error, unsupported_error
from omnistage.gateway.messages import Turn
from omnistage.gateway.responses_schema import ResponsesRequest

KEYS = ("type", "role", "content", "id", "status", "phase")
"""The keys that a message may have."""
REASONING = "reasoning"
"""The type of an item with the thoughts before an answer; they are no part of the conversation."""
REASONING_KEYS = ("type", "id", "status", "encrypted_content")
THOUGHTS = {"summary": "summary_text", "content": "reasoning_text"}
"""The lists that such an item may have, and the type of the parts in each."""
PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "input_image": "image_url"}
"""By the type of a part: the key of its content. Except for texts, the key is also the type that chat gives the part."""


def turns_of(body: ResponsesRequest) -> tuple[list[Turn], dict[str, str]]:
    """Returns (the turns, names for errors). The names: by the client library's name of a turn or its content, such as conversation[1], the
    name in the body, such as input[0]. Raises ApiError."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    if body.instructions:
        names |= {"conversation[0]": "instructions", "conversation[0].content": "instructions"}
        turns.append({"role": "system", "content": body.instructions})
    for i, item in enumerate(body.input):
        if item.get("type") == REASONING:
            _check_reasoning(item, f"input[{i}]")
            continue
        names[f"conversation[{len(turns)}]"] = f"input[{i}]"
        turns.append(_turn(item, f"input[{i}]"))
    return turns, names


def _check_reasoning(item: Mapping[str, Any], field: str) -> None:
    """Raises ApiError if the item does not have the form of reasoning."""
    _check_known(item, (*REASONING_KEYS, *THOUGHTS), field)
    for name, kind in THOUGHTS.items():
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise invalid(f"{field}.{name}", "must be a list")
        for j, part in enumerate(parts or ()):
            if not isinstance(part, Mapping) or part.get("type") != kind:
                raise invalid(f"{field}.{name}[{j}].type", f"must be {kind}")
            if not isinstance(part.get("text"), str):
                raise invalid(f"{field}.{name}[{j}].text", "must be text")
    if not isinstance(item.get("encrypted_content"), str | None):
        raise invalid(f"{field}.encrypted_content", "must be text")


def _check_known(item: Mapping[str, Any], keys: Sequence[str], field: str) -> None:
    """Raises ApiError for a key that is not among `keys`."""
    unknown = next((key for key in item if key not in keys), None)
    if unknown is not None:
        raise unrecognized_error(f"{field}.{unknown}"[:256])


def _turn(item: Mapping[str, Any], field: str) -> Turn:
    """The turn for a message item. Raises ApiError."""
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported_error(f"{field}.type", f"is {str(kind)[:64]!r}; nothing here takes items other than messages yet")
    _check_known(item, KEYS, field)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{field}.content[{j}]") for j, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: object, field: str) -> dict[str, Any]:
    """The part of a chat message for a part of an item. Raises ApiError."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in PARTS:
        raise unsupported_error(f"{field}.type", f"is {str(kind)[:64]!r}; give one of {', '.join(PARTS)}")
    if part.get("file_id"):
        raise unsupported_error(f"{field}.file_id", "no files are kept here; give image_url")
    name = PARTS[kind]
    if not isinstance(part.get(name), str):
        raise invalid(f"{field}.{name}", "must be text")
    return {"type": name, name: part[name]}
