"""Media decoded for a stage, by processes that may die without it. `MediaDecoder` hands them media in turn; a `DecodingProcess` is one of
them, as its parent sees it, and `child` is what runs in it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import math
import mmap
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from omnistage.host.child import describe_end
from omnistage.models.helper_process import HelperProcess, NotTaken
from omnistage.models.media.results import SEALS, DecodedFilm, DecodedPicture, DecodedSound, align
from omnistage.models.media.terms import (
    BadMedia,
    DecoderBroken,
    DecoderFailed,
    DecoderFull,
    FilmPreprocessing,
    MediaLimits,
    NoRoom,
    PicturePreprocessing,
    Preprocessing,
    SoundPreprocessing,
)
from omnistage.models.reports import bytes_told
from omnistage.models.turns import WaitingPlaces

log = structlog.get_logger(__name__)

Kind = Literal["image", "audio", "video"]

Source = bytes | int
"""A file in memory, or the caller's descriptor of one, open until the medium is decoded. Its offset is neither used nor changed."""

_PIECE = 1 << 20

T = TypeVar("T")
Make = Callable[[dict[str, Any], mmap.mmap], T]


def media_places(places: int, max_waiting: int) -> WaitingPlaces:
    """Places for media that are decoded. A caller that may not even wait for a place gets DecoderFull."""
    return WaitingPlaces(places, max_waiting, lambda waiting: DecoderFull(f"{waiting} media wait to be decoded: ask again later"))


