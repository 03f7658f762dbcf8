"""The text that a command is to ask or to speak, typed or from standard input."""

from __future__ import annotations

import sys

from omnistage.client.errors import RequestError
from omnistage.client.request import MAX_TEXT_CHARACTERS

MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARACTERS
"""The most bytes of a text: a character has at most four in UTF-8."""


def words(argument: str, example: str = "What is a kite?") -> str:
    """The text of a command; - stands for standard input, which is read to its end. example: a text to type, for the error. Raises
    RequestError if the text is empty, not UTF-8, or too long."""
    data = _standard_input() if argument == "-" else argument.encode(errors="surrogateescape")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the text is not UTF-8: byte {error.start} is {data[error.start]:#04x}", hint="Convert it first: iconv -t UTF-8."
        ) from None
    if len(text) > MAX_TEXT_CHARACTERS:
        raise _too_long()
    if not text.strip():
        raise RequestError("the text is empty", hint=f'Give the words, such as "{example}", or - for those of standard input.')
    return text


def _standard_input() -> bytes:
    """All bytes of standard input. Raises RequestError if there is none, or too much."""
    if sys.stdin is None:
        raise RequestError("- reads standard input, and there is none", hint="Give the words themselves, or a file: < words.txt")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise _too_long()
    return data


def _too_long() -> RequestError:
    return RequestError(f"the text is longer than {MAX_TEXT_CHARACTERS} characters", hint="Give less of it.")
