"""Decides whether an error is a fault of the medium, or of the decoding process and its machine. Runs in the decoding process."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from pathlib import PurePath

import av

from omnistage.models.media.confinement import REFUSED

SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors of the machine: the same medium may go through later."""

OF_SYSTEM = (errno.EPERM, errno.ENOSYS, errno.EFBIG, errno.EROFS)
"""Errors that count only from calls of the system: FFmpeg uses the same numbers for contents of a file."""

MOST_TOLD = 1000
"""How many characters of the text of `describe_error` are kept."""


def is_memory(error: BaseException) -> bool:
    """Whether the error means that memory is short. Pillow says so only in its text."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or "out of memory" in str(error)


def is_shortage(error: BaseException) -> bool:
    """Whether the error means that the machine is short of something other than memory."""
    return any(_of_system(one) in SHORTAGES for one in _chain(error))


def is_refusal(error: BaseException) -> bool:
    """Whether this process lacks something that the medium needs: a refused call, or a module that it could not load."""
    return any(
        isinstance(one, ImportError)
        or getattr(one, "errno", None) == REFUSED
        or _of_system(one) in OF_SYSTEM
        or os.strerror(REFUSED) in str(one)
        for one in _chain(error)
    )


def words(error: BaseException) -> str:
    """The text of a library about damaged bytes. Some decoders of FFmpeg return -1, whose text, "not permitted", would mislead."""
    if isinstance(error, av.error.FFmpegError) and error.errno == errno.EPERM:
        return "a decoder makes no sense of it"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """The error, and the calls that led to it, the last call first."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    calls = (f"{frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{line})" for frame, line in frames)
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}, in {' < '.join(calls)}"[:MOST_TOLD]


def _of_system(error: BaseException) -> int | None:
    """The errno of an error of the system; None for other errors, and for FFmpeg's."""
    return error.errno if isinstance(error, OSError) and not isinstance(error, av.error.FFmpegError) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors that led to it. A library may hide the cause behind an error of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
