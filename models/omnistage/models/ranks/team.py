"""Starts the other ranks of a model on this machine, and leads them. This process is the first rank. Its messages to the others are
pickled, and sent over a socket that only parent and child have."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from omnistage.engine.devices import Distributed, RanksApart
from omnistage.engine.plan import StepPlan
from omnistage.host.child import ModuleChild, describe_end
from omnistage.models.fetch.own_files import OwnFolder
from omnistage.models.options import LoadOptions
from omnistage.models.reports import LoadError


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The first message: read your part of a model. reader: "module:function" of a `rank.RankReader`. folder: the checkpoint. rank: number
    of the receiver. size: number of ranks."""

    reader: str
    folder: Path
    options: LoadOptions
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class PartRead:
    """The answer to ReadPart; other messages get no answer. error: why the part could not be read; empty: it was read."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Connect:
    """Meet the other ranks; see Distributed.connect."""

    store: str


@dataclass(frozen=True, slots=True)
class NewCache:
    """Replace the cache; see Followers.new_cache."""

    pages: int
    poison: bool


@dataclass(frozen=True, slots=True)
class PagesChanged:
    """Note which pages were taken and freed; see KVCache.follow."""

    taken_pages: Sequence[int]
    freed_pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class ComputeHidden:
    """Compute the hidden rows of a step."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Compute the logits of the rows of the last step from which an item is drawn."""


def send(channels: Iterable[Connection], message: object) -> None:
    """Send a message through each of the channels. Raises OSError if the reader of a channel has ended."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    for channel in channels:
        channel.send_bytes(buffer.getbuffer())


def receive(channel: Connection) -> Any:
    """Wait for the next message. Raises EOFError or OSError if the sender has ended."""
    return pickle.loads(channel.recv_bytes())


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its bytes. torch itself would put each tensor into a file, which takes a tenth of a millisecond."""

    def reducer_override(self, value: object) -> Any:
        """Called for each object: how to pickle a tensor; NotImplemented: as usual."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)


T = TypeVar("T")

LOAD_LIMIT_S = 1800.0
"""Seconds that another rank may take to load its part: many, because a disk may be slow."""

END_LIMIT_S = 5.0
"""Seconds that a rank may take to end after its channel was closed; after that it is killed."""

DEATH_S = 10.0
"""Seconds to wait for the end of a rank that has closed its connection, because an interpreter that ends by an error has much to free."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Makes ranks on a CPU connect where no other machine can reach them. By default gloo would use the name of this machine."""


_WATCH, _CLOSE = b"w", b"c"
"""Messages to the thread that watches the ranks."""


class _Rank(ModuleChild):
    """Another rank: its process, and the connection for messages to it. A server does not fork, so nothing closes a copy of the
    connection."""

    def __init__(self, rank: int) -> None:
        super().__init__("omnistage.models.ranks.rank", environment={**os.environ, **LOOPBACK})
        self.rank, self.connection = rank, Connection(self.channel.detach())

    def end_text(self) -> str:
        """A text on how the rank ended; empty: it has not ended."""
        status = self.wait(0)
        return "" if status is None else f"rank {self.rank} ended with {describe_end(status)}"


