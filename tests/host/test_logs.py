"""A log without a reader delays nobody, a log with a reader has every line, in order; servers log the warnings of libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from helpers import lengths
from omnistage.host.logs import LogWriter

LIMIT_S = 60.0
LINE = "x" * 999 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[TextIO, int]]:
    """The two ends of a pipe: one to read, one to write."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader:
        yield reader, writing
    os.close(writing)


def test_every_line_of_many_threads_is_written_once():
    with pipe() as (reader, end):
        writer = LogWriter(end)
        threads = [threading.Thread(target=lambda of=of: [writer.write(f"{of} {n}\n") for n in range(500)]) for of in range(4)]
        for thread in threads:
            thread.start()
        lines = [reader.readline().split() for _ in range(2000)]
        for thread in threads:
            thread.join(LIMIT_S)
    for of in range(4):
        assert [int(number) for name, number in lines if name == str(of)] == list(range(500))


def test_where_nobody_reads_lines_are_dropped_and_counted():
    with pipe() as (reader, end):
        writer = LogWriter(end, max_waiting=10)
        for _ in range(1000):  # These are far more lines than the pipe and the queue have room for: no write may wait.
            writer.write(LINE)
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(iter(reader.readline, "last\n")))
        reading.start()
        writer.drain(LIMIT_S)
        writer.write("last\n")
        reading.join(LIMIT_S)
    dropped = [line for line in lines if line != LINE]
    assert dropped and all(line.endswith("log lines were dropped here: nobody read them\n") for line in dropped)
    assert len(lines) - len(dropped) + sum(int(line.split()[0]) for line in dropped) == 1000


def test_what_was_written_before_is_out_after_a_drain():
    with pipe() as (reader, end):
        writer = LogWriter(end)
        for n in range(50):
            writer.write(f"{n}\n")
        writer.drain(LIMIT_S)
        os.set_blocking(reader.fileno(), False)
        assert os.read(reader.fileno(), 1 << 16).decode().split() == [str(n) for n in range(50)]


def test_a_reader_that_is_gone_ends_nothing():
    with pipe() as (reader, end):
        reader.close()
        writer = LogWriter(end)
        for _ in range(100):
            writer.write(LINE)
        writer.drain(LIMIT_S)


ENDING = """
import structlog
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for n in range(1000):
    structlog.get_logger().info("line", n=n, filler="x" * 900)
"""


def test_a_process_whose_log_nobody_reads_ends_well():
    reading, writing = os.pipe()
    done = subprocess.run([sys.executable, "-c", ENDING], stderr=writing, timeout=LIMIT_S, check=False)
    os.close(writing)
    assert done.returncode == 0
    os.close(reading)


UNREAD = """
import sys, structlog
from omnistage.host.logs import MAX_WAITING
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for n in range(2 * MAX_WAITING):
    structlog.get_logger().info("line", n=n, filler="x" * 900)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_log_of_json_says_in_json_that_lines_were_dropped():
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "written\n"
            told = next(event for event in map(json.loads, process.stderr) if event["event"] != "line")
        finally:
            process.kill()
    assert (told["event"], told["level"]) == ("log.dropped", "warning")
    assert told["lines"] > 0 and told["timestamp"].endswith("Z")


COMPLAINTS = """
import logging
from grpc._cython.cygrpc import ExecuteBatchError
from omnistage.host.logs import configure_logs
configure_logs("info", "json")
for what in ("SendStatusFromServerOperation", "SendMessageOperation"):
    try:
        raise ExecuteBatchError(f'Failed "execute_batch": (<grpc._cython.cygrpc.{what} object>,)')
    except ExecuteBatchError:
        logging.getLogger("grpc._cython.cygrpc").exception("raised in core")
logging.getLogger("grpc._cython.cygrpc").error("SendStatusFromServerOperation, without an exception")
"""


def test_a_status_that_nobody_waited_for_is_no_error_and_all_else_is() -> None:
    ended = subprocess.run([sys.executable, "-c", COMPLAINTS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    with_traceback, without = map(json.loads, ended.stderr.splitlines())
    assert "SendMessageOperation" in with_traceback["exception"] and with_traceback["level"] == "error"
    assert without["event"] == "SendStatusFromServerOperation, without an exception"


SERVERS = ("thinker", "talker", "code2wav", "diffusion", "router")


@lengths.drawn_cells(2, "server", SERVERS)
def test_a_server_starts_without_rich_and_does_not_keep_others_from_it(server: str) -> None:
    code = f"""
import importlib, sys
importlib.import_module("omnistage.{server}.__main__")
import structlog
assert structlog.dev.default_exception_formatter is structlog.dev.plain_traceback
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
import rich.console
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
