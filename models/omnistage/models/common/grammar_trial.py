"""Grammars, each of which another process makes first, on trial: llguidance can take minutes and gigabytes for a schema of some hundred
bytes, and that process can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import IO, Any, TypeVar

from omnistage.models.common.grammar import TRIAL_BYTES, TRIAL_CPU_S, TokenPieces, UnfitConstraint
from omnistage.models.common.helper_process import HelperProcess, NotTaken
from omnistage.models.conversation import TextConstraint
from omnistage.models.interface import Full
from omnistage.models.turns import WaitingPlaces, has_room, host_of

G = TypeVar("G")

MAX_WAITING = 64
START_LIMIT_S = 15.0
ANSWER_LIMIT_S = 5.0
"""Seconds after which the process must have said how a trial ended, which it ends itself after TRIAL_LIMIT_S."""
ALL_GRAMMARS_BYTES = 1 << 30
"""Bytes that the grammars of all running answers may take together in this process."""
MIN_GRAMMAR_BYTES = 16 << 20
"""Each grammar counts for so much at least: it grows by up to 14 MiB as it is used (measured)."""


class GrammarTrials:
    """Tries constraints one after the other, in a process that starts with the first one. Clients take turns.

    Call it from one event loop, on a thread that lives as long: the process ends with the thread that started it. vocabulary: called once
    for each process."""

    def __init__(self, vocabulary: Callable[[], TokenPieces]) -> None:
        self._vocabulary = vocabulary
        self._turns = WaitingPlaces(1, MAX_WAITING, lambda waiting: Full(f"{waiting} constraints wait for their grammars: ask again later"))
        self._process: HelperProcess | None = None
        self._sizes: dict[object, tuple[str, int]] = {}  # The host and the bytes of each grammar that lives.

    async def make(self, constraint: TextConstraint, client: str, make: Callable[[], Awaitable[G]]) -> G:
        """Wait for the client's turn, try the constraint, and then make its grammar, which counts for its host as long as it lives.
        Raises UnfitConstraint if it cannot be made within the bounds of a trial, and Full if that could not be found out, or if running
        answers take too much memory for grammars. If the caller is cancelled, the trial ends."""
        async with self._turns.taken(client):
            size_bytes = max(await self._try(constraint), MIN_GRAMMAR_BYTES)
            self._check_room(client, size_bytes)
            grammar = await make()
            self._count(grammar, client, size_bytes)
            return grammar

    def _check_room(self, client: str, size_bytes: int) -> None:
        """Raises Full if there is no room for a grammar of this size."""
        sizes = [*self._sizes.values()]
        held_bytes = sum(bytes_of_one for _, bytes_of_one in sizes)
        of_host_bytes = sum(bytes_of_one for host, bytes_of_one in sizes if host == host_of(client))
        if not has_room(size_bytes, held_bytes, of_host_bytes, ALL_GRAMMARS_BYTES):
            raise Full(f"the grammars of running answers take {held_bytes >> 20} MiB of {ALL_GRAMMARS_BYTES >> 20}: ask again later")

    def _count(self, grammar: object, client: str, size_bytes: int) -> None:
        """Count the bytes of a grammar for as long as it lives. It may end on any thread, while this one counts."""
        key = object()
        self._sizes[key] = host_of(client), size_bytes
        weakref.finalize(grammar, self._sizes.pop, key).atexit = False

    async def close(self) -> None:
        """End the process. Call it when nothing is being tried."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    async def start(self) -> None:
        """Start the process, so that the first constraint need not wait for that. Raises Full."""
        async with self._turns.taken(""):
            with _failures_as_full():
                await self._live_process()

    async def _try(self, constraint: TextConstraint) -> int:
        """The bytes that the grammar takes. Raises UnfitConstraint or Full."""
        with _failures_as_full():
            try:
                outcome = await self._exchange(constraint)
            except NotTaken:  # once more: the process was killed before it took the constraint
                outcome = await self._exchange(constraint)
        match outcome:
            case {"passed": int(size_bytes)}:
                return size_bytes
            case {"unfit": str(reason)}:
                raise UnfitConstraint(reason)
            case {"ended": int(status)} if status == -signal.SIGPROF:
                raise UnfitConstraint(f"its grammar takes more than {TRIAL_CPU_S:g} s of a processor: make it simpler")
            case {"ended": int(status)} if status == -signal.SIGABRT:
                raise UnfitConstraint(f"its grammar takes more than {TRIAL_BYTES >> 20} MiB of memory: make it simpler")
            case {"ended": int(status)} if status != -signal.SIGKILL:
                raise UnfitConstraint("its grammar cannot be made: make it simpler")
        raise Full("the grammar of the constraint was not made in time: ask again later")

    async def _exchange(self, constraint: TextConstraint) -> dict[str, Any]:
        """Have the process try a constraint; returns the outcome. A process that does not answer is ended. Raises NotTaken."""
        process = await self._live_process()
        reading, writing = os.pipe()
        trial = asyncio.create_task(self._send(process, constraint, reading))
        try:
            return await asyncio.shield(trial)
        except asyncio.CancelledError:
            os.close(writing)
            writing = -1
            # Until the process can try the next constraint, however often this is cancelled.
            while not trial.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([trial])
            trial.exception()  # Nobody wants to know.
            raise
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)

    async def _send(self, process: HelperProcess, constraint: TextConstraint, pipe: int) -> dict[str, Any]:
        """How the trial ended. A process that does not take it, or does not answer, is ended. Raises NotTaken."""
        try:
            with _file(json.dumps(astuple(constraint)).encode()) as file:
                await process.send(b"constraint", file.fileno(), pipe)
        except NotTaken:
            await self.close()
            raise
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                answer = await process.receive()
        except TimeoutError:
            answer = b""
        if not answer:
            await self.close()
            return {"late": True}
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    async def _live_process(self) -> HelperProcess:
        """The process, which has the vocabulary. Raises NotTaken."""
        if self._process is not None and not self._process.is_alive():
            await self.close()
        if self._process is None:
            self._process = HelperProcess("omnistage.models.common.grammar_child", [], "makes grammars on trial", START_LIMIT_S)
            try:
                with _file(pickle.dumps(self._vocabulary())) as file, suppress(BrokenPipeError):  # It ended; the next line tells how.
                    self._process.post(b"vocabulary", file.fileno())
                await self._process.wait_ready()
            except BaseException:
                await self.close()
                raise
        return self._process


@contextmanager
def _file(content: bytes) -> Iterator[IO[bytes]]:
    """A file in memory, for the other process to read."""
    with os.fdopen(os.memfd_create("omnistage-constraint", os.MFD_CLOEXEC), "w+b") as file:
        file.write(content)
        file.flush()
        yield file


@contextmanager
def _failures_as_full() -> Iterator[None]:
    """Raises Full where no process could try a constraint, or this one lacks a descriptor."""
    try:
        yield
    except (NotTaken, OSError) as error:
        raise Full(f"the grammar of the constraint was not tried ({error}): ask again later") from error
