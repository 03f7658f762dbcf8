"""A rank that follows: `python -m omnistage.models.common.rank DESCRIPTOR PARENT`.

It loads its part of a decoder, meets the others, and then does what the first rank tells it, in that order. It ends when its parent does,
when that closes the socket, or by any error: the parent then ends as well, and whoever watches that starts both anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, cast

import torch

from omnistage.engine.adapter import Hidden
from omnistage.engine.attention import chosen
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.group import Distributed, Group, RanksApart
from omnistage.engine.kv import KVCache
from omnistage.engine.plan import Plan, last_rows
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
from omnistage.models.options import LoadOptions

PR_SET_PDEATHSIG = 1


class Reader(Protocol):
    """Reads the part of a rank of a decoder."""

    def __call__(self, folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
        """Raises LoadError, or ValueError for ill-shaped weights."""


def serve(channel: Connection, decoder: PackedDecoder, group: Distributed) -> None:
    """Until nobody tells anything any more. Raises RanksApart."""
    attention = chosen(decoder.spec).backend
    cache, plan, hidden = KVCache(decoder.spec, 1), cast(Plan, None), cast(Hidden, None)
    send([channel], PartRead())
    while True:
        try:
            message = receive(channel)
        except (EOFError, ConnectionResetError):
            return
        match message:
            case Connect(store):
                group.connect(store, decoder.spec.device)
            case NewCache(pages, poison):
                del cache  # Two would be too much for memory.
                cache = KVCache(decoder.spec, pages, poison=poison)
            case PagesChanged(taken, freed):
                cache.follow(taken, freed)
            case ComputeHidden(told):
                plan = told.to(decoder.spec.device)
                hidden = decoder.hidden(plan.rows, attention.bind(cache, decoder.spec, plan))
            case ComputeLogits():
                decoder.logits(last_rows(hidden.last, plan))
            case _:
                raise TypeError(f"no message for a rank: {message!r}")


def main() -> None:
    """Who is told to end is the parent, which lets its answers finish and ends this; whoever tells all processes of a server means that.
    Where the parent is killed the system kills this, stopped or not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    channel = Connection(descriptor)
    try:
        asked: ReadPart = receive(channel)
    except EOFError:  # The parent has given up already.
        return
    torch.set_num_threads(asked.options.threads)
    group = Distributed(asked.rank, asked.size)
    module, _, name = asked.reader.partition(":")
    reader: Reader = getattr(importlib.import_module(module), name)
    try:
        decoder = reader(asked.folder, asked.options, group)
    except Exception as error:  # Whatever it is, the parent says it: a server has one log.
        with contextlib.suppress(BrokenPipeError):  # It may have given up by itself, for the same reason.
            send([channel], PartRead(f"{type(error).__name__}: {error}"))
        return
    with torch.inference_mode():
        try:
            serve(channel, decoder, group)
        except RanksApart as error:
            sys.exit(str(error))
    group.close()


if __name__ == "__main__":
    main()
