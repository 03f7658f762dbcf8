"""The settings of memory, each in a process of its own: they cannot be undone."""

import subprocess
import sys

import pytest

from helpers.pages import has_huge_pages

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


HUGE = """
import ctypes
import mmap
import sys
from omnistage.host.memory import use_huge_pages

PR_SET_THP_DISABLE = 41
MIB = 1 << 20

def held() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))

if sys.argv[1] == "none":
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
used = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE)
for page in range(0, 64 * MIB, mmap.PAGESIZE):
    used[page : page + 2] = (page // mmap.PAGESIZE % 65536).to_bytes(2, "little")
hardly = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
hardly[4 * MIB] = 1
before = held()
said = use_huge_pages()
assert all(used[page : page + 2] == (page // mmap.PAGESIZE % 65536).to_bytes(2, "little") for page in range(0, 64 * MIB, mmap.PAGESIZE))
assert hardly[4 * MIB] == 1
print(before, said, held())
"""


def huge_pages(machine: str) -> tuple[int, int, int]:
    """Bytes in huge pages before and after, and what was said of them, in a process that has touched 64 MiB. machine: with or none."""
    done = subprocess.run([sys.executable, "-c", HUGE, machine], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, said, after = map(int, done.stdout.split())
    return before, said, after


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel has no huge pages that can be asked for")
def test_what_is_in_memory_is_held_in_huge_pages() -> None:
    before, said, after = huge_pages("with")
    assert before == 0
    assert said >= 56 << 20
    assert after >= 56 << 20


def test_without_huge_pages_all_is_as_before() -> None:
    assert huge_pages("none") == (0, 0, 0)
