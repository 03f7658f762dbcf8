"""The ranks of a model, as the process sees them that computes or draws: it is the first one, and starts the others on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as distributed

from omnistage.engine.group import Distributed, RanksApart
from omnistage.engine.plan import Plan
from omnistage.models.common.messages import (
    ComputeHidden,
    ComputeLogits,
    Connect,
    NewCache,
    PagesChanged,
    PartRead,
    ReadPart,
    receive,
    send,
)
from omnistage.models.common.owned import OwnFolder
from omnistage.models.errors import LoadError
from omnistage.models.options import LoadOptions

T = TypeVar("T")

LOAD_LIMIT_S = 1800.0
"""For another rank to load its part: weights come from a disk that may be slow."""

END_LIMIT_S = 5.0
"""For a rank to end that is told to; then it is killed."""

DEATH_S = 10.0
"""For a rank whose connection is closed to have ended: an interpreter that ends by an error has much to free."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Ranks of a CPU meet where no other machine can reach them. Unless somebody says otherwise they would by the name of this machine."""


_WATCH, _CLOSE = b"w", b"c"
"""What the thread is told that watches the ranks."""


class _Rank:
    """One that follows: its process, and the socket on which it is told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._asking = threading.Lock()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "omnistage.models.common.rank", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **LOOPBACK},
                start_new_session=True,
            )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            self.ended = os.pidfd_open(self.process.pid)
            self.channel = Connection(ours.detach())
            undo.pop_all()

    def told_end(self) -> str:
        """How it ended; empty: it has not."""
        with self._asking:  # Of two threads that ask at once one would hear that it goes on.
            status = self.process.poll()
        if status is None:
            return ""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"rank {self.rank} ended with {how}"


class Team:
    """Implements `Followers`. Started at once; `connect` when this rank has loaded its own part. `close` it, whatever happened.

    Steps and logits come from one thread. A rank that ends ends a thread of this process with RanksApart, at work and at rest: a server
    then ends as for any thread that breaks, and its answers go on elsewhere.
    """

    def __init__(self, reader: str, folder: Path, options: LoadOptions) -> None:
        """reader: "module:function" of a `rank.Reader`. options.tensor_parallel_size: how many ranks there are, at least two. Raises
        LoadError."""
        size = options.tensor_parallel_size
        if distributed.is_initialized():
            told = "this process has a model of several ranks already; load this one in another process"
            raise LoadError(f"tensor_parallel_size {size}: {told}")
        self.group = Distributed(0, size)
        self._ranks: list[_Rank] = []
        self._told, self._telling = os.pipe()
        self._over, self._closed = threading.Event(), False
        started: Future[None] = Future()
        self._watch = threading.Thread(target=self._watched, args=(started,), name="omnistage-ranks", daemon=True)
        self._watch.start()
        try:
            started.result()
            for rank in self._ranks:
                with self._all_there(LoadError):
                    send([rank.channel], ReadPart(reader, folder, options_of(options, rank.rank), rank.rank, size))
        except OSError as error:
            self.close()
            raise LoadError(f"tensor_parallel_size {size}: the other ranks cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def for_options(cls, reader: str, folder: Path, options: LoadOptions) -> Self | None:
        """None where there is one rank."""
        return cls(reader, folder, options) if options.tensor_parallel_size > 1 else None

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the other ranks."""
        return tuple(rank.process.pid for rank in self._ranks)

    def connect(self, device: torch.device, met: Callable[[], None] = lambda: None) -> None:
        """Wait until all have loaded, and meet. met: what this rank does then, as the others do; it may make groups. Raises LoadError."""
        with self._all_there(LoadError):
            for rank in self._ranks:
                if not rank.channel.poll(LOAD_LIMIT_S):
                    raise LoadError(f"rank {rank.rank} of {self.group.size} has not loaded after {LOAD_LIMIT_S:g} s")
                read: PartRead = receive(rank.channel)
                if read.error:
                    raise LoadError(f"rank {rank.rank} of {self.group.size}: {read.error}")
            os.environ.update(LOOPBACK)
            with OwnFolder("ranks") as folder:
                store = str(folder.path / "store")
                self._tell(Connect(store))
                self.group.connect(store, device)
                met()
        os.write(self._telling, _WATCH)

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        with self._all_there(RanksApart):
            self._tell(NewCache(pages, poison))

    def pages_changed(self, taken: Sequence[int], freed: Sequence[int]) -> None:
        with self._all_there(RanksApart):
            self._tell(PagesChanged(tuple(taken), tuple(freed)))

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        with self.together(ComputeHidden(plan)):
            yield

    @contextmanager
    def together(self, message: object) -> Iterator[None]:
        """What all ranks compute now, the others because of a message. Raises RanksApart for whatever fails in it."""
        with self._together():
            self._tell(message)
            yield

    def abandon(self) -> None:
        """End the others at once, where ranks are apart for a reason of this one; this process then ends as if they had done so."""
        for rank in self._ranks:
            rank.process.kill()

    def logits(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Logits of a decoder, of the rows of the last step that an item is drawn from, computed with the others."""

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            with self.together(ComputeLogits()):
                return of(hidden)

        return computed

    def close(self) -> None:
        """End the others, and wait for that. Once is enough."""
        if self._closed:
            return
        self._closed = True
        os.write(self._telling, _CLOSE)
        for rank in self._ranks:
            rank.channel.close()
        self.group.close()  # Whoever waits for this rank in the middle of a step waits no longer, and knows already that this one has gone.
        for rank in self._ranks:
            try:
                rank.process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
            os.close(rank.ended)
        self._over.set()
        self._watch.join()
        self._ranks.clear()
        for end in (self._told, self._telling):
            os.close(end)

    def _tell(self, message: object) -> None:
        send((rank.channel for rank in self._ranks), message)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do now. Where one has failed in the middle, the others wait for it, and would take its next step for this one."""
        try:
            with self._all_there(RanksApart):
                yield
        except RanksApart:
            raise
        except Exception as error:
            raise RanksApart(f"this rank failed within a step of {self.group.size} ranks: {error!r}") from error

    @contextmanager
    def _all_there(self, error: type[LoadError | RanksApart]) -> Iterator[None]:
        """What a rank that ends causes, as an error that says how it ended."""
        try:
            yield
        except (OSError, EOFError, RanksApart) as lost:
            raise error(self._first_end() or f"a rank of {self.group.size} was lost: {lost!r}") from lost

    def _first_end(self) -> str:
        """How the first rank ended; empty if none does."""
        ends = select.poll()
        for rank in self._ranks:
            ends.register(rank.ended, select.POLLIN)
        ends.poll(DEATH_S * 1000)
        told = next(filter(None, (rank.told_end() for rank in self._ranks)), "")
        return f"{told}; its standard error says why" if told else ""

    def _watched(self, started: Future[None]) -> None:
        """Starts the others, and watches them once they have met. They would be killed when the thread that started them ends: it stays."""
        try:
            for number in range(1, self.group.size):
                self._ranks.append(_Rank(number))
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
        if os.read(self._told, 1) == _WATCH:
            ends = select.poll()
            for descriptor in (self._told, *(rank.ended for rank in self._ranks)):
                ends.register(descriptor, select.POLLIN)
            if self._told not in (descriptor for descriptor, _ in ends.poll()):
                raise RanksApart(self._first_end())
        self._over.wait()


def options_of(options: LoadOptions, rank: int) -> LoadOptions:
    """Those of one of several ranks: each has a GPU of its own."""
    if options.device == "cpu" or options.tensor_parallel_size == 1:
        return options
    if ":" in options.device:
        raise LoadError(
            f"tensor_parallel_size {options.tensor_parallel_size}: takes the first GPUs, device must be cuda, not {options.device}"
        )
    return replace(options, device=f"{options.device}:{rank}")


def load_in_team(reader: Callable[..., object], folder: Path, options: LoadOptions, load: Callable[[LoadOptions, Team | None], T]) -> T:
    """What `load` makes as the first rank of `options.tensor_parallel_size`; None for its team where there is one rank. reader: a function
    of a module by which each of the others reads its part, see `rank.Reader`. The others end where it cannot be made. Raises what `load`
    does, and LoadError."""
    with contextlib.ExitStack() as undo:
        if team := Team.for_options(f"{reader.__module__}:{reader.__name__}", folder, options):
            undo.callback(team.close)
        try:
            loaded = load(options_of(options, 0), team)
        except RanksApart as error:
            raise LoadError(str(error)) from error
        undo.pop_all()
    return loaded
