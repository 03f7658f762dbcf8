"""Who asks: an API key, sent with every call. The router counts places and keeps prefixes by it; it lets everybody in."""

from __future__ import annotations

import os
from typing import NoReturn

from omnistage.client.errors import BadRequestError

VARIABLE = "OMNISTAGE_API_KEY"

METADATA = "x-api-key"
"""Of a call."""

MAX_CHARACTERS = 4096
"""A token that says who somebody is may be long; all metadata of a call have to fit into 8 KiB."""


class UnencryptedKeyWarning(UserWarning):
    """An API key goes to another host over a connection that is not encrypted: whoever is on the way can read it."""


class ApiKey:
    """A key that can be sent. Raises BadRequestError for one that cannot be. It is in no message, repr or pickle."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str, called: str = "api_key") -> None:
        """called: how the caller knows it."""
        if not isinstance(secret, str) or not secret:
            raise BadRequestError.of(called, f"is {'empty' if secret == '' else 'no text'}; give the key that you were given, or none")
        if len(secret) > MAX_CHARACTERS:
            raise BadRequestError.of(called, f"has {len(secret)} characters; give at most {MAX_CHARACTERS}")
        if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
            told = "has characters that a key cannot have; give printable ASCII without spaces at its ends, and without a line end"
            raise BadRequestError.of(called, told)
        self._secret = secret

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return ((METADATA, self._secret),)

    def __repr__(self) -> str:
        return "ApiKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an API key is not pickled: give it to the other process by {VARIABLE}")


def key_of(given: str | None, called: str = "api_key") -> ApiKey | None:
    """The key that was given, else that of the variable; None: there is none. called: how the caller knows the one that was given. Raises
    BadRequestError, which says whose it is."""
    if given is not None:
        return ApiKey(given, called)
    named = os.environ.get(VARIABLE, "")
    return ApiKey(named, VARIABLE) if named else None
