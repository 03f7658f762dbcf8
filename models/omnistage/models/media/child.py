"""The process that decodes: `python -m omnistage.models.media.child DESCRIPTOR PARENT LIMITS`.

One medium after another comes on a socket of packets: what is asked as JSON, and the file as a descriptor. It says that it has taken it,
then decodes it. The answer is JSON, and what was made as a descriptor of sealed memory. It ends when its parent does, when that closes the
socket, or when memory is short.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import warnings
from dataclasses import asdict
from typing import Any, BinaryIO

from PIL import AvifImagePlugin, Image

from omnistage.models.media import films, pictures, sounds
from omnistage.models.media.confinement import confine
from omnistage.models.media.errors import BadMedia, NoRoom, UnknownFormat
from omnistage.models.media.formats import advice
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.output import Output
from omnistage.models.media.preprocessing import FilmPreprocessing, PicturePreprocessing, SoundPreprocessing
from omnistage.models.media.wholeness import check_whole

PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY = errno.ENOMEM
"""Status with which it ends when memory is short."""

MESSAGE_BYTES = 1 << 16
READY = b"ready"
TAKEN = b"taken"
"""Whatever happens from here on is the medium's doing."""

FILES = 32
"""Descriptors that it may have."""

GRACE_S = 5.0
"""Of processor time beyond the time on the clock, after which the system ends the process if its parent has not."""


def serve(channel: socket.socket, limits: MediaLimits) -> None:
    """Until the parent has gone, or memory is short."""
    channel.sendmsg([READY])
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        channel.sendmsg([TAKEN])
        request = json.loads(message)
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"] + GRACE_S)
        with os.fdopen(descriptors[0], "rb") as file, Output(limits.result_bytes) as output:
            answer = _answer(request, file, output, limits)
            socket.send_fds(channel, [json.dumps(answer).encode()], [output.fd])


def _answer(request: dict[str, Any], file: BinaryIO, output: Output, limits: MediaLimits) -> dict[str, Any]:
    """What was made, or why it was not."""
    try:
        try:
            check_whole(file, limits.of(request["kind"])[0])
            made = _made(request["kind"], request["ask"], file, output, limits)
        except UnknownFormat as error:
            return {"bad": advice(file, limits) or str(error)}
        output.seal()
        return made
    except NoRoom as error:
        return {"no_room": str(error)}
    except BadMedia as error:
        return {"bad": str(error)}
    except Exception as error:  # whatever a decoder makes of damaged bytes; a mistake of ours would be no better for the caller
        if _is_memory(error):
            os._exit(OUT_OF_MEMORY)  # what a library held when it failed is gone with the process
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return {"bad": f"it is damaged ({said}): send all of it, or encode it anew"}


def _made(kind: str, ask: dict[str, Any], file: BinaryIO, output: Output, limits: MediaLimits) -> dict[str, Any]:
    if kind == "image":
        pixels = pictures.decoded(file, PicturePreprocessing(**ask), limits)
        output.put(pixels)
        return {"shape": pixels.shape}
    if kind == "audio":
        samples = sounds.decoded(file, SoundPreprocessing(**ask), limits)
        output.put(samples)
        return {"samples": len(samples)}
    return asdict(films.decode(file, FilmPreprocessing(**ask), limits, output))


def _is_memory(error: Exception) -> bool:
    """Pillow says it in words only."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or "out of memory" in str(error)


def main() -> None:
    """All that is needed is loaded, then the limits close behind it. What libraries print would be a stranger's words in our log."""
    descriptor, parent, words = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)
    limits = MediaLimits(**json.loads(words))
    warnings.simplefilter("ignore")
    Image.init()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.result_bytes, limits.result_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    os.dup2(0, 2)
    with socket.socket(fileno=int(descriptor)) as channel:
        confine()
        serve(channel, limits)


if __name__ == "__main__":
    main()
