"""The log of this package, for users who turn it on. Texts from others are escaped: each stays on one line and controls no terminal."""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """The logger of a module; it escapes the texts among the arguments of its lines as `show_text` does."""
    log = logging.getLogger(name)
    log.addFilter(_escape_record)
    return log


def show_text(text: str) -> str:
    """The text with escapes for characters that control a terminal, end a line or cannot be seen."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _escape_record(record: logging.LogRecord) -> bool:
    """A filter that escapes the arguments of a record, and lets every record pass."""
    if isinstance(record.args, tuple):
        record.args = tuple(show_text(argument) if isinstance(argument, str) else argument for argument in record.args)
    return True
