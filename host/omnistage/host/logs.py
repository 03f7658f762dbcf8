"""Structured logs: JSON lines for machines, colours for a terminal; session and trace ids come from context variables.

A thread of its own writes the lines: a terminal that was stopped, or a pipe that nobody reads, must not stop the event loop."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # The types of grpcio leave its core out.

from omnistage.host.background import start_spare
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


MAX_WAITING = 10_000
"""Lines that may wait to be written. Further lines are dropped and counted."""

AGAIN_S = 1.0
"""Seconds of pause after an error that does not concern the file, for example if memory is short; the line is lost."""

FLUSH_S = 1.0
"""Seconds that an ending process waits at most for its last lines."""


def plain_words(lines: int) -> str:
    """The text of the log that stands for dropped lines."""
    return f"{lines} log lines were dropped here: nobody read them"


class LogWriter:
    """A file for loggers whose `write` never waits. A process has one such file, from start to end.

    It writes to a descriptor, because the interpreter cannot end while a thread waits in a file object of Python.
    """

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        self.words: Callable[[int], str] = plain_words
        """Makes the line that stands for dropped lines, without its end, from their number. It must have the form of the other lines."""
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(max_waiting)
        self._dropped = 0
        self._counting = threading.Lock()
        start_spare("omnistage-log", self._write_for_ever, again_s=AGAIN_S)

    def write(self, line: str) -> int:
        """Queue a line that ends with a line break; drop it if `max_waiting` lines wait. Returns its length, as files do."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._counting:
                self._dropped += 1
        return len(line)

    def flush(self) -> None:
        """Do nothing: loggers call this after every line."""

    def drain(self, limit_s: float = FLUSH_S) -> None:
        """Wait until all earlier lines are written, at most `limit_s`."""
        until = time.monotonic() + limit_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left_s := until - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left_s)

    def _write_for_ever(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            finally:
                self._lines.task_done()

    def _write(self, line: str) -> None:
        """Write a line, after the line that stands for dropped lines if there are any."""
        with self._counting:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            line = f"{self.words(dropped)}\n{line}"
        data = line.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # The reader is gone or the disk is full, which is no reason for a process to end.
            return
