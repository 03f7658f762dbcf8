"""Loading and unloading of pipelines. One that nobody has asked for long is unloaded, and the next request loads it. The router decides
both, because it knows which requests run; its launcher ends the processes and starts them."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context

import structlog

from omnistage.host.notes import Note, NoteSocket
from omnistage.router.placement import Placement

log = structlog.get_logger(__name__)


class Loading:
    """The loaded and unloaded pipelines of a router. A request that comes while a pipeline is unloaded waits for its stages, as for stages
    that were lost and are being started again.

    The launcher tells in each note which servers it keeps, and which pipelines it has unloaded. The router tells it in a note that it wants
    a pipeline, or wants it no more. The last note about a pipeline counts, so the two agree again whatever crossed on the way."""

    def __init__(self, placements: Mapping[str, Placement], limits_s: Mapping[str, float]) -> None:
        """placements: of all pipelines, by name. limits_s: by name of a pipeline, after how many seconds without a request it is unloaded;
        0, or no entry: never."""
        self._placements = placements
        self._limits_s = limits_s
        self._requests = Counter[str]()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._launcher: NoteSocket | None = None
        self._has_begun: asyncio.Future[None] | None = None
        self._at_rest = asyncio.Event()

    async def listen(self, fd: int) -> None:
        """Listen to the launcher from now on, and wait for its first note. fd: of the socket to it; negative: there is none."""
        if fd >= 0:
            self._has_begun = asyncio.get_running_loop().create_future()
            self._launcher = NoteSocket(socket.socket(fileno=fd), self._take, self._lose_launcher)
            await self._has_begun

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._launcher is not None:
            self._launcher.close()

    async def rests(self) -> None:
        """Wait until pipelines are unloaded and no other one is served, or being started."""
        await self._at_rest.wait()

    def _take(self, note: Note) -> None:
        """Handle a note of the launcher."""
        is_first = self._has_begun is not None and not self._has_begun.done()
        for name, placement in self._placements.items():
            if name not in note["unloaded"]:
                if not placement.is_unloaded:
                    placement.keep(note["kept"])
            elif is_first:  # An earlier router has unloaded it.
                placement.unload()
            # Else the launcher will soon read that the pipeline is wanted.
        if not note["kept"] and any(placement.is_unloaded for placement in self._placements.values()):
            self._at_rest.set()
        self._begin()

    def _lose_launcher(self) -> None:
        """The launcher has ended: nobody starts a server again, and this router will end too."""
        self._limits_s = {}
        for placement in self._placements.values():
            placement.keep(())
        self._begin()

    def _begin(self) -> None:
        if self._has_begun is not None and not self._has_begun.done():
            self._has_begun.set_result(None)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """A context for a request to a pipeline, which is loaded for it if it is not."""
        self._requests[name] += 1
        if name in self._timers:
            self._timers.pop(name).cancel()
        if self._placements[name].is_unloaded:
            log.info("pipeline.loads", pipeline=name)
            self._placements[name].load()
            self._tell(name, is_wanted=True)
        try:
            yield
        finally:
            self._requests[name] -= 1
            self.rest(name)

    def rest(self, name: str) -> None:
        """Unload a pipeline after its time limit, unless a request comes before. Called when it is ready, and after each request."""
        if (limit_s := self._limits_s.get(name, 0.0)) and not self._requests[name]:
            if name in self._timers:
                self._timers[name].cancel()
            nobody = Context()  # The lines of the log are about no request.
            self._timers[name] = asyncio.get_running_loop().call_later(limit_s, self._unload, name, context=nobody)

    def _unload(self, name: str) -> None:
        del self._timers[name]
        if not self._placements[name].is_unloaded:
            log.info("pipeline.unloads", pipeline=name, idle_s=self._limits_s[name])
            self._placements[name].unload()
            self._tell(name, is_wanted=False)

    def _tell(self, name: str, *, is_wanted: bool) -> None:
        if self._launcher is not None:
            self._launcher.send(name, {"pipeline": name, "is_wanted": is_wanted})
