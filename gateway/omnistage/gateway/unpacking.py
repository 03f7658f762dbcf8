"""Unpacks the bodies of requests that clients send with Content-Encoding: gzip or deflate."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from omnistage.gateway.failure import ApiError

WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's window of each coding (RFC 9110, section 8.4.1); deflate is the zlib format there, RFC 1950."""

PIECE_BYTES = 256 << 10
"""The most bytes that are unpacked at once: a client may send few bytes that become many."""


class Unpacker:
    """Unpacks one body, piece by piece. coding: the header Content-Encoding; empty or identity: the pieces stay as they are."""

    def __init__(self, coding: str) -> None:
        """Raises ApiError 415 for an unknown coding, or for several."""
        self._coding = coding.strip().lower()
        self.is_packed = self._coding not in ("", "identity")
        if self.is_packed and self._coding not in WINDOWS:
            text = f"the body is packed as {self._coding[:64]}, which is not unpacked here"
            hint = "Send it as it is, or packed once, with gzip or deflate."
            raise ApiError(415, text, code="unsupported_encoding", hint=hint, headers={"Accept-Encoding": "gzip, deflate"})
        self._inflater = self._new_inflater()

    def unpack(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes of the body hold, in pieces of at most `PIECE_BYTES`. Raises ApiError for bytes that are not packed."""
        if not self.is_packed:
            yield data
            return
        while data:
            if self._inflater.eof:  # gzip may be several parts, one behind the other.
                self._inflater = self._new_inflater()
            piece = self._inflate(data)
            yield piece
            while len(piece) == PIECE_BYTES and not self._inflater.unconsumed_tail and not self._inflater.eof:
                piece = self._inflate(b"")  # All bytes are read, and some of what they hold is left.
                yield piece
            data = self._inflater.unused_data or self._inflater.unconsumed_tail

    def check_end(self) -> None:
        """Raises ApiError if the body has ended in the middle of what was packed."""
        if self.is_packed and not self._inflater.eof:
            raise self._misfit("ends too early")

    def _new_inflater(self) -> zlib._Decompress:
        return zlib.decompressobj(WINDOWS.get(self._coding, 15))

    def _inflate(self, data: bytes) -> bytes:
        try:
            return self._inflater.decompress(data, PIECE_BYTES)
        except zlib.error:
            raise self._misfit("is not packed as Content-Encoding says") from None

    def _misfit(self, fault: str) -> ApiError:
        hint = "Send the packed bytes whole, or leave out Content-Encoding."
        return ApiError(400, f"the body {fault}: {self._coding}", code="invalid_body", hint=hint)
