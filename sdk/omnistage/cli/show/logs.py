"""Prints the logs of a stack of this machine: the last lines of all its processes in the order of their times, those about one request, and
further lines as they come. Files are read in pieces and merged, so a log of gigabytes takes no more memory than a small one."""

from __future__ import annotations

import heapq
import json
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.markup import escape
from rich.text import Text

from omnistage.cli.console import Console, Notices
from omnistage.cli.places import state_directory
from omnistage.cli.stack.served import all_served, choose_stack
from omnistage.client.errors import RequestError
from omnistage.client.wording import did_you_mean
from omnistage.host.child import can_read
from omnistage.models.fetch.own_files import LOCK, PREFIX

SUFFIX = ".log"
DEFAULT_LINES = 100
"""How many lines are printed if nothing says which."""

PIECE_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
"""The rest of a longer line is left out."""

LOOK_S = 0.25
"""Seconds between two looks at files that are followed."""

_TIME = re.compile(rb'"timestamp": "([0-9T:.-]+)Z"|^([0-9-]{10}T[0-9:]{8})Z ')
_ID = re.compile(rb'(?:request|session|trace)_id(?:": "|=)([^"\s]+)')
_SESSION = re.compile(rb'session_id(?:": "|=)([^"\s]+)')
_PLAIN = re.compile(r"[\w.:/@%+-]+")
_COLOURS = {"warning": "yellow", "error": "red", "critical": "bold red"}


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The lines to print. lines: how many, the last ones; None: all that fit, or DEFAULT_LINES if nothing else chooses. request: the id of
    a request or a session that they are about; empty: any. since: their earliest time, as the logs write it; empty: any. follows:
    further lines too, as they come."""

    lines: int | None = None
    request: str = ""
    since: str = ""
    follows: bool = False
    as_json: bool = False


class LogLine(NamedTuple):
    """One line of a log. time: as the logs write it, without the zone; that of the line before for a line without one."""

    time: str
    process: str
    text: bytes


@dataclass(slots=True)
class LogFile:
    """One file that a process appends to. position: of the first byte that was not read yet."""

    path: Path
    position: int = 0
    _time: str = ""
    _inode: int = field(default=0, init=False)

    @property
    def process(self) -> str:
        return self.path.name.removesuffix(SUFFIX)

    def seek_last(self, lines: int) -> int:
        """Go to the beginning of the last lines; returns how many they are. Raises OSError."""
        with self.path.open("rb") as file:
            self.position, count = _find_last(file, lines)
        return count

    def read(self, *, is_whole: bool) -> Iterator[LogLine]:
        """Yields the lines from the position on, up to the end that the file has now. A file that was cut, or replaced by a new one, is
        read from its beginning. is_whole: also a last line that has not ended yet. A file that is gone has no lines. Raises OSError if it
        may not be read."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self.position or self._inode not in (0, status.st_ino):
                self.position = 0
            self._inode = status.st_ino
            file.seek(self.position)
            for text in _whole_lines(file, status.st_size, is_whole):
                self.position = file.tell()
                if match := _TIME.search(text):
                    self._time = (match[1] or match[2]).decode()
                yield LogLine(self._time, self.process, text)


def _find_last(file: IO[bytes], lines: int) -> tuple[int, int]:
    """Returns (where the last lines of a file begin, how many there are). lines: how many to look for."""
    position = end = file.seek(0, os.SEEK_END)
    if not end or not lines:
        return end, 0
    count = 1  # The last line, whether it has ended or not.
    end -= 1  # A line break there belongs to the last line.
    while position:
        position = max(position - PIECE_BYTES, 0)
        file.seek(position)
        piece = file.read(min(PIECE_BYTES, end - position))
        end = position
        while (at := piece.rfind(b"\n")) >= 0:
            if count == lines:
                return position + at + 1, count
            count += 1
            piece = piece[:at]
    return 0, count


