"""Notes between the launcher of a stack and the router that it has started: JSON objects, each a packet of a socket of these two."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_NOTE_BYTES = 1 << 18
"""The most bytes of a note. One of the launcher names all addresses of the stack."""

Note = dict[str, Any]


class NoteSocket:
    """One end of the socket, used on the running event loop. No call waits: a note for which the socket has no room is sent later, and a
    newer one about the same subject then replaces it."""

    def __init__(self, connection: socket.socket, take: Callable[[Note], object], end: Callable[[], object] = lambda: None) -> None:
        """connection: of the kind SOCK_SEQPACKET; this object closes it. take: called with each note. end: called once, when the other
        process has ended."""
        self._connection = connection
        self._take = take
        self._end = end
        self._unsent: dict[str, bytes] = {}  # by subject
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def send(self, subject: str, note: Note) -> None:
        """Send a note. subject: the thing that it is about."""
        if self._connection.fileno() >= 0:
            self._unsent.pop(subject, None)  # The newer note goes after the others that wait.
            self._unsent[subject] = json.dumps(note).encode()
            self._write()

    def close(self) -> None:
        """Close the socket; further calls do nothing."""
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()

    def _write(self) -> None:
        """Send the notes that wait, as many as the socket has room for."""
        try:
            while self._unsent:
                subject = next(iter(self._unsent))
                self._connection.send(self._unsent[subject])
                del self._unsent[subject]
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._write)
            return
        except OSError:  # The other process has ended, which `_read` notices.
            self._unsent.clear()
        self._loop.remove_writer(self._connection)

    def _read(self) -> None:
        """Take the next note, or notice the end of the other process."""
        packet = b""
        with suppress(ConnectionResetError):  # It ended without reading all notes.
            try:
                packet = self._connection.recv(MAX_NOTE_BYTES)
            except BlockingIOError:
                return
        if packet:
            self._take(json.loads(packet))
        else:
            self.close()
            self._end()
