"""Stores films in a folder: a row of SQLite for each job, and the files of its film. A film is written piece by piece while it is made,
and clients can read it before it is whole."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog
from pydantic import TypeAdapter
from pydantic_core import from_json

from omnistage.client import AsyncOmni
from omnistage.client.events import Done, Event, Progress, VideoDelta
from omnistage.client.files import FILM_MEDIA_TYPES
from omnistage.gateway.answering import BrokenOff, Pieces
from omnistage.gateway.body import seed_of
from omnistage.gateway.failure import ApiError
from omnistage.host.errors import StartError

log = structlog.get_logger(__name__)

Status = Literal["queued", "in_progress", "completed", "failed"]

VERSION = 1
"""Version of the tables. Tables of another version are refused, so that no gateway loses data that it does not understand."""

DATABASE, LOCK = "jobs.sqlite3", ".lock"

WHY_CHARACTERS = 200
"""Largest number of characters of a fault that the log shows."""

MAX_PROBED_ROWS = 100_000
"""So many rows are looked for one by one, the newest, if the list of a damaged table cannot be read."""

BUSY_S = 5.0
"""Seconds to wait while another program has locked the database."""

ENDS = {media_type: ending.removeprefix(".") for ending, media_type in FILM_MEDIA_TYPES.items()}
"""The suffix of a file, by its media type."""
GROWING, BEGINNING = "part", "picture"
"""Suffixes of a job's other files: the growing film, and the picture that it begins with."""

OWN_PREFIX = "omnistage-films-"
_OWN_FOLDER_NAME = re.compile(re.escape(OWN_PREFIX) + "[a-z0-9_]{8}")
"""Names of the folders that gateways make for themselves."""

_NAME = re.compile(r"video_[A-Za-z0-9_-]{32}")

_TABLES = """
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, job TEXT NOT NULL);
CREATE TABLE secret (value BLOB NOT NULL);
"""


@dataclass(slots=True)
class FilmJob:
    """One film, as a job. who: the client that it belongs to. host: a name of its host. options: for the call of the client library,
    with the seed. has_picture: whether the folder has a picture to begin with. size, seconds: texts as clients see them: WIDTHxHEIGHT and a
    number, or auto. progress: percent. tries: how often no server made it. ended_at: Unix time, or None. frames, size_bytes: of the part
    that is made. picture_bytes: size of the picture's file. row_bytes: size of the job's row; it is not in the row."""

    id: str
    who: str
    created_at: int
    prompt: str
    options: dict[str, Any]
    model: str
    size: str
    seconds: str
    has_picture: bool = False
    status: Status = "queued"
    progress: int = 0
    tries: int = 0
    ended_at: float | None = None
    error: dict[str, str] | None = None
    media_type: str = ""
    frames: int = 0
    size_bytes: int = 0
    picture_bytes: int = 0
    row_bytes: int = 0
    host: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def kept_bytes(self) -> int:
        """Bytes that the folder holds for this job: its film, its picture and its row."""
        return self.size_bytes + self.picture_bytes + self.row_bytes

    @property
    def row(self) -> str:
        """The job as JSON, as its row has it."""
        fields = asdict(self)
        del fields["row_bytes"]
        return json.dumps(fields, ensure_ascii=False)


_JOB = TypeAdapter(FilmJob)


