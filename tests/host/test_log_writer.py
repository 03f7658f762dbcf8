"""A log that nobody reads holds nobody up; one that is read has every line, in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from omnistage.host.log_writer import LogWriter

LIMIT_S = 60.0
LINE = "x" * 999 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """Its two ends, to be read and to be written."""
    reading, writing = os.pipe()
    with suppress(BrokenPipeError), os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_every_line_of_many_threads_is_written_once():
    with pipe() as (reader, file):
        writer = LogWriter(file)
        threads = [threading.Thread(target=lambda of=of: [writer.write(f"{of} {n}\n") for n in range(500)]) for of in range(4)]
        for thread in threads:
            thread.start()
        lines = [reader.readline().split() for _ in range(2000)]
        for thread in threads:
            thread.join(LIMIT_S)
    for of in range(4):
        assert [int(number) for name, number in lines if name == str(of)] == list(range(500))


def test_where_nobody_reads_lines_are_dropped_and_counted():
    with pipe() as (reader, file):
        writer = LogWriter(file, max_waiting=10)
        for _ in range(1000):  # Far more than the pipe and the queue have room for: none of them may wait.
            writer.write(LINE)
        writer.drain(0.1)
        heard = [reader.readline()]
        while not heard[-1].endswith("nobody read them\n"):
            heard.append(reader.readline())
        dropped = int(heard[-1].split()[0])
        kept = len(heard) - 1
        assert heard[:-1] == [LINE] * kept
        assert 0 < dropped < 1000
        for _ in range(1000 - kept - dropped):
            assert reader.readline() == LINE
        writer.write("last\n")
        assert reader.readline() == "last\n"


def test_what_was_written_before_is_out_after_a_drain():
    with pipe() as (reader, file):
        writer = LogWriter(file)
        for n in range(50):
            writer.write(f"{n}\n")
        writer.drain(LIMIT_S)
        os.set_blocking(reader.fileno(), False)
        assert os.read(reader.fileno(), 1 << 16).decode().split() == [str(n) for n in range(50)]


def test_a_reader_that_is_gone_ends_nothing():
    with pipe() as (reader, file):
        reader.close()
        writer = LogWriter(file)
        for _ in range(100):
            writer.write(LINE)
        writer.drain(LIMIT_S)
