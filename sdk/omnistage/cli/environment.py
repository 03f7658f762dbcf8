"""What the processes of a stack find in their environment: all that the launcher has, and the token that only they know."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

TOKEN = "OMNISTAGE_TOKEN"
TOKEN_FILE = "OMNISTAGE_TOKEN_FILE"

_RANDOM_BYTES = 32


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a token of 256 random bits, unless it names one. Not on the command line: all users of a host can read that."""
    if environment.get(TOKEN) or environment.get(TOKEN_FILE):
        return dict(environment)
    return {**environment, TOKEN: secrets.token_urlsafe(_RANDOM_BYTES)}