class Store:
    """The folder of one gateway, which no other process can use until `close`. Methods block; several threads may call them at once."""

    def __init__(self, folder: str) -> None:
        """folder: if empty, a new one, which `close` deletes. Raises StartError."""
        self._lock = threading.Lock()
        if not folder:
            _sweep(Path(tempfile.gettempdir()))
        self._temporary_folder = None if folder else tempfile.TemporaryDirectory(prefix=OWN_PREFIX)
        self.folder = Path(self._temporary_folder.name if self._temporary_folder else folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_descriptor = _hold(self.folder)
            self._database = sqlite3.connect(self.folder / DATABASE, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self.secret = self._prepare()
            self._tidy()
        except (OSError, sqlite3.Error, ValueError, TypeError) as error:
            raise StartError(f"cannot keep films in {self.folder}: {error}; name another --video-folder") from error

    def _prepare(self) -> bytes:
        """Make the tables if they are missing. Returns the secret with which all processes with this folder make the same names of
        visitors."""
        (self.folder / DATABASE).chmod(0o600)
        run = self._database.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        (version,) = run("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"{DATABASE} is of another version of omnistage ({version}, and this one has {VERSION})")
        if not version:
            self._database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        row = run("SELECT value FROM secret").fetchone()
        if row is None:
            row = (secrets.token_bytes(32),)
            run("INSERT INTO secret VALUES (?)", row)
        return bytes(row[0])

    def _tidy(self) -> None:
        """Remove unfinished films, which will be made anew, and files that belong to no job. The others are for this user alone. A
        file for which the system refuses this is told in the log, and costs no other."""
        names = self._names()
        for path in self.folder.iterdir():
            name, _, end = path.name.rpartition(".")
            if not _NAME.fullmatch(name):
                continue
            try:
                if end == GROWING or (names is not None and name not in names):
                    path.unlink()
                else:
                    path.chmod(0o600)  # An earlier version let other users read it.
            except OSError as error:
                _tell_damage(path.name, error)

    def _names(self) -> set[str] | None:
        """The names of all jobs; None if the table is damaged, so that nobody knows all of them."""
        try:
            return {bytes(name).decode(errors="replace") for (name,) in self._database.execute("SELECT CAST(id AS BLOB) FROM jobs")}
        except sqlite3.DatabaseError as error:
            _tell_damage(DATABASE, error)
            return None

    def jobs(self) -> list[FilmJob]:
        """All jobs, the oldest first. A damaged row is left out, and told in the log; it stays in the table with its files. Rows are read
        one by one, because some may be large."""
        return [job for number in self._numbers() if (job := self._read(number)) is not None]

    def _numbers(self) -> Sequence[int]:
        """The numbers of all rows, in order. If the table is damaged, those that rows may have. Raises StartError if nobody knows them."""
        try:
            with self._lock:
                return [number for (number,) in self._database.execute("SELECT number FROM jobs ORDER BY number")]
        except sqlite3.DatabaseError as error:
            _tell_damage(DATABASE, error)
        try:
            with self._lock:
                (last,) = self._database.execute("SELECT MAX(seq) FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
            last = int(last)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            raise StartError(f"{self.folder / DATABASE} is damaged ({error}): move it away, or name another --video-folder") from error
        return range(max(last - MAX_PROBED_ROWS, 0) + 1, last + 1)

    def _read(self, number: int) -> FilmJob | None:
        """The job of a row; None if the row is damaged."""
        name = f"row {number}"
        try:
            with self._lock:
                record = self._database.execute(
                    "SELECT CAST(id AS BLOB), CAST(job AS BLOB) FROM jobs WHERE number = ?", (number,)
                ).fetchone()
            if record is None:
                return None
            name, row = bytes(record[0]).decode(), bytes(record[1])
            from_json(row, allow_inf_nan=False)  # Refuses NaN, which the next line would take.
            job = _JOB.validate_json(row, strict=True)
            if job.id != name or "seed" not in job.options or job.is_over != (job.ended_at is not None):
                raise ValueError("its fields do not fit together")
        except (ValueError, TypeError, sqlite3.DatabaseError) as error:
            _tell_damage(name, error)
            return None
        job.row_bytes = len(row)
        # The files say how large they are; a film that is not over is made anew.
        job.size_bytes = _size_of(self.film(job)) if job.status == "completed" else 0
        job.picture_bytes = 0 if job.is_over else _size_of(self.file(job, BEGINNING))
        return job

    def put(self, job: FilmJob) -> None:
        """Store a job's present state. Raises sqlite3.Error."""
        row = job.row
        job.row_bytes = len(row.encode())
        or_update = "ON CONFLICT (id) DO UPDATE SET status = excluded.status, job = excluded.job"
        with self._lock:
            self._database.execute(f"INSERT INTO jobs (id, status, job) VALUES (?, ?, ?) {or_update}", (job.id, job.status, row))

    def put_new(self, job: FilmJob, picture: bytes | None) -> None:
        """Store a new job and the picture that it begins with. Raises OSError, sqlite3.Error; then neither is stored."""
        try:
            if picture is not None:
                with open_private(self.file(job, BEGINNING), "xb") as file:
                    write_all(file, picture)
                    os.fsync(file.fileno())
            self.put(job)
        except BaseException:
            self.file(job, BEGINNING).unlink(missing_ok=True)
            raise

    def remove(self, job: FilmJob) -> None:
        """Remove a job's files, then the job. Raises OSError, sqlite3.Error; then the row is still there, perhaps without its files."""
        # Files first: a full disk has no room for the database's own writes. "bin" is the suffix of an unknown media type.
        for end in (*ENDS.values(), GROWING, BEGINNING, "bin"):
            self.file(job, end).unlink(missing_ok=True)
        with self._lock:
            self._database.execute("DELETE FROM jobs WHERE id = ?", (job.id,))

    def file(self, job: FilmJob, end: str) -> Path:
        """The path of a job's file with the suffix `end`."""
        return self.folder / f"{job.id}.{end}"

    def film(self, job: FilmJob) -> Path:
        """The path of the film's file once it is whole."""
        return self.file(job, ENDS.get(job.media_type.partition(";")[0].strip(), "bin"))

    def close(self) -> None:
        with self._lock:
            self._database.close()
        os.close(self._lock_descriptor)
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()


def _tell_damage(name: str, fault: object) -> None:
    """Tell in the log that a row or a file is damaged."""
    log.warning("film.damaged", job=name[:WHY_CHARACTERS], why=str(fault)[:WHY_CHARACTERS])


def _size_of(path: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def _hold(folder: Path) -> int:
    """A descriptor with a lock on the folder. Raises OSError if another process has the lock."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OSError("another gateway has it") if isinstance(error, BlockingIOError) else error from None
    return descriptor


def _sweep(parent: Path) -> None:
    """Remove folders of gateways of this user that were killed."""
    for folder in parent.glob(f"{OWN_PREFIX}*"):
        with suppress(OSError):  # Another gateway has it, or removes it, or has just made it and not locked it yet.
            if _OWN_FOLDER_NAME.fullmatch(folder.name) and folder.lstat().st_uid == os.geteuid() and (folder / LOCK).is_file():
                lock = _hold(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def open_private(path: Path, mode: str) -> FileIO:
    """Open a file without a buffer; a new file can be read by this user alone, whatever the folder allows. Raises OSError."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes to a file without a buffer. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def finish(growing: Path, finished: Path) -> None:
    """Wait until the film is on the disk, then move it from `growing` to `finished`. Raises OSError."""
    with growing.open("rb") as file:
        os.fsync(file.fileno())
    growing.replace(finished)
    folder = os.open(finished.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


T = TypeVar("T")

PIECE_BYTES = 1 << 18
"""The most bytes of a piece that is read."""

MAX_RUNNING_PERCENT = 99
"""Percent that a film shows at most before it is whole."""


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. A caller that is cancelled still waits for the end of the work, so that no later write overtakes this
    one."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def ask_for_film(omni: AsyncOmni, prompt: str, picture: bytes | None, options: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
    """The events of a film; the router is asked when the first of them is read. picture: bytes of the file of the first frame; None: there
    is none. Raises OmniError if the client library refuses the options."""
    return omni.stream_film(prompt, image=picture or (), outputs=["video", "progress"], **{**options, "seed": seed_of(options["seed"])})


async def make_film(omni: AsyncOmni, job: FilmJob, picture: bytes | None, limit_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a film's file as they come, and note progress and frames in the job. Raises OmniError."""
    events = ask_for_film(omni, job.prompt, picture, {**job.options, "timeout_s": limit_s})
    async with aclosing(events):
        async for event in events:
            match event:
                case Progress() if event.total:
                    job.progress = min(MAX_RUNNING_PERCENT, 100 * event.done // event.total)
                case VideoDelta():
                    # Added, because a browser shows a film in pieces only if it knows the codecs.
                    job.media_type = f'{event.media_type}; codecs="{event.codecs}"' if event.codecs else event.media_type
                    job.frames += event.frames
                    yield event.data
                case Done():
                    job.model, job.notes = event.pipeline, list(event.notes)


class Growing:
    """A film's file at `path` while it is written. size_bytes: of what is written so far. readers: how many clients read it now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._changed = asyncio.Event()
        self._attempt = 0  # number of the present try
        self._is_whole = self._is_over = False
        self.size_bytes = self.readers = 0

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError."""
        if self._file is None:
            self._file = await run_to_end(asyncio.to_thread(open_private, self._path, "w+b"))
        await run_to_end(asyncio.to_thread(write_all, self._file, data))
        self.size_bytes += len(data)
        self._tell()

    async def reset(self, *, is_whole: bool) -> None:
        """End one try to make the film. If the film is not whole, delete the file and break off its readers, because the next try may give
        other bytes."""
        self._is_whole = is_whole
        if not is_whole:
            self._attempt, self.size_bytes = self._attempt + 1, 0
            await run_to_end(asyncio.to_thread(self._path.unlink, True))  # Before anything that can fail: a full disk gets its room back.
            self._close()
        self._tell()

    def end(self) -> None:
        """End the film: no other try comes."""
        self._is_over = True
        self._close()
        self._tell()

    async def read(self) -> Pieces:
        """Yield the whole file from its beginning to its end, as it grows. If the film fails, raises ApiError before the first byte, and
        BrokenOff later."""
        self.readers += 1
        descriptor = -1
        try:
            while not self.size_bytes and not self._is_over:
                await self._changed.wait()
            if self._file is None:
                raise ApiError(409, "this video has ended meanwhile", code="not_ready", hint="GET /v1/videos/{id} says how it is.")
            # Each reader has a descriptor of its own, because the file may be renamed, and the writer's descriptor closed, at any moment.
            descriptor = os.dup(self._file.fileno())
            attempt, offset = self._attempt, 0
            while True:
                while offset < self.size_bytes and attempt == self._attempt:
                    piece = await run_to_end(asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, self.size_bytes - offset), offset))
                    if not piece:  # Another program has made the file shorter.
                        raise BrokenOff
                    offset += len(piece)
                    yield piece
                if self._is_whole:
                    return
                if self._is_over or attempt != self._attempt:
                    raise BrokenOff
                await self._changed.wait()
        finally:
            self.readers -= 1
            if descriptor >= 0:
                os.close(descriptor)

    def _tell(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def facts_of(path: Path) -> tuple[int, int, float] | None:
    """Returns (width, height, frames a second) of a film's file; None: this machine cannot read such files. Blocks."""
    if find_spec("av") is None:
        return None
    import av

    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            return stream.width, stream.height, float(stream.average_rate or stream.guessed_rate or 0)
    except (av.FFmpegError, IndexError):
        return None
