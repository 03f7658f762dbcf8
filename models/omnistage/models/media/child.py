"""The process that decodes: `python -m omnistage.models.media.child DESCRIPTOR PARENT LIMITS`.

It gets one medium after another on a socket of packets: the request as JSON, with descriptors of the file and of an empty file for the
result. It says that it has taken the medium, decodes it, and answers in JSON; for a file of another kind, with advice. It ends when its
parent ends or closes the socket, when memory is short, or when a medium takes more processor time than a medium of its size may take."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import pkgutil
import resource
import signal
import socket
import warnings
from dataclasses import asdict
from typing import Any, BinaryIO

import av
from PIL import AvifImagePlugin, Image, ImageCms

from omnistage.host.child import PIECE_BYTES, read_start
from omnistage.models.media import containers, films, pictures, sounds
from omnistage.models.media.confinement import confine, damage_text, describe_error, is_memory, is_refusal, is_shortage
from omnistage.models.media.hidden_work import read_few_notes
from omnistage.models.media.results import BoundedFile
from omnistage.models.media.terms import (
    BadMedia,
    FilmPreprocessing,
    MediaLimits,
    NoRoom,
    PicturePreprocessing,
    SoundPreprocessing,
    UnknownFormat,
)

OUT_OF_MEMORY = errno.ENOMEM
"""The exit status of the process if memory is short."""

READY, UNCONFINED = b"ready", b"unconfined"
"""The words by which the process says that it can take a medium: UNCONFINED if the kernel has no filter of calls, else READY."""

RECEIPT = b"taken"
"""The word by which the process says that it has taken a medium. For faults after it, the medium is to blame."""

FILES = 32
"""How many descriptors the process may have open."""

GRACE_S = 5.0
"""Seconds of processor time beyond the time limit of a medium, for kinds of media that have no own limit of processor time."""

HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
AVIF_BRANDS = (b"avif", b"avis")


def serve(channel: socket.socket, limits: MediaLimits, *, confined: bool) -> None:
    """Decode the media that come on `channel`, until the parent closes it. confined: whether `confine` succeeded, which is reported."""
    os.write(channel.fileno(), READY if confined else UNCONFINED)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, PIECE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        os.write(channel.fileno(), RECEIPT)
        request = json.loads(message)
        _allow(request["limit_s"] + GRACE_S)
        with os.fdopen(descriptors[0], "rb") as file, os.fdopen(descriptors[1], "wb") as result:
            reply = answer(request, file, BoundedFile(result.fileno(), limits.result_bytes), limits)
            os.write(channel.fileno(), json.dumps(reply).encode())


def answer(request: dict[str, Any], file: BinaryIO, output: BoundedFile, limits: MediaLimits) -> dict[str, Any]:
    """Decode the medium in `file` into `output`. Returns the reply to the parent: the shape or lengths of the result, or the text of an
    error by its kind: bad or no_room (the medium), short (the machine), broken (a refused call). Ends the process if memory is short."""
    try:
        try:
            containers.check_whole(file, limits.of(request["kind"])[0])
            return _decode(request["kind"], request["ask"], file, output, limits)
        except UnknownFormat as error:
            return {"bad": advice(file, limits) or str(error)}
    except NoRoom as error:
        return {"no_room": str(error)}
    except BadMedia as error:
        return {"bad": str(error)}
    except Exception as error:  # a decoder may raise anything for damaged bytes, so unknown errors count as damage
        if is_memory(error):
            os._exit(OUT_OF_MEMORY)  # only the end of the process frees the memory that a failed library holds
        if is_shortage(error):
            return {"short": describe_error(error)}
        if is_refusal(error):
            return {"broken": describe_error(error)}
        return {"bad": f"it is damaged ({damage_text(error)}): send all of it, or encode it anew"}


def _decode(kind: str, ask: dict[str, Any], file: BinaryIO, output: BoundedFile, limits: MediaLimits) -> dict[str, Any]:
    """Decode a medium into `output`, and limit its processor time. ask: fields of its preprocessing. Returns the reply of `answer`."""
    size = file.seek(0, io.SEEK_END)
    if kind == "image":
        _allow(limits.picture_least_s)
        image = pictures.open_checked(file, limits)
        with image:
            _allow(limits.picture_cpu_s(size, image.width * image.height))
            pixels = pictures.decode(file, image, PicturePreprocessing(**ask))
        output.put(pixels)
        return {"shape": pixels.shape}
    if kind == "audio":
        _allow(limits.sound_cpu_s(size))
        samples = sounds.decode(file, SoundPreprocessing(**ask), limits)
        output.put(samples)
        return {"samples": len(samples)}
    return asdict(films.decode(file, FilmPreprocessing(**ask), limits, output))


def _allow(seconds: float) -> None:
    """Allow `seconds` of processor time from now on. After it the system ends the process, even on a busy machine or without its parent."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def advice(file: BinaryIO, limits: MediaLimits) -> str | None:
    """The format of a file that was sent as another kind, and how to send it; None if its format is not found."""
    file.seek(0)
    head = file.read(12)
    if head[4:8] == b"ftyp" and head[8:] in HEIF_BRANDS:
        return "it is a picture in HEIF, which is not known here: convert it to JPEG"
    is_avif = head[4:8] == b"ftyp" and head[8:] in AVIF_BRANDS
    if (picture := pictures.open_picture(file)) is not None:
        with picture:
            return f"it is a picture ({picture.format}): send it as image/*"
    if is_avif:
        return "it is a picture in AVIF that is damaged: send all of it, or encode it anew"
    if (container := containers.open_container(file, limits)) is not None:
        with container:
            if containers.video_stream(container) is not None:
                return f"it is a film ({container.format.name}): send it as video/*"
            return f"it is a sound ({container.format.name}): send it as audio/*"
    return None


def load() -> None:
    """Load what libraries load when they first need it: the confined process cannot load it, and the medium would be blamed."""
    Image.init()
    read_few_notes()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    ImageCms.createProfile("LAB")
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if module.name != "av.__main__":
            importlib.import_module(module.name)


def main() -> None:
    """Load all code, limit and confine this process, then serve. Standard error is dropped: libraries print a stranger's words there."""
    descriptor, (limits_text,) = read_start()
    limits = MediaLimits(**json.loads(limits_text))
    warnings.simplefilter("ignore")
    load()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.result_bytes, limits.result_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    os.dup2(0, 2)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, limits, confined=confine())


if __name__ == "__main__":
    main()
