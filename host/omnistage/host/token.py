"""Finds the token of a server's stack. `python -m omnistage.host.token FILE` makes a file with a new token, unless the file exists.

The token never stands on a command line, which every user of a host can read.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from omnistage.host.errors import StartError
from omnistage.wire.token import VARIABLE, Token

__all__ = ["FILE_VARIABLE", "VARIABLE", "make_file", "new_token", "read_token"]

FILE_VARIABLE = f"{VARIABLE}_FILE"

_RANDOM_BYTES = 32


def read_token(file: str, environment: Mapping[str, str]) -> Token | None:
    """The token in the environment or in a file; None if neither has one. file: path; empty: no file. Raises StartError."""
    given = environment.get(VARIABLE, "")
    if given and file:
        raise StartError(f"both {VARIABLE} and a token file ({FILE_VARIABLE}, --token-file) are given: give one of them")
    if not (given or file):
        return None
    try:
        return Token(given or Path(file).read_text(encoding="ascii").strip())
    except OSError as error:
        raise StartError(f"the token file {file} cannot be read: {error.strerror}") from None
    except ValueError:  # UnicodeDecodeError is one; its text would show the secret.
        raise StartError(
            f"the token in {VARIABLE if given else file} is none: it must have 16 to 512 printable ASCII characters and no blank"
        ) from None


def new_token() -> Token:
    """A token of 256 random bits."""
    return Token(secrets.token_urlsafe(_RANDOM_BYTES))


def make_file(path: Path) -> bool:
    """Write a new token to a new file, mode 0400. Return False if the file exists. The file appears with its whole content at once."""
    if path.exists():
        return False
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{new_token().secret}\n")
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m omnistage.host.token FILE", file=sys.stderr)
        return 2
    try:
        make_file(Path(sys.argv[1]))
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
