"""The log of this package, for those who turn it on: texts of others are on one line each, and a terminal obeys nothing in them."""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """The logger of a module, whose arguments are all shown so."""
    log = logging.getLogger(name)
    log.addFilter(_cleaned)
    return log


def show_text(text: str) -> str:
    """The text with escapes for characters that steer a terminal, end a line or cannot be seen."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _cleaned(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(show_text(argument) if isinstance(argument, str) else argument for argument in record.args)
    return True