def _whole_lines(file: IO[bytes], end: int, is_whole: bool) -> Iterator[bytes]:
    """Yields lines without their breaks, up to a position of the file; a longer line than MAX_LINE_BYTES is cut. After each, the file is at
    the beginning of the next one."""
    while file.tell() < end:
        text = file.readline(MAX_LINE_BYTES)
        has_ended, is_cut = text.endswith(b"\n"), len(text) == MAX_LINE_BYTES
        while not has_ended and (rest := file.readline(MAX_LINE_BYTES)):
            has_ended = rest.endswith(b"\n")
        if not (has_ended or is_whole):
            return
        yield text.rstrip(b"\n") + (b" ..." if is_cut else b"")


def find_folder(address: str | None) -> tuple[Path, int]:
    """Returns (the folder with the logs of a stack, the pid of its launcher). address: of its router; None: the only stack; if none serves,
    the last one whose logs were kept, with the pid 0. Raises RequestError."""
    stacks = all_served()
    if not stacks and address is None and (folder := _last_kept()) is not None:
        Notices().tell(f"[dim]nothing serves; these logs were kept: {escape(str(folder))}[/]")
        return folder, 0
    served = choose_stack(stacks, address)
    if not served.log_folder:
        raise RequestError(f"the processes of {served.address} write to the output of their launcher, pid {served.pid}, as --verbose asks")
    return Path(served.log_folder), served.pid


def _last_kept() -> Path | None:
    """The newest folder with logs that a stack left: one of those started with --detach, or a temporary one of a stack that failed."""
    folders = [*(state_directory() / "logs").glob("*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}logs-*")]
    # A folder with a LOCK belongs to a stack that serves.
    candidates = (path for path in folders if path.is_dir() and not (path / LOCK).exists())
    ours = [path for path in candidates if path.stat().st_uid == os.geteuid() and any(path.glob(f"*{SUFFIX}"))]
    return max(ours, key=lambda path: path.stat().st_mtime, default=None)


def _find_logs(folder: Path, names: Sequence[str]) -> list[LogFile]:
    """The files of the processes of these names. A stage also names all its replicas, and those of other pipelines; no names: all. Raises
    RequestError if a name has no log, OSError if the folder cannot be read."""
    files = [LogFile(folder / name) for name in sorted(path.name for path in folder.iterdir() if path.is_file()) if name.endswith(SUFFIX)]
    processes = [file.process for file in files]
    for name in names:
        if not any(_is_of(name, process) for process in processes):
            hint = f"There are: {', '.join(processes)}." if processes else ""
            raise RequestError(f"no process {name} has a log in {folder}{did_you_mean(name, processes)}", hint=hint)
    return [file for file in files if not names or any(_is_of(name, file.process) for name in names)]


def _is_of(name: str, process: str) -> bool:
    """Whether a word means a process: its name, or its stage, as in smol-talker-1."""
    return re.fullmatch(rf"(?:.+-)?{re.escape(name)}(?:-[0-9]+)?", process) is not None


def show_logs(folder: Path, names: Sequence[str], query: LogQuery, pid: int = 0) -> None:
    """Print lines of the processes of these names. pid: of the launcher, whose end is the end of what is followed; 0: it has ended already,
    and only a signal ends that. Raises RequestError, and OSError for what cannot be read."""
    files = _find_logs(folder, names)
    is_about = _filter(folder, query)
    printer = LinePrinter(query.as_json, files)
    printer.print(_last_lines(files, query, is_about))
    if not query.follows:
        if query.request and not printer.count:
            raise RequestError(f"no line of these logs is about {query.request}", hint="Errors and the header x-request-id name the id.")
        return
    with ExitStack() as exits:
        wait: Callable[[], object] = partial(time.sleep, LOOK_S)
        if pid:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                exits.callback(os.close, pidfd)
                wait = partial(can_read, pidfd, LOOK_S)
        has_ended = False
        while not has_ended:
            has_ended = bool(wait())
            paths = {file.path for file in files}
            with suppress(RequestError, FileNotFoundError):  # The folder may be gone.
                files += [file for file in _find_logs(folder, names) if file.path not in paths]
            lines = [line for file in files for line in file.read(is_whole=has_ended) if is_about(line)]
            printer.print(sorted(lines, key=lambda line: line.time))
    Notices().tell("[dim]the stack has ended[/]")


