"""The allocator settings, in a process of their own: they cannot be undone."""

import subprocess
import sys

SCRIPT = """
import ctypes
import platform
import sys
from omnistage.host.memory import tune_malloc

glibc = platform.libc_ver()[0] == "glibc"
assert tune_malloc() is glibc
assert tune_malloc() is glibc
assert "grpc" not in sys.modules and "torch" not in sys.modules
if glibc:
    class Info(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Info
    library.malloc.restype = ctypes.c_void_p
    before = library.mallinfo2().hblks
    blocks = [library.malloc(ctypes.c_size_t(1 << 20)) for _ in range(8)]
    assert library.mallinfo2().hblks == before, "a block of 1 MiB still gets a mapping of its own"
"""


def test_blocks_of_1_mib_come_from_the_heap() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