class MediaDecoder:
    """Decodes up to `processes` media at once, each in a process of its own. Processes start when they are needed and stay.

    Call it from one event loop, on a thread that lives as long as the decoder: the processes end with the thread that started them. If
    several media wait, clients take turns, and the media of each client are decoded in the order in which they came. If there are several
    processes, all films together use all but one, and so do the pictures and sounds of one client: no picture or sound waits for a film, or
    for many media of another client. Cancelling ends the work. All methods raise BadMedia for a faulty medium, DecoderFull when max_waiting
    films or max_waiting others wait, DecoderFailed when no process can be started, or the machine has no descriptor or disk left, and
    DecoderBroken when the system refuses a process something that decoding needs."""

    def __init__(self, limits: MediaLimits | None = None, *, processes: int = 1, max_waiting: int = 256) -> None:
        self.limits = limits or MediaLimits()
        self._turns = media_places(processes, max_waiting)  # For all media.
        self._films = media_places(max(processes - 1, 1), max_waiting)  # For films, which wait here first.
        self._idle: list[DecodingProcess] = []
        self._busy: set[DecodingProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()  # Tasks that each end a process.

    @property
    def waiting(self) -> int:
        """The number of media that wait for a process."""
        return self._turns.waiting + self._films.waiting

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in (*self._busy, *self._idle)]

    async def picture(self, source: Source, ask: PicturePreprocessing | None = None, *, client: str = "") -> DecodedPicture:
        """The first picture of the file, upright, RGB or RGBA, resized as `ask` says. client: the client that asks."""
        ask = ask or PicturePreprocessing()
        return await self._decode(
            "image", source, ask, client, lambda fields, memory: DecodedPicture(_pixels(memory, fields["shape"], 3, ask.alpha))
        )

    async def sound(self, source: Source, ask: SoundPreprocessing | None = None, *, client: str = "") -> DecodedSound:
        """The sound of the file, mono, resampled."""
        ask = ask or SoundPreprocessing()
        return await self._decode(
            "audio", source, ask, client, lambda fields, memory: DecodedSound(_samples(memory, 0, fields["samples"]), ask.rate_hz)
        )

    async def film(self, source: Source, ask: FilmPreprocessing | None = None, *, client: str = "") -> DecodedFilm:
        """Evenly spaced frames of the film, upright, RGB, resized, and its sound if asked for."""
        ask = ask or FilmPreprocessing()

        def film(fields: dict[str, Any], memory: mmap.mmap) -> DecodedFilm:
            frames = _pixels(memory, fields["shape"], 4)
            sound = DecodedSound(_samples(memory, align(frames.nbytes), fields["samples"]), ask.rate_hz) if ask.use_audio else None
            return DecodedFilm(frames, _seconds(fields["frame_s"]), sound)

        return await self._decode("video", source, ask, client, film)

    async def close(self) -> None:
        """End the processes and wait for their end. Call it when nothing is being decoded."""
        while self._idle:
            self._retire(self._idle.pop())
        while self._ending:
            await asyncio.wait(self._ending)

    async def _decode(self, kind: Kind, source: Source, ask: Preprocessing, client: str, make: Make[T]) -> T:
        """Decode a medium with one process, or with a second one if the first has not taken it. make: builds the result from the process's
        answer and from the memory that holds the decoded data."""
        _check_size(source, self.limits.of(kind)[0])
        try:
            return await self._decode_once(kind, source, ask, client, make)
        except NotTaken:  # once more: the process failed before it took the medium, so the medium is not to blame
            while self._idle:
                self._retire(self._idle.pop())
        try:
            return await self._decode_once(kind, source, ask, client, make)
        except NotTaken as error:
            raise DecoderFailed(str(error)) from error

    async def _decode_once(self, kind: Kind, source: Source, ask: Preprocessing, client: str, make: Make[T]) -> T:
        """Have one process decode a medium, and return what `make` builds from its answer. Raises the error with which the process refused.
        A process whose answer makes no sense is replaced."""
        films = self._films.hold(client) if kind == "video" else nullcontext()
        turn_name = f"{client}/films" if kind == "video" else client  # Other media do not wait for films of their own client.
        async with films, self._process(turn_name) as process, _files(source) as (file, result):
            answer = await process.decode({"kind": kind, "ask": asdict(ask)}, file, result, self.limits.of(kind)[1])
            with _distrust():
                fields = json.loads(answer)
                if (refusal := _refusal(fields)) is None:
                    return make(fields, _map_sealed(result, self.limits.result_bytes))
        raise refusal

    @asynccontextmanager
    async def _process(self, client: str) -> AsyncIterator[DecodingProcess]:
        """Wait for the client's turn, and lend a process for one medium. After a failure a new process replaces it."""
        await self._turns.enter(client)
        try:
            process = self._next_process()
        except OSError as error:
            self._turns.leave(client)
            raise DecoderFailed(f"no process that decodes media can be started: {error}") from error
        self._busy.add(process)
        is_reusable = False
        try:
            yield process
            is_reusable = not process.is_spent()
        finally:
            self._busy.remove(process)
            if is_reusable:
                self._idle.append(process)
                self._turns.leave(client)
            else:
                self._retire(process).add_done_callback(lambda _: self._turns.leave(client))

    def _next_process(self) -> DecodingProcess:
        """An idle process that lives, or a new one. It is no fault of the next medium if an idle process has died or was killed."""
        while self._idle:
            process = self._idle.pop()
            if process.wait(0) is None:
                return process
            self._retire(process)
        return DecodingProcess(self.limits)

    def _retire(self, process: DecodingProcess) -> asyncio.Task[None]:
        """End a process. Returns the task that ends it."""
        task = asyncio.get_running_loop().create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def _check_size(source: Source, max_bytes: int) -> None:
    """Raises BadMedia for a file of more than `max_bytes`, or of 0 bytes."""
    if isinstance(source, int):
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the source of a medium is bytes or the descriptor of a regular file")
        size = status.st_size
    else:
        size = len(source)
    if size > max_bytes:
        raise BadMedia(f"it has {size} bytes, and at most {max_bytes} may be: send a part of it, or a smaller one")
    if not size:
        raise BadMedia("it has no bytes: send the file itself")


@asynccontextmanager
async def _files(source: Source) -> AsyncIterator[tuple[int, int]]:
    """Opens a descriptor of the source, and one of an empty file in memory for the result. Closes both afterwards. Raises DecoderFailed."""
    with ExitStack() as closing:
        try:
            file = await _file(source)
            closing.callback(os.close, file)
            result = os.memfd_create("omnistage-medium", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            closing.callback(os.close, result)
        except OSError as error:
            raise DecoderFailed(f"a medium cannot be handed to the process that decodes it ({error}): ask again later") from error
        yield file, result


async def _file(source: Source) -> int:
    """A new descriptor of the source, with an offset of its own, for reading only. Close it."""
    if isinstance(source, int):
        return os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
    file = os.memfd_create("omnistage-medium", os.MFD_CLOEXEC)
    try:
        data = memoryview(source)
        for start in range(0, len(data), _PIECE):
            os.write(file, data[start : start + _PIECE])
            await asyncio.sleep(0)  # other tasks run between the pieces of a large file
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


@contextmanager
def _distrust() -> Iterator[None]:
    """Turns an error in reading the process's answer into BadMedia: strangers' files feed that process, so the medium is at fault."""
    try:
        yield
    except BadMedia:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadMedia("decoding it went wrong: it is damaged, encode it anew") from error


def _refusal(fields: dict[str, Any]) -> Exception | None:
    """The error that the process answers in place of a medium; None if it has decoded the medium."""
    if "no_room" in fields:
        return NoRoom(str(fields["no_room"]))
    if "bad" in fields:
        return BadMedia(str(fields["bad"]))
    if "short" in fields:
        log.warning("media.short", calls=str(fields["short"]))
        return DecoderFailed("this server is short of something that decoding a medium needs: ask again later")
    if "broken" in fields:
        log.error("media.refused_call", calls=str(fields["broken"]))
        return DecoderBroken("this server cannot decode a medium because of a fault of its own: try another format, or tell its operator")
    return None


def _map_sealed(file: int, max_bytes: int) -> mmap.mmap:
    """A private view of the decoded data, which the process that made them can neither change nor cut short any more. Raises ValueError for
    more than `max_bytes`, or if the process could still write."""
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        raise ValueError(f"it is written to by another way: {error}") from error
    size = os.fstat(file).st_size
    if size > max_bytes:
        raise ValueError(f"{size} bytes are too many")
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY)


