"""Plays an answer while it is made.

A thread moves the sound from memory into the pipe of a process that plays it (`loudspeaker`). The caller that writes
never waits, and the listener does not notice when this program stands still for less than a second.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omnistage.client.answer import Audio
from omnistage.client.errors import NotAvailableError, PlayerLostError, RequestError
from omnistage.client.events import AudioChunk
from omnistage.client.loudspeaker import PATIENCE, PLAYER_VARIABLE, STALL_S, Loudspeaker, PlayerProcess, find_loudspeaker

USUAL_RATE_HZ = 24_000
"""The sample rate of our models, in Hz."""

MAX_WAITING_S = 3600
"""Seconds of sound that may wait to be played. An answer ends long before, by its own limits; a minute at 24 kHz takes 5.8 MB."""


@dataclass(frozen=True, slots=True)
class Heard:
    """How much of a sound was heard. samples: number of samples heard, an estimate, because a device may play some 0.2 s later. of: number
    of all samples of the sound that came."""

    samples: int
    of: int
    sample_rate_hz: int

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate_hz


class Player:
    """Plays one answer while it comes.

    ::

        with Player() as player:
            for event in omni.stream("What is a kite?"):
                if isinstance(event, AudioChunk):
                    player.write(event)

    The end of the `with` waits until all is heard; an error in it, or Ctrl-C, silences the player at once. The player's thread and process
    end with `finish` or `stop`, with the `with`, when the player becomes garbage, and with this program, even if that is killed. Every
    method may be called from any thread, and `stop` from the handler of a signal.

    loudspeaker: from `find_loudspeaker`, which code on an event loop calls in a thread; by default it is called here, which takes up to
    some 0.3 s. sample_rate_hz: the expected rate: the loudspeaker is started with it, so that it is ready for the first sound; for sound of
    another rate it is started anew. Raises NotAvailableError if nothing plays here, and the errors of `find_loudspeaker`."""

    def __init__(self, loudspeaker: Loudspeaker | None = None, *, sample_rate_hz: int = USUAL_RATE_HZ) -> None:
        loudspeaker = loudspeaker or find_loudspeaker()
        if loudspeaker is None:
            hint = f"A file keeps the sound: {{keep_sound}}. {PLAYER_VARIABLE} may name a program that plays."
            raise NotAvailableError("no loudspeaker here", hint=hint)
        self._feed = _Feed(loudspeaker, sample_rate_hz)
        weakref.finalize(self, _stop_own, self._feed, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and not self._feed.has_ended:
                self.finish()
        finally:
            self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and not self._feed.has_ended:
                await self.afinish()
        finally:
            self.stop()

    def write(self, sound: AudioChunk | Audio) -> None:
        """Copy the next piece of sound, to be played after the pieces before it. The first piece is played after the wait in its
        `prebuffer_s`, or when `finish` is called. Never waits. Sound that comes after `stop`, or after the loss of the player, is not
        played.

        Raises RequestError for a sample rate that changes, or if more than an hour of sound would wait; ValueError after `finish`."""
        rate_hz = sound.sample_rate if isinstance(sound, Audio) else sound.sample_rate_hz
        samples = np.array(sound.samples, "<f4")
        if samples.ndim > 2:
            raise RequestError(f"samples are [n] or [n, channels], these are {list(samples.shape)}", hint="Give one sound.")
        if samples.ndim == 2:
            samples = samples.mean(axis=1, dtype="<f4")  # Mixed to one channel, because players are started with one.
        self._feed.give(samples, rate_hz, 0.0 if isinstance(sound, Audio) else sound.prebuffer_s or 0.0)

    def finish(self) -> Heard:
        """Wait until all sound is heard, or `stop` is called; returns how much was heard. No more sound can be written. The wait lasts at
        most 5 s and twice the length of the rest. Raises PlayerLostError if the player ended before its end, or hangs."""
        self._feed.end()
        self._feed.over.result()
        return self.heard

    async def afinish(self) -> Heard:
        """As `finish`, for an event loop."""
        self._feed.end()
        await asyncio.wrap_future(self._feed.over)
        return self.heard

    def stop(self) -> Heard:
        """Silence the player at once and for ever; returns how much was heard. It waits for nothing, and may be called several times."""
        return self._feed.measure(self._feed.stop())

    @property
    def heard(self) -> Heard:
        """How much was heard up to now."""
        return self._feed.measure()

    @property
    def lost(self) -> PlayerLostError | None:
        """The error if the player ended by itself or hangs, so that nothing more is heard; None: no such fault. The answer goes on."""
        over = self._feed.over
        error = over.exception() if over.done() else None
        return error if isinstance(error, PlayerLostError) else None


class _Feed:
    """The blocks of sound that wait, and the thread that writes them to the player's process. Its methods do the work of those of `Player`.

    A signal handler may call `stop` in the middle of another method on the same thread. Therefore the lock is reentrant, and all that
    `stop` needs is kept in attributes."""

    def __init__(self, loudspeaker: Loudspeaker, sample_rate_hz: int) -> None:
        self.over: Future[None] = Future()
        self.over.set_running_or_notify_cancel()  # from now on no caller can cancel it
        self._loudspeaker = loudspeaker
        self._rate_hz = sample_rate_hz
        self._changed = threading.Condition(threading.RLock())
        self._blocks: deque[NDArray[np.float32]] = deque()
        self._waiting_samples = 0  # those in `_blocks`
        self._all_samples = 0  # all that came
        self._begins_at = 0.0  # time.monotonic() at which the first sound may be played
        self._give_up_at = float("inf")  # time.monotonic() at which the wait for the end is given up
        self.has_ended = False  # no more sound comes
        self._stopped = False
        self._heard_samples: int | None = None  # all that were heard; None: more may be heard
        self._process: PlayerProcess | None = None
        threading.Thread(target=self._run, name="omnistage-player", daemon=True).start()

    def give(self, samples: NDArray[np.float32], sample_rate_hz: int, prebuffer_s: float) -> None:
        """Append samples, float32 [n]. prebuffer_s: seconds that the first samples of all wait; later values are not used. Raises as
        `Player.write`."""
        with self._changed:
            if self.has_ended:
                raise ValueError("this player has finished")
            if not len(samples):
                return
            if not self._all_samples:
                self._rate_hz = sample_rate_hz
                self._begins_at = time.monotonic() + prebuffer_s
            elif sample_rate_hz != self._rate_hz:
                fault = f"this player has sound of {self._rate_hz} samples a second, these are {sample_rate_hz}"
                raise RequestError(fault, hint="Have a Player for each answer.")
            if self._waiting_samples + len(samples) > MAX_WAITING_S * sample_rate_hz:
                hint = "Have a Player for each answer, and finish it."
                raise RequestError(f"more than {MAX_WAITING_S} s of sound wait to be played", hint=hint)
            self._all_samples += len(samples)
            if not self._stopped and not self.over.done():
                self._waiting_samples += len(samples)
                self._blocks.append(samples)
                self._changed.notify()

    def end(self) -> None:
        """Note that no more sound comes, and when to give up the wait for the rest."""
        with self._changed:
            if not self.has_ended:
                left_s = (self._all_samples - self.measure().samples) / self._rate_hz
                self._give_up_at = time.monotonic() + PATIENCE * left_s + STALL_S
                self.has_ended = True
                self._changed.notify()

    def stop(self) -> int:
        """Silence the player for ever; returns how many samples were heard."""
        with self._changed:
            self._stopped = True
            if self._heard_samples is None:
                if self._process is not None:
                    self._process.kill()
                self._heard_samples = self._now_heard()
            self._blocks.clear()
            self._changed.notify()
            return self._heard_samples

    def measure(self, samples: int | None = None) -> Heard:
        """How much was heard. samples: number of samples heard; None: as many as can have been heard up to now."""
        with self._changed:
            if samples is None:
                samples = self._now_heard() if self._heard_samples is None else self._heard_samples
            return Heard(samples, self._all_samples, self._rate_hz)

    def _now_heard(self) -> int:
        """How many samples can have been heard from the running process."""
        return min(self._process.heard_samples, self._all_samples) if self._process is not None else 0

    def _run(self) -> None:
        """The thread's work: play everything, then set the result or the error of `over`."""
        try:
            self._play()
        except BaseException as error:
            self.over.set_exception(error)
        else:
            self.over.set_result(None)

    def _play(self) -> None:
        """Write the blocks to a process as they come, wait until it has played them, and close it. Raises PlayerLostError, unless `stop`
        was called."""
        try:
            process = self._start(self._rate_hz)
            while (block := self._next()) is not None:
                if process.sample_rate_hz != self._rate_hz:
                    process.close()
                    process = self._start(self._rate_hz)
                self._put(process, block)
            if self._all_samples:
                self._put(process, np.zeros(round(self._loudspeaker.tail_s * self._rate_hz), "<f4"))
                if not self._stopped:
                    process.finish(self._give_up_at)
                    with self._changed:
                        if self._heard_samples is None:
                            self._heard_samples = self._all_samples
        except PlayerLostError:
            if not self._stopped:
                raise
        finally:
            with self._changed:
                if self._heard_samples is None:
                    self._heard_samples = self._now_heard()
                self._blocks.clear()
                last_process, self._process = self._process, None
            if last_process is not None:
                last_process.close()

    def _put(self, process: PlayerProcess, block: NDArray[np.float32]) -> None:
        """Write a block as fast as the process takes it."""
        rest = block.view(np.uint8).data
        while rest and not self._stopped:
            rest = rest[process.write(rest, self._give_up_at) :]

    def _start(self, sample_rate_hz: int) -> PlayerProcess:
        """Start a process for this rate. If `stop` was called before, the process is stopped at once."""
        process = PlayerProcess(self._loudspeaker, sample_rate_hz)
        with self._changed:
            self._process = process
            if self._stopped:
                process.kill()
        return process

    def _next(self) -> NDArray[np.float32] | None:
        """Wait for the next block and for the time to play it, and return it; None after the last one, or after `stop`."""
        with self._changed:
            while not self._stopped:
                wait_s = None  # Without a block: until one comes, or the end.
                if self._blocks:
                    wait_s = self._begins_at - time.monotonic()
                    if wait_s <= 0 or self.has_ended:
                        block = self._blocks.popleft()
                        self._waiting_samples -= len(block)
                        return block
                elif self.has_ended:
                    return None
                self._changed.wait(wait_s)
            return None


def _stop_own(feed: _Feed, pid: int) -> None:
    """Stop a player that became garbage. pid: of the process that made it. In a forked child this does nothing: the child lacks the thread,
    and its copy of the lock may be locked for ever."""
    if os.getpid() == pid:
        feed.stop()
