"""Makes the errors of calls that do not fit: an argument needs a name, the first argument is missing, or a name is wrong."""

from __future__ import annotations

import inspect
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from os import PathLike, fspath
from typing import Any, TypeVar

from omnistage.client.guesses import OF_METHODS, SAME, near, unknown_options
from omnistage.client.options import OPTIONS
from omnistage.client.settings import OF_CLIENT, SETTINGS

F = TypeVar("F", bound=Callable[..., Any])

FIRST = {"prompt": "'What is a kite?'", "text": "'Good morning.'", "conversation": "[{'role': 'user', 'content': 'Hello'}]"}
"""An example of each first argument, by its name."""


def explain_calls(method: F) -> F:
    """A decorator: a call that does not fit the method's signature raises TypeError, as Python's own calls do, with a text that shows how
    to write it. The signature stays the same."""
    signature = inspect.signature(method)

    def check(positionals: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        try:
            signature.bind(*positionals, **keywords)
        except TypeError:
            if refusal := _refusal(method.__name__, signature, positionals[1:], keywords):
                raise refusal from None

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def waited(*positionals: Any, **keywords: Any) -> Any:
            check(positionals, keywords)
            return await method(*positionals, **keywords)

        return waited  # type: ignore[return-value]

    @wraps(method)
    def called(*positionals: Any, **keywords: Any) -> Any:
        check(positionals, keywords)
        return method(*positionals, **keywords)

    return called  # type: ignore[return-value]


def _refusal(name: str, signature: inspect.Signature, positionals: Sequence[Any], keywords: Mapping[str, Any]) -> TypeError | None:
    """The error for a call that does not fit the signature of the method `name`; None: the method itself raises a better error.
    positionals: the positional arguments without `self`. keywords: the keyword arguments."""
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    placed = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    has_options = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if len(positionals) > len(placed):
        return TypeError(_surplus(name, placed, names, positionals))
    if name == "__init__":
        return None  # This method takes any keyword as a setting, and its own error names the unknown ones.
    unknown = {one: value for one, value in keywords.items() if one not in names and not (has_options and one in OPTIONS)}
    if unknown and has_options:
        kind = name.removeprefix("stream_")
        return unknown_options(unknown, OPTIONS, (*OF_CLIENT, *SETTINGS), kind if kind in OF_METHODS else "generate")
    if unknown:
        return TypeError("; ".join(f"{name} takes no {one}: {_guess(one, names)}" for one in unknown))
    first = placed[0]
    if positionals and first in keywords:
        return TypeError(f"{name} has its {first} twice: first, and by name; leave one of them out")
    return TypeError(f"{name} needs its {first}, as the first argument" + (f": {name}({FIRST[first]})" if first in FIRST else ""))


def _guess(name: str, names: Sequence[str]) -> str:
    """A hint for a keyword that does not exist: the keyword that was probably meant, or else all keywords of the call."""
    similar = next((one for one in names if name in SAME.get(one, ())), "") or near(name, names)
    return f"did you mean {similar}?" if similar else f"it takes {', '.join(names)} alone"


def _surplus(name: str, placed: Sequence[str], names: Sequence[str], positionals: Sequence[Any]) -> str:
    """The error text for too many positional arguments. placed: names of the arguments that may be positional. names: names that may be
    keywords."""
    if name == "__init__":
        address = f"{positionals[0]}:{positionals[1]}" if isinstance(positionals[1], int) else "HOST:PORT"
        return f"Omni takes only its pipeline without a name; give what else there is by name, such as Omni(address={address!r})"
    if not placed:
        return f"{name} takes no argument without a name; give it by name: {name}({names[0]}={_short_repr(positionals[0])})"
    if name == "as_client":
        return "as_client takes one argument, the key"
    surplus = positionals[len(placed)]
    if name.endswith("chat"):
        other = "a turn has its media: {'role': 'user', 'content': ..., 'images': [...]}"
    else:
        other = f"give what else there is by name, such as {name}({placed[0]}, {_keyword(name, surplus)}={_short_repr(surplus)})"
    return f"{name} takes only its {placed[0]} without a name; {other}"


def _keyword(name: str, value: object) -> str:
    """The keyword for which a second positional argument was probably meant, guessed from the type of its value. name: of the method."""
    if name.endswith("say"):
        return "voice" if isinstance(value, str) else "speed"
    candidates = {"draw": ("seed", "images"), "film": ("frames", "image"), "sound": ("seconds", "negative_prompt")}.get(
        name.removeprefix("stream_")
    )
    if candidates is not None:
        return candidates[not isinstance(value, int | float)]
    if isinstance(value, int | float):
        return "max_tokens"
    first = value[0] if isinstance(value, list) and value else value
    kind = (mimetypes.guess_type(fspath(first))[0] or "") if isinstance(first, str | PathLike) else ""
    return next((f"{one}s" for one in ("audio", "video") if kind.startswith(one)), "images")


def _short_repr(value: object) -> str:
    """repr(value), or "..." if that has more than 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else "..."