def _pixels(memory: mmap.mmap, shape: list[int], axes: int, alpha: bool = False) -> NDArray[np.uint8]:
    """The pixels at the start of the memory, as an array of `shape`: `axes` axes, the last of 3 samples, or 4 with `alpha`."""
    if len(shape) != axes or min(shape) < 1 or shape[-1] != 3 + alpha:
        raise ValueError(f"{shape} is no shape of pixels")
    return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)


def _samples(memory: mmap.mmap, start: int, count: int) -> NDArray[np.float32]:
    """The array of `count` samples that begins at byte `start`."""
    if count < 1:
        raise ValueError(f"{count} samples")
    return np.frombuffer(memory, np.float32, count, start)


def _seconds(length: float) -> float:
    if not 0 < length < math.inf:
        raise ValueError(f"{length} s is no length")
    return float(length)


OUT_OF_MEMORY = errno.ENOMEM
"""The exit status of a process whose memory is short; child.py, which loads only modules that decoding needs, has the same."""

TIME_IS_UP = signal.SIGPROF
"""The signal that ends the process when it has used the processor time that its medium may have."""

LIFE = 200
"""The number of media after which a process is replaced: the memory that libraries leak is freed with it."""

UNCONFINED = b"unconfined"
"""The word that the process sends in place of "ready" if the kernel has no filter of calls; child.py has the same."""


class DecodingProcess(HelperProcess):
    """A process that decodes one medium at a time. It starts at once, and `decode` waits until it is ready. Call `end` in every case."""

    def __init__(self, limits: MediaLimits) -> None:
        self._is_seen_ready = False
        self._decoded = 0  # Number of media.
        self._memory_bytes = limits.memory_bytes
        super().__init__("omnistage.models.media.child", [json.dumps(asdict(limits))], "decodes media")

    def is_spent(self) -> bool:
        """Whether another process is to decode the next medium."""
        return self._decoded >= LIFE

    async def decode(self, request: dict[str, Any], file: int, result: int, limit_s: float) -> bytes:
        """Decode one medium. file, result: descriptors to read from and to write into. Returns the answer, as JSON. Raises NotTaken if the
        process ends or is too slow before it takes the medium, else BadMedia; after these or a cancellation, end the process."""
        if await self.wait_ready() == UNCONFINED and not self._is_seen_ready:
            log.warning("media.unconfined", pid=self.pid)
        self._is_seen_ready = True
        await self.send(json.dumps(request | {"limit_s": limit_s}).encode(), file, result)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self.receive()
        except TimeoutError:
            raise BadMedia(f"decoding it takes longer than {limit_s:g} s: send a part of it, or a smaller one") from None
        if not answer:
            raise BadMedia(self._fault(await self.kill_and_wait()))
        self._decoded += 1
        return answer

    def _fault(self, status: int) -> str:
        """The text of the error for a medium whose process has ended with this status."""
        if status == OUT_OF_MEMORY:
            return f"decoding it takes more memory than the {bytes_told(self._memory_bytes)} there are: send a smaller one"
        if status == -TIME_IS_UP:  # A process that a signal ended has the negative number of the signal.
            return "decoding it takes longer than any of its size should: encode it anew, or send a part of it"
        return f"decoding it ended the process that does it ({describe_end(status)}): it is damaged or too large, encode it anew"
