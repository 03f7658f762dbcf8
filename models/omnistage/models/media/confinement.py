"""Confinement of the decoding process, and the errors that it leads to.

After `confine` the process may only compute and answer, and the kernel refuses everything else (for Linux on x86-64). The other
functions decide whether an error is a fault of the medium, or of the process and its machine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import struct
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

import av

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_CALL = 317
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_TSYNC = 1
"""The filter applies to all threads of the process, not only to the thread that calls."""

AUDIT_ARCH_X86_64 = 0xC000003E
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_ERRNO = 0x00050000
LOAD, JUMP_EQUAL, JUMP_ANY, RETURN = 0x20, 0x15, 0x45, 0x06
"""Codes of the kernel's packet filters: load 32 bits, compare with a constant, test for any bit of a constant, return a constant."""

Instruction = tuple[int, int, int, int]
"""The code, the numbers of instructions to skip if the test holds and if it does not, and the constant."""

REFUSED = errno.EACCES
"""The error of a refused call, which nothing else here raises. EPERM would not do: FFmpeg uses its number, 1, for many kinds of damage."""

ALLOW: Instruction = (RETURN, 0, 0, SECCOMP_RET_ALLOW)
REFUSE: Instruction = (RETURN, 0, 0, SECCOMP_RET_ERRNO | REFUSED)

CALLS = (
    *(0, 1, 3, 5, 7, 8, 17, 18, 19),  # read write close fstat poll lseek pread64 pwrite64 readv
    *(11, 12, 25),  # munmap brk mremap
    *(13, 14, 15, 131, 219, 60, 231),  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall exit exit_group
    47,  # recvmsg: receives the files. Only write sends anything, and write sends no descriptor
    *(24, 204, 309),  # sched_yield sched_getaffinity getcpu
    *(35, 230, 228, 96, 201),  # nanosleep clock_nanosleep clock_gettime gettimeofday time
    *(39, 186, 98, 99, 318),  # getpid gettid getrusage sysinfo getrandom
)
"""Calls that decoding needs for every medium. None of them opens or names a file, begins a process or a thread, or sends a signal; each
acts on this process and on the descriptors that it has got."""


@dataclass(frozen=True, slots=True)
class Only:
    """A call that is allowed only if one argument has none of the bits `without`, or is one of `values`. argument: its number, from 0. The
    kernel reads all of these arguments as 32 bits, or tests only bits among the lower 32."""

    call: int
    argument: int
    without: int = 0
    values: tuple[int, ...] = ()


_WAIT_AND_WAKE = tuple(one | flags for one in (0, 1, 9, 10) for flags in (0, 128, 256, 128 | 256))
"""Operations of futex, with and without a set of bits; flags: for one process, by the clock of the day."""

LIMITED = (
    # New memory must not run as code, and must not be shared: shared memory is not freed with its addresses, so it would escape the limit
    # of addresses; and a result that is mapped for writing cannot be sealed.
    Only(9, 2, without=mmap.PROT_EXEC),  # mmap
    Only(9, 3, without=mmap.MAP_SHARED),
    Only(10, 2, without=mmap.PROT_EXEC),  # mprotect
    Only(28, 2, values=(mmap.MADV_DONTNEED, mmap.MADV_FREE, mmap.MADV_HUGEPAGE)),  # madvise: root can break memory with it
    Only(38, 0, values=(signal.ITIMER_PROF,)),  # setitimer
    Only(202, 1, values=_WAIT_AND_WAKE),  # futex: operations for locks of one process, none that had security holes
)
"""Calls of which decoding needs only a part. fcntl and ioctl are not among them: both send signals to any process of the user."""


def confine() -> bool:
    """Allow only CALLS and LIMITED from here on, for all threads, as long as the process lives. Every other call fails with REFUSED.
    Returns False if the kernel has no such filters. Raises RuntimeError if one thread cannot be confined."""
    code = _filter()
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None)
    libc.syscall.argtypes = [ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p]
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
    result = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        SECCOMP_CALL, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, program
    )
    if result > 0:  # The number of a thread, by SECCOMP_FILTER_FLAG_TSYNC.
        raise RuntimeError(f"thread {result} of this process cannot be confined as the others are")
    return bool(result == 0)


def _filter() -> list[Instruction]:
    """The instructions that the kernel runs before every call, to allow or refuse it. They refuse x32 calls, which have other numbers."""
    code = [
        (LOAD, 0, 0, 4),  # the architecture of the call: numbers of other architectures mean other calls
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        REFUSE,
        (LOAD, 0, 0, 0),  # the number of the call
    ]
    for call in CALLS:
        code += [(JUMP_EQUAL, 0, 1, call), ALLOW]
    for call in dict.fromkeys(limit.call for limit in LIMITED):
        checks = [instruction for limit in LIMITED if limit.call == call for instruction in _check_argument(limit)]
        code += [(JUMP_EQUAL, 0, len(checks) + 1, call), *checks, ALLOW]  # Any other call skips the checks and ALLOW.
    return [*code, REFUSE]


def _check_argument(limit: Only) -> list[Instruction]:
    """The instructions that check one argument of a call: they refuse the call, or the kernel runs the next instructions."""
    load = (LOAD, 0, 0, 16 + 8 * limit.argument)  # the lower half, which this machine stores first
    if limit.without:
        return [load, (JUMP_ANY, 0, 1, limit.without), REFUSE]
    skip_counts = range(len(limit.values), 0, -1)  # An equal value skips the comparisons after it and REFUSE.
    return [load, *((JUMP_EQUAL, skipped, 0, value) for skipped, value in zip(skip_counts, limit.values, strict=True)), REFUSE]


SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors of the machine: the same medium may go through later."""

OF_SYSTEM = (errno.EPERM, errno.ENOSYS, errno.EFBIG, errno.EROFS)
"""Errors that count only from calls of the system: FFmpeg uses the same numbers for contents of a file."""

MAX_ERROR_CHARACTERS = 1000
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


def damage_text(error: BaseException) -> str:
    """The text of a library about damaged bytes. Some decoders of FFmpeg return -1, whose text, "not permitted", would mislead."""
    if isinstance(error, av.error.FFmpegError) and error.errno == errno.EPERM:
        return "a decoder makes no sense of it"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """The error, and the calls that led to it, the last call first."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    calls = (f"{frame.f_code.co_name} ({PurePath(frame.f_code.co_filename).name}:{line})" for frame, line in frames)
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}, in {' < '.join(calls)}"[:MAX_ERROR_CHARACTERS]


def _of_system(error: BaseException) -> int | None:
    """The errno of an error of the system; None for other errors, and for FFmpeg's."""
    return error.errno if isinstance(error, OSError) and not isinstance(error, av.error.FFmpegError) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors that led to it. A library may hide the cause behind an error of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
