"""Makes the environment of a stack's processes: the launcher's, without keys of clients, and with a token that only they know."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.client.routers import KEY_VARIABLE as KEY_VARIABLE
from omnistage.host.token import FILE_VARIABLE, GATEWAY_VARIABLE, VARIABLE, new_token, read_token


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the key of a client, and with a new token unless it has one. The token is not on the command line, because
    all users of a host can read that."""
    theirs = {name: value for name, value in environment.items() if name != KEY_VARIABLE}
    if theirs.get(VARIABLE) or theirs.get(FILE_VARIABLE):
        return theirs
    return {**theirs, VARIABLE: new_token().secret}


def for_gateway(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the gateway, which calls no stage: in place of the token of the stack it has its own. Raises StartError if the
    token cannot be read."""
    token = read_token(environment.get(FILE_VARIABLE, ""), environment)
    secrets = {VARIABLE, FILE_VARIABLE, GATEWAY_VARIABLE, f"{GATEWAY_VARIABLE}_FILE"}
    theirs = {name: value for name, value in environment.items() if name not in secrets}
    return {**theirs, GATEWAY_VARIABLE: token.for_gateway().secret} if token else theirs
