"""Media decoded for a stage, by processes that may die without it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import mmap
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from omnistage.models.media.decoded import Film, Picture, Sound
from omnistage.models.media.errors import BadMedia, DecoderFailed, NoRoom, NotTaken
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.output import SEALS, aligned
from omnistage.models.media.preprocessing import FilmPreprocessing, PicturePreprocessing, Preprocessing, SoundPreprocessing
from omnistage.models.media.process import DecodingProcess
from omnistage.models.media.turns import Turns

Kind = Literal["image", "audio", "video"]

Source = bytes | int
"""A file in memory, or the descriptor of one on a disk, which stays the caller's and must stay open until the medium is decoded. Its offset
is neither used nor changed."""

_PIECE = 1 << 20


class MediaDecoder:
    """Decodes so many media at once, in as many processes, which start when they are needed and stay.

    Call it from one event loop, on a thread that lives as long as it: the processes end with the thread that started them. Where several
    media wait, clients take turns, and each is served first come, first served. Films take all processes but one, where there are several:
    pictures and sounds never wait for one. Cancelling ends the work. All of its methods raise BadMedia for a medium, DecoderFull when
    max_waiting films or max_waiting others wait, and DecoderFailed when no process can be started, or this one has no descriptor left.
    """

    def __init__(self, limits: MediaLimits | None = None, *, processes: int = 1, max_waiting: int = 256) -> None:
        self.limits = limits or MediaLimits()
        self._turns = Turns(processes, max_waiting)
        self._films = Turns(max(processes - 1, 1), max_waiting)
        self._idle: list[DecodingProcess] = []
        self._busy: set[DecodingProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Media that wait for a process."""
        return self._turns.waiting + self._films.waiting

    @property
    def pids(self) -> list[int]:
        """Of the processes there are."""
        return [process.pid for process in (*self._busy, *self._idle)]

    async def picture(self, source: Source, ask: PicturePreprocessing | None = None, *, client: str = "") -> Picture:
        """The first picture of the file, upright, RGB or RGBA, resized."""
        ask = ask or PicturePreprocessing()
        made, memory = await self._decode("image", source, ask, client)
        with _distrust():
            return Picture(_pixels(memory, made["shape"], 3, ask.alpha))

    async def sound(self, source: Source, ask: SoundPreprocessing | None = None, *, client: str = "") -> Sound:
        """The sound of the file, mono, resampled."""
        ask = ask or SoundPreprocessing()
        made, memory = await self._decode("audio", source, ask, client)
        with _distrust():
            return Sound(_samples(memory, 0, made["samples"]), ask.rate_hz)

    async def film(self, source: Source, ask: FilmPreprocessing | None = None, *, client: str = "") -> Film:
        """Frames of the film, evenly taken, upright, RGB, resized, and its sound if asked for."""
        ask = ask or FilmPreprocessing()
        made, memory = await self._decode("video", source, ask, client)
        with _distrust():
            frames = _pixels(memory, made["shape"], 4)
            sound = Sound(_samples(memory, aligned(frames.nbytes), made["samples"]), ask.rate_hz) if ask.use_audio else None
            return Film(frames, float(made["frame_s"]), sound)

    async def close(self) -> None:
        """End the processes and wait for their end. Nothing is being decoded."""
        while self._idle:
            self._retire(self._idle.pop())
        while self._ending:
            await asyncio.wait(self._ending)

    async def _decode(self, kind: Kind, source: Source, ask: Preprocessing, client: str) -> tuple[dict[str, Any], mmap.mmap]:
        most, limit_s = self.limits.of(kind)
        _check_size(source, most)
        request = {"kind": kind, "ask": asdict(ask)}
        try:
            answer, made = await self._asked(request, source, limit_s, client)
        except NotTaken:  # once more: what happened to an idle process is no fault of the medium
            while self._idle:
                self._retire(self._idle.pop())
            answer, made = await self._asked(request, source, limit_s, client)
        try:
            with _distrust():
                said = json.loads(answer)
                if "no_room" in said:
                    raise NoRoom(str(said["no_room"]))
                if "bad" in said:
                    raise BadMedia(str(said["bad"]))
                return said, _mapped(made, self.limits.result_bytes)
        finally:
            os.close(made)

    async def _asked(self, request: dict[str, Any], source: Source, limit_s: float, client: str) -> tuple[bytes, int]:
        """What a process answers, as `DecodingProcess.decode` has it."""
        async with self._films.taken(client) if request["kind"] == "video" else nullcontext(), self._process(client) as process:
            try:
                file = await _file(source)
            except OSError as error:
                raise DecoderFailed(f"a medium cannot be handed to the process that decodes it ({error}): ask again later") from error
            try:
                return await process.decode(request, file, limit_s)
            finally:
                os.close(file)

    @asynccontextmanager
    async def _process(self, client: str) -> AsyncIterator[DecodingProcess]:
        """A process for one medium, when it is the client's turn. It is kept if all goes well, and else replaced by the next one, once its
        memory is free."""
        await self._turns.enter(client)
        process = self._alive()
        self._busy.add(process)
        well = False
        try:
            yield process
            well = not process.is_spent()
        finally:
            self._busy.remove(process)
            if well:
                self._idle.append(process)
                self._turns.leave()
            else:
                self._retire(process).add_done_callback(lambda _: self._turns.leave())

    def _alive(self) -> DecodingProcess:
        """One that lives: that one died idle, killed by whom ever, is no fault of the next medium."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            self._retire(process)
        try:
            return DecodingProcess(self.limits)
        except OSError as error:
            self._turns.leave()
            raise DecoderFailed(f"no process that decodes media can be started: {error}") from error

    def _retire(self, process: DecodingProcess) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task


def _check_size(source: Source, most: int) -> None:
    if isinstance(source, int):
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the source of a medium is bytes or the descriptor of a regular file")
        size = status.st_size
    else:
        size = len(source)
    if size > most:
        raise BadMedia(f"it has {size} bytes, and at most {most} may be: send a part of it, or a smaller one")
    if not size:
        raise BadMedia("it has no bytes: send the file itself")


async def _file(source: Source) -> int:
    """A descriptor with an offset of its own, for reading only. Close it."""
    if isinstance(source, int):
        return os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
    file = os.memfd_create("omnistage-medium", os.MFD_CLOEXEC)
    try:
        data = memoryview(source)
        for start in range(0, len(data), _PIECE):
            os.write(file, data[start : start + _PIECE])
            await asyncio.sleep(0)  # others run between the pieces of a large file
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


@contextmanager
def _distrust() -> Iterator[None]:
    """The process that decodes is fed by strangers: what makes no sense of what it says is no fault of this one."""
    try:
        yield
    except BadMedia:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadMedia("decoding it went wrong: it is damaged, encode it anew") from error


def _mapped(file: int, most: int) -> mmap.mmap:
    """A private view of what was made, which the process that made it can neither change any more nor cut short."""
    size = os.fstat(file).st_size
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS or size > most:
        raise ValueError(f"{size} bytes that are not sealed or too many")
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY)


def _pixels(memory: mmap.mmap, shape: list[int], axes: int, alpha: bool = False) -> NDArray[np.uint8]:
    if len(shape) != axes or min(shape) < 1 or shape[-1] != 3 + alpha:
        raise ValueError(f"{shape} is no shape of pixels")
    return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)


def _samples(memory: mmap.mmap, start: int, count: int) -> NDArray[np.float32]:
    if count < 1:
        raise ValueError(f"{count} samples")
    return np.frombuffer(memory, np.float32, count, start)