def _filter(folder: Path, query: LogQuery) -> Callable[[LogLine], bool]:
    """Whether a line is one that is asked for. A line is about a request if it names the request, or a session of it: that is what stages
    know of it. The router's log names both."""
    if not query.request:
        return lambda line: line.time >= query.since
    request = json.dumps(query.request)[1:-1].encode()
    lines = (line.text for file in _find_logs(folder, ()) for line in file.read(is_whole=True) if request in line.text)
    sessions = {match[1] for text in lines if request in _ids_of(text) and (match := _SESSION.search(text))}
    return lambda line: line.time >= query.since and not _ids_of(line.text).isdisjoint({request, *sessions})


def _ids_of(text: bytes) -> set[bytes]:
    """The ids of requests and sessions in a line. Over HTTP several answers to one request have -0, -1 ... behind its id: they count with
    and without that."""
    ids = _ID.findall(text)
    return {*ids, *(re.sub(rb"-\d+$", b"", one) for one in ids)}


def _last_lines(files: Sequence[LogFile], query: LogQuery, is_about: Callable[[LogLine], bool]) -> Iterable[LogLine]:
    """The lines that are there already, in the order of their times."""
    is_chosen = bool(query.request or query.since)
    limit = query.lines if query.lines is not None or is_chosen else DEFAULT_LINES
    count = 0 if is_chosen or limit is None else sum(file.seek_last(limit) for file in files)
    merged = heapq.merge(*(file.read(is_whole=not query.follows) for file in files), key=lambda line: line.time)
    if not is_chosen and limit is not None:
        return islice(merged, max(count - limit, 0), None)
    lines = filter(is_about, merged)
    return lines if limit is None else deque(lines, limit)


class LinePrinter:
    """Prints lines: for people with the time, the process, the event and its fields; with a traceback each of its lines is a line. as_json:
    the objects of the logs, each with the name of its process. count: of the printed lines."""

    def __init__(self, as_json: bool, files: Sequence[LogFile]) -> None:
        self.count = 0
        self._as_json = as_json
        self._width = max((len(file.process) for file in files), default=0)
        self._console = Console(highlight=False, soft_wrap=True)

    def print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.count += 1
            event = _event_of(line.text)
            if self._as_json:
                print(json.dumps({"process": line.process, **(event or {"line": line.text.decode(errors="replace")})}))
                continue
            for parts in _parts(line, event):
                text = Text().append(f"{line.process:<{self._width}} ", "cyan").append_text(parts)
                if self._console.is_terminal:
                    self._console.print(text)
                else:  # Without rich, which takes a hundred times as long.
                    print(text.plain)
        self._console.file.flush()


def _event_of(text: bytes) -> dict[str, Any] | None:
    """The event of a line in JSON; None for a line that is none."""
    with suppress(ValueError):
        event = json.loads(text)
        return event if isinstance(event, dict) else None
    return None


def _parts(line: LogLine, event: dict[str, Any] | None) -> Iterator[Text]:
    """Yields the texts for people that stand for a line."""
    if event is None:
        yield Text(line.text.decode(errors="replace"))
        return
    level, trace = str(event.pop("level", "")), event.pop("exception", "")
    head = Text(f"{event.pop('timestamp', '')} ", "dim").append(f"{level:<8} ", _COLOURS.get(level, "dim"))
    head.append(str(event.pop("event", "")), "bold")
    for name, value in ((name, value) for name, value in event.items() if value is not None):
        shown = value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
        head.append(f" {name}=", "dim").append(shown)
    yield head
    for row in str(trace).splitlines():
        yield Text(row, "dim")
