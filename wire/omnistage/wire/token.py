"""The token of a stack. The servers of the stack show it to each other, so that a stage takes calls from the router and its neighbours
only.

It travels as metadata of every call of StageService. It is no password for people and no key for encryption: whoever can read the wire can
read it.
"""

from __future__ import annotations

import hashlib
import hmac
import re

KEY = "omnistage-token"
"""Metadata key of the token."""

VARIABLE = "OMNISTAGE_TOKEN"
"""Environment variable that holds the token itself; the variable with _FILE appended names a file with it."""

GATEWAY_KEY, GATEWAY_HOST = "omnistage-gateway", "omnistage-host"
"""Metadata keys of a gateway's calls to the router: the token of the gateway, and the host for which it calls."""

GATEWAY_VARIABLE = "OMNISTAGE_GATEWAY_TOKEN"
"""Environment variable that holds the token of the gateway itself; the variable with _FILE appended names a file with it."""

_TOKEN = re.compile(r"[!-~]{16,512}")


class Token:
    """A secret that never shows in a log: its repr hides it."""

    def __init__(self, secret: str) -> None:
        """secret: 16 to 512 printable ASCII characters without a blank. Raises ValueError, which does not quote it."""
        if _TOKEN.fullmatch(secret) is None:
            raise ValueError("a token has 16 to 512 printable ASCII characters and no blank")
        self._secret = secret

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata to send with a call."""
        return ((KEY, self._secret),)

    @property
    def secret(self) -> str:
        """The secret, for the environment of a process that may know it."""
        return self._secret

    def for_gateway(self) -> Token:
        """The token of the stack's gateway, which follows from this one and does not reveal it. The gateway serves strangers and calls no
        stage, so it has no token for them."""
        return Token(hmac.new(self._secret.encode(), b"gateway", hashlib.sha256).hexdigest())

    def matches(self, shown: str | bytes) -> bool:
        """Whether `shown` is the token. The time of the comparison does not reveal how much of it is right."""
        return hmac.compare_digest(self._secret.encode(), shown if isinstance(shown, bytes) else shown.encode(errors="replace"))

    def __repr__(self) -> str:
        return "Token(...)"