class Team:
    """Starts the other ranks and sends them messages; implements `Followers`. Call `connect` when this rank has loaded its own part, and
    `close` in any case.

    Steps and logits are computed on one thread. If the process of another rank ends, whether it computes or waits, RanksApart is raised
    on a thread of this process. Then the server ends, as for any broken thread, and other replicas continue its answers."""

    def __init__(self, reader: str, folder: Path, options: LoadOptions) -> None:
        """reader: "module:function" of a `rank.RankReader`. folder: the checkpoint. options.tensor_parallel_size: number of ranks, two or
        more. Raises LoadError."""
        size = options.tensor_parallel_size
        if distributed.is_initialized():
            reason = "this process has a model of several ranks already; load this one in another process"
            raise LoadError(f"tensor_parallel_size {size}: {reason}")
        self.group = Distributed(0, size)
        self._ranks: list[_Rank] = []
        self._wake_reader, self._wake_writer = os.pipe()
        """The ends of a pipe to the thread that watches the ranks: for reading, for writing."""
        self._may_end, self._closed = threading.Event(), False  # `_may_end`: the watching thread may end
        started: Future[None] = Future()
        self._watch = threading.Thread(target=self._watch_ranks, args=(started,), name="omnistage-ranks", daemon=True)
        self._watch.start()
        try:
            started.result()
            for rank in self._ranks:
                with self._explaining_loss(LoadError):
                    send([rank.connection], ReadPart(reader, folder, options_of(options, rank.rank), rank.rank, size))
        except OSError as error:
            self.close()
            raise LoadError(f"tensor_parallel_size {size}: the other ranks cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        """Process ids of the other ranks."""
        return tuple(rank.pid for rank in self._ranks)

    def connect(self, device: torch.device, met: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have loaded their parts and are connected. met: called after that, at the same time as in the other ranks;
        it may make groups of ranks. Raises LoadError."""
        with self._explaining_loss(LoadError):
            for rank in self._ranks:
                if not rank.connection.poll(LOAD_LIMIT_S):
                    raise LoadError(f"rank {rank.rank} of {self.group.size} has not loaded after {LOAD_LIMIT_S:g} s")
                read: PartRead = receive(rank.connection)
                if read.error:
                    raise LoadError(f"rank {rank.rank} of {self.group.size}: {read.error}")
            os.environ.update(LOOPBACK)
            with OwnFolder("ranks") as folder:
                store = str(folder.path / "store")
                self._send(Connect(store))
                self.group.connect(store, device)
                met()
        os.write(self._wake_writer, _WATCH)

    def new_cache(self, pages: int, *, poison: bool = False) -> None:
        with self._explaining_loss(RanksApart):
            self._send(NewCache(pages, poison))

    def pages_changed(self, new: Sequence[int], freed: Sequence[int]) -> None:
        with self._explaining_loss(RanksApart):
            self._send(PagesChanged(tuple(new), tuple(freed)))

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        with self.together(ComputeHidden(plan)):
            yield

    @contextmanager
    def together(self, message: object) -> Iterator[None]:
        """Sends a message to the other ranks, which makes them compute while the context is open. Raises RanksApart for any failure."""
        with self._together():
            self._send(message)
            yield

    def abandon(self) -> None:
        """Kill the other ranks, because this rank has failed; this process then ends as if they had ended by themselves."""
        for rank in self._ranks:
            rank.kill()

    def logits(self, own_logits: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that computes logits with `own_logits` while the other ranks compute their parts. Call it with the rows of the last
        step from which items are drawn."""

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            with self.together(ComputeLogits()):
                return own_logits(hidden)

        return computed

    def close(self) -> None:
        """End the other ranks, and wait for their end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake_writer, _CLOSE)
        for rank in self._ranks:
            rank.connection.close()
        self.group.close()  # A rank that waits for this rank in the middle of a step then notices its end.
        for rank in self._ranks:
            rank.wait(END_LIMIT_S)
            rank.close()
        self._may_end.set()
        self._watch.join()
        self._ranks.clear()
        for end in (self._wake_reader, self._wake_writer):
            os.close(end)

    def _send(self, message: object) -> None:
        send((rank.connection for rank in self._ranks), message)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Used around work that all ranks do at once. Any error becomes RanksApart, because the others still wait in this step, and would
        mistake the next step for it."""
        try:
            with self._explaining_loss(RanksApart):
                yield
        except RanksApart:
            raise
        except Exception as error:
            raise RanksApart(f"this rank failed within a step of {self.group.size} ranks: {error!r}") from error

    @contextmanager
    def _explaining_loss(self, error: type[LoadError | RanksApart]) -> Iterator[None]:
        """While the context is open, turns an error that the end of a rank caused into `error`, with a text on how that rank ended."""
        try:
            yield
        except (OSError, EOFError, RanksApart) as failure:
            raise error(self._first_end() or f"a rank of {self.group.size} was lost: {failure!r}") from failure

    def _first_end(self) -> str:
        """Wait at most DEATH_S for a rank to end. Returns a text on how the first such rank ended; empty: none has ended."""
        ends = select.poll()
        for rank in self._ranks:
            ends.register(rank.end_fd, select.POLLIN)
        ends.poll(DEATH_S * 1000)
        text = next(filter(None, (rank.end_text() for rank in self._ranks)), "")
        return f"{text}; its standard error says why" if text else ""

    def _watch_ranks(self, started: Future[None]) -> None:
        """The watching thread: start the other ranks, set `started`, and raise RanksApart when a rank ends after all have met. It lives
        until `close`, because the system kills the ranks when the thread that started them ends."""
        try:
            for number in range(1, self.group.size):
                self._ranks.append(_Rank(number))
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
        if os.read(self._wake_reader, 1) == _WATCH:
            ends = select.poll()
            for descriptor in (self._wake_reader, *(rank.end_fd for rank in self._ranks)):
                ends.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in ends.poll()]
            if self._wake_reader not in ready:  # A rank has ended, and `close` was not called.
                raise RanksApart(self._first_end())
        self._may_end.wait()


def options_of(options: LoadOptions, rank: int) -> LoadOptions:
    """The options for one rank: each of several ranks on GPUs gets a GPU of its own. Raises LoadError if `options` give one GPU to all."""
    if options.device == "cpu" or options.tensor_parallel_size == 1:
        return options
    if ":" in options.device:
        raise LoadError(
            f"tensor_parallel_size {options.tensor_parallel_size}: takes the first GPUs, device must be cuda, not {options.device}"
        )
    return replace(options, device=f"{options.device}:{rank}")


def load_in_team(reader: Callable[..., object], folder: Path, options: LoadOptions, load: Callable[[LoadOptions, Team | None], T]) -> T:
    """Call `load` with the options of the first rank and a team of the others (None: there is a single rank), and return its result.
    reader: a function of a module with which each other rank reads its part, see `rank.RankReader`. If `load` fails, the other ranks end.
    Raises what `load` raises, and LoadError."""
    team: Team | None = None
    with contextlib.ExitStack() as undo:
        if options.tensor_parallel_size > 1:
            team = Team(f"{reader.__module__}:{reader.__name__}", folder, options)
            undo.callback(team.close)
        try:
            loaded = load(options_of(options, 0), team)
        except RanksApart as error:
            raise LoadError(str(error)) from error
        undo.pop_all()
    return loaded
