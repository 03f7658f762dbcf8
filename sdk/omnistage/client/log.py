"""The log of this package, for whoever turns it on: the words of others stand in it as text, which no terminal obeys, on one line."""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """That of a module, all of whose arguments are shown so."""
    log = logging.getLogger(name)
    log.addFilter(_cleaned)
    return log


def shown(text: str) -> str:
    """Characters that steer a terminal, end a line or cannot be seen, as escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _cleaned(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(shown(argument) if isinstance(argument, str) else argument for argument in record.args)
    return True
