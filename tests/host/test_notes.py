"""Notes between a launcher and its router."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from omnistage.host.notes import Note, NoteSocket

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


async def test_each_note_comes_whole_and_in_order(pair: Pair) -> None:
    received: asyncio.Queue[Note] = asyncio.Queue(100)
    one, other = NoteSocket(pair[0], received.put_nowait), NoteSocket(pair[1], received.put_nowait)
    notes = [{"kept": ["127.0.0.1:1"] * count} for count in (0, 1, 10_000)]
    for number, note in enumerate(notes):
        one.send(str(number), note)
    assert [await received.get() for _ in notes] == notes
    one.close()
    other.close()


async def test_a_newer_note_takes_the_place_of_one_that_the_other_process_has_no_room_for(pair: Pair) -> None:
    """So a process that was stopped makes no queue grow. When it wakes, it reads the state of that moment."""
    one = NoteSocket(pair[0], lambda note: None)
    for number in range(1000):
        one.send("kept", {"kept": ["x" * 10_000], "number": number})
        one.send("other", {"number": number})
    received: asyncio.Queue[Note] = asyncio.Queue(4000)
    other = NoteSocket(pair[1], received.put_nowait)
    notes = [await received.get()]
    while notes[-1] != {"number": 999}:
        notes.append(await received.get())
    assert len(notes) < 500 and [note["number"] for note in notes if "kept" in note][-1] == 999
    one.close()
    other.close()


@pytest.mark.parametrize("has_unread", [False, True])
async def test_the_end_of_the_other_process_is_noticed_once(pair: Pair, has_unread: bool) -> None:
    ends: asyncio.Queue[None] = asyncio.Queue(2)
    one = NoteSocket(pair[0], lambda note: None, lambda: ends.put_nowait(None))
    if has_unread:
        one.send("kept", {"kept": []})
    pair[1].close()
    await ends.get()
    one.send("kept", {"kept": []})
    one.close()
    await asyncio.sleep(0.1)
    assert ends.empty()
