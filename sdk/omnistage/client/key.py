"""API keys, sent with every call. The router counts places and separates computed prompts by key; it refuses no key."""

from __future__ import annotations

import os
from typing import NoReturn

from omnistage.client.errors import BadRequestError

VARIABLE = "OMNISTAGE_API_KEY"

METADATA = "x-api-key"
"""The metadata of a call that carries the key."""

MAX_CHARACTERS = 4096
"""A token that proves an identity may be long; all metadata of a call must fit into 8 KiB."""


class UnencryptedKeyWarning(UserWarning):
    """An API key goes to another host over a connection that is not encrypted: others on the way can read it."""


class ApiKey:
    """A key that can be sent. Raises BadRequestError for a text that cannot be sent. No message, repr or pickle shows the key."""

    __slots__ = ("_extra_metadata", "_secret")

    def __init__(self, secret: str, called: str = "api_key", extra_metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """secret: the key itself. called: the caller's name for the key, for errors. extra_metadata: further metadata of each call."""
        if not isinstance(secret, str) or not secret:
            raise BadRequestError.of(called, f"is {'empty' if secret == '' else 'no text'}; give the key that you were given, or none")
        if len(secret) > MAX_CHARACTERS:
            raise BadRequestError.of(called, f"has {len(secret)} characters; give at most {MAX_CHARACTERS}")
        if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
            fault = "has characters that a key cannot have; give printable ASCII without spaces at its ends, and without a line end"
            raise BadRequestError.of(called, fault)
        self._secret, self._extra_metadata = secret, extra_metadata

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call."""
        return ((METADATA, self._secret), *self._extra_metadata)

    def __repr__(self) -> str:
        return "ApiKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an API key is not pickled: give it to the other process by {VARIABLE}")


def key_of(text: str | None, called: str = "api_key") -> ApiKey | None:
    """The key `text`, or else the key in the variable; None: neither exists. called: the caller's name for `text`. Raises BadRequestError,
    which names the wrong key."""
    if text is not None:
        return ApiKey(text, called)
    value = os.environ.get(VARIABLE, "")
    return ApiKey(value, VARIABLE) if value else None
