"""What the processes of a stack find in their environment: all that the launcher has, and the token that only they know."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.host.token import FILE_VARIABLE, VARIABLE, new_token


def with_token(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a new token, unless it names one. Not on the command line: all users of a host can read that."""
    if environment.get(VARIABLE) or environment.get(FILE_VARIABLE):
        return dict(environment)
    return {**environment, VARIABLE: new_token().secret}
