"""The process of a rank that is not the first: `python -m omnistage.models.ranks.rank DESCRIPTOR PARENT`.

It loads its part of a model, meets the other ranks, and then carries out the messages of the first rank, its parent, in order. It ends when
its parent ends or closes the socket, or by any error. After an error the parent ends as well, and its supervisor starts both anew. An error
after the parent's end is not reported: that end caused it, and the parent reports why it ended.
"""

from __future__ import annotations

import importlib
import select
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, cast

import torch

from omnistage.engine.adapter import Hidden
from omnistage.engine.attention import choose_backend
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.devices import Distributed, Group, RanksApart
from omnistage.engine.memory import KVCache
from omnistage.engine.plan import StepPlan, last_rows
from omnistage.host.child import read_start
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import ComputeHidden, ComputeLogits, Connect, NewCache, PagesChanged, PartRead, ReadPart, receive, send


class Follower(Protocol):
    """A rank's part of a model, which carries out messages: `DecoderFollower` for a decoder of the engine, else a family's own class."""

    @property
    def device(self) -> torch.device: ...

    def met(self) -> None:
        """Called once, when all ranks are connected: see Team.connect."""

    def follow(self, message: object) -> None:
        """Carry out a message of the first rank. Raises RanksApart, and TypeError for an unknown message."""


class RankReader(Protocol):
    """Reads a rank's part of a model."""

    def __call__(self, folder: Path, options: LoadOptions, group: Group) -> PackedDecoder | Follower:
        """Read the part of the rank `group.rank`. Raises LoadError, or ValueError for misshapen weights."""


class DecoderFollower:
    """Implements `Follower` for a rank's part of a decoder of the engine. `_plan`, `_hidden`: plan and hidden rows of the last step."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder, self._spec = decoder, decoder.spec
        self._attention = choose_backend(decoder.spec).backend
        # The first messages replace these values before anything uses them.
        self._cache, self._plan, self._hidden = KVCache(decoder.spec, 1), cast(StepPlan, None), cast(Hidden, None)

    @property
    def device(self) -> torch.device:
        return self._spec.device

    def met(self) -> None:
        """Nothing to do: a decoder needs no second group."""

    def follow(self, message: object) -> None:
        """See Follower. Carries out all messages but ReadPart and Connect."""
        match message:
            case NewCache(pages, poison):
                del self._cache  # Two caches at once could be too large for the memory.
                self._cache = KVCache(self._spec, pages, poison=poison)
            case PagesChanged(new, freed):
                self._cache.follow(new, freed)
            case ComputeHidden(plan):
                self._plan = plan.to(self._spec.device)
                self._hidden = self._decoder.hidden(self._plan.rows, self._attention.bind(self._cache, self._spec, self._plan))
            case ComputeLogits():
                self._decoder.logits(last_rows(self._hidden.last, self._plan))
            case _:
                raise TypeError(f"no message for a rank: {message!r}")


def serve(channel: Connection, part: PackedDecoder | Follower, group: Distributed) -> None:
    """Report that the part is read, then carry out messages until the parent closes the channel. Raises RanksApart, and OSError if the
    parent reads no more."""
    follower = DecoderFollower(part) if isinstance(part, PackedDecoder) else part
    send([channel], PartRead())
    while True:
        try:
            message = receive(channel)
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, Connect):
            group.connect(message.store, follower.device)
            follower.met()
        else:
            follower.follow(message)


def main() -> None:
    """Run a rank. It ignores signals to end, because the parent receives them too, finishes its answers and then ends this process. If the
    parent is killed, the system kills this process, even a stopped one."""
    for stop_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop_signal, signal.SIG_IGN)
    descriptor, _ = read_start()
    channel = Connection(descriptor)
    try:
        run(channel)
    except Exception as error:
        if has_gone(channel):
            sys.exit(1)
        if isinstance(error, RanksApart):
            sys.exit(str(error))
        raise


def has_gone(channel: Connection) -> bool:
    """Whether the other end of the channel is closed, even if some of its messages were not read yet."""
    end = select.poll()
    end.register(channel.fileno(), 0)
    return bool(end.poll(0))  # With no events requested, poll reports only a hang-up or an error.


def run(channel: Connection) -> None:
    """Do the work of this rank, from the first message on. An error of reading the part is sent to the parent; other errors are raised."""
    request: ReadPart = receive(channel)
    torch.set_num_threads(request.options.threads)
    group = Distributed(request.rank, request.size)
    module, _, name = request.reader.partition(":")
    reader: RankReader = getattr(importlib.import_module(module), name)
    try:
        part = reader(request.folder, request.options, group)
    # Any error is sent to the parent, which logs it, because a server has one log.
    except Exception as error:
        send([channel], PartRead(f"{type(error).__name__}: {error}"))
        return
    with torch.inference_mode():
        serve(channel, part, group)
    group.close()


if __name__ == "__main__":
    main()
