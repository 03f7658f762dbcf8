"""Structured logs: JSON lines for machines, colours for a terminal; session and trace ids come from context variables."""

from __future__ import annotations

import atexit
import json
import logging
import sys
from functools import cache

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # The types of grpcio leave its core out.

from omnistage.host.log_writer import LogWriter, plain_words
from omnistage.host.terminal import escape_text

STDERR = 2
UNREAD_STATUS = "SendStatusFromServerOperation"


def configure_logs(level: str, style: str) -> None:
    """Send structlog and the standard library's loggers to stderr. style: auto, json or console."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderers: list[structlog.typing.Processor] = (
        [_words_shown, structlog.dev.ConsoleRenderer()] if console else [structlog.processors.JSONRenderer()]
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    _writer().words = plain_words if console else _event_of_dropped
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(_writer()),  # type: ignore[arg-type]  # It writes and flushes, no more.
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_writer())
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.processors.format_exc_info],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
    handler.setFormatter(formatter)
    handler.addFilter(somebody_is_there)
    logging.basicConfig(level=max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING), handlers=[handler], force=True)


def _words_shown(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor of structlog that escapes control characters in the texts of an event, so that text from others does not steer the
    terminal which shows the line. A log in JSON, and the `repr` of a value that is not text, escape them anyway."""
    return {escape_text(name): escape_text(value) if isinstance(value, str) else value for name, value in event.items()}


def somebody_is_there(record: logging.LogRecord) -> bool:
    """A filter of log records that drops one record of gRPC: the error, with a traceback, for a client that leaves just before the last
    status of its call. A client that leaves a moment earlier gets no line either. Returns False for that record, True for all others."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, cygrpc.ExecuteBatchError) and UNREAD_STATUS in str(error))


def _event_of_dropped(lines: int) -> str:
    """The line of a JSON log that stands for dropped lines. lines: how many."""
    event: structlog.typing.EventDict = {"event": "log.dropped", "lines": lines, "why": "nobody read them"}
    structlog.processors.add_log_level(None, "warning", event)
    structlog.processors.TimeStamper(fmt="iso", utc=True)(None, "warning", event)
    return json.dumps(event)


def drain_logs() -> None:
    """Wait a moment until the log is written; for a process that ends without the interpreter's own end."""
    _writer().drain()


@cache
def _writer() -> LogWriter:
    writer = LogWriter(STDERR)
    atexit.register(writer.drain)
    return writer
