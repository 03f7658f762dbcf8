"""Finds the token of a server's stack, or of its gateway. `python -m omnistage.host.token FILE` makes a file with a new token, unless the
file exists; `python -m omnistage.host.token FILE TOKEN_FILE` makes or renews one with the gateway's token, which follows from the other's.

A token never stands on a command line, which every user of a host can read.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from omnistage.host.errors import StartError
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, GATEWAY_VARIABLE, VARIABLE, Token

__all__ = ["FILE_VARIABLE", "GATEWAY_HOST", "GATEWAY_KEY", "GATEWAY_VARIABLE", "VARIABLE", "Token", "make_file", "new_token", "read_token"]

FILE_VARIABLE = f"{VARIABLE}_FILE"

_RANDOM_BYTES = 32


def read_token(file: str, environment: Mapping[str, str], variable: str = VARIABLE) -> Token | None:
    """The token in the environment or in a file; None if neither has one. file: path; empty: no file. variable: the one that may hold the
    token. Raises StartError."""
    value = environment.get(variable, "")
    if value and file:
        raise StartError(f"both {variable} and a token file ({variable}_FILE) are given: give one of them")
    if not (value or file):
        return None
    try:
        return Token(value or Path(file).read_text(encoding="ascii").strip())
    except OSError as error:
        raise StartError(f"the token file {file} cannot be read: {error.strerror}") from None
    except ValueError:  # UnicodeDecodeError is one; its text would show the secret.
        raise StartError(
            f"the token in {variable if value else file} is none: it must have 16 to 512 printable ASCII characters and no blank"
        ) from None


def new_token() -> Token:
    """A token of 256 random bits."""
    return Token(secrets.token_urlsafe(_RANDOM_BYTES))


def make_file(path: Path, token: Token, *, replaces: bool = False) -> bool:
    """Write a token to a file, mode 0400. The file appears with its whole content at once. replaces: write it even if the file exists with
    another token. Return whether it was written."""
    if path.exists() and (not replaces or path.read_text(encoding="ascii").strip() == token.secret):
        return False
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token.secret}\n")
        if replaces:
            part.replace(path)
        else:
            os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m omnistage.host.token FILE [TOKEN_FILE]", file=sys.stderr)
        return 2
    path, *stack_files = sys.argv[1:]
    try:
        if not stack_files:
            make_file(Path(path), new_token())
        elif of_stack := read_token(stack_files[0], {}):
            make_file(Path(path), of_stack.for_gateway(), replaces=True)
        else:
            raise StartError("the second file has no name: name the one with the token of the stack")
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
