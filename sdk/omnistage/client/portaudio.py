"""A program that plays its standard input with the package sounddevice. It is a process of its own, so that threads, messages and crashes
of PortAudio do not disturb the client. The client runs it by its path, as `portaudio.py RATE CHANNELS`. It imports nothing of omnistage, so
that it begins at once.

Its standard input is float32 in the byte order of this machine. It ends with code 0 when all of it was heard."""

from __future__ import annotations

import os
import sys

LATENCY_S = 0.2
"""Seconds of sound that PortAudio keeps ready: with less, it runs dry on a busy machine."""

READ_BYTES = 1 << 13


def main(sample_rate_hz: int, channels: int) -> None:
    """Play standard input to its end. Raises ImportError and OSError if sounddevice or PortAudio is missing, PortAudioError if no device
    plays at this rate with these channels."""
    import sounddevice

    frame = 4 * channels
    with sounddevice.RawOutputStream(samplerate=sample_rate_hz, channels=channels, dtype="float32", latency=LATENCY_S) as stream:
        rest = b""
        while piece := os.read(sys.stdin.fileno(), READ_BYTES):
            piece = rest + piece
            whole_bytes = len(piece) - len(piece) % frame
            stream.write(piece[:whole_bytes])
            rest = piece[whole_bytes:]
        # The end of the `with` waits until the sound is heard.


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
