"""The start of a server process, before its other imports and after its loading: an import of structlog without rich, what the C library
keeps of memory, how large the kernel's pages are, and which objects the garbage collector looks at.

This module is imported before everything else, so it imports the standard library alone."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MADV_COLLAPSE = 25
"""Since Linux 6.1; Python has no name for it."""

_MIB = 1 << 20
_BLOCK = 2 * _MIB
"""A huge page of x86-64 and of ARM with pages of 4 KiB."""
_LARGE = 16 * _MIB
"""A mapping of at least this size holds weights, a cache of keys and values, or malloc's memory; a thread's stack has 8 MiB."""


def tune_malloc(max_arenas: int = 0) -> bool:
    """Let glibc keep freed memory instead of giving it back to the kernel; call once, before grpc is imported.

    By default glibc maps every block above 128 KiB afresh and unmaps it when freed, so each gRPC message of that size pays for page faults:
    messages of 1 MiB pass 2.7 to 6.5 times faster with these settings. The price is resident memory: up to the trim threshold (128 MiB) of
    freed memory stays with the process. Numbers and names of the parameters: mallopt(3).

    max_arenas: largest number of heaps for all threads together; 0: eight for each core. With these settings each heap maps 64 MiB from its
    start. On a machine of many cores that is a lot for a process whose mappings are limited.

    Returns True if glibc accepted all settings, False if it refused one or the C library is not glibc.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = [(_M_MMAP_THRESHOLD, 32 * _MIB), (_M_TRIM_THRESHOLD, 128 * _MIB), (_M_TOP_PAD, 64 * _MIB)]
    if max_arenas:
        settings.append((_M_ARENA_MAX, max_arenas))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)


def put_off_collection() -> None:
    """Let the garbage collector rest while a server imports and loads. Call this first, and `collect_from_now_on` after loading.

    Nearly all objects that a start makes stay as long as the process. If the collector walked through them again and again, as they become
    more, that would take a sixth of the start.
    """
    gc.disable()


def collect_from_now_on() -> None:
    """Collect the garbage of loading, then let the garbage collector work on new objects only.

    Otherwise a full collection in the middle of an answer would stop all threads while it walks through everything that torch has imported;
    so would the last collection, at the end of the process.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def use_huge_pages() -> int:
    """Move present memory, and large mappings from now on, into huge pages if the kernel has some. Call it after loading.

    The kernel frees the memory of a killed process before it closes its sockets, and each page costs it time: a Thinker of 600 MB in pages
    of 4 KiB was gone 50 ms after the signal, in huge pages after 7 ms. Matrix products also miss the TLB less often. Memory that loading
    has freed is given back first. Only private memory without a file is moved, in blocks of 2 MiB, and only a block with at least half of
    its pages in memory: a block that is hardly used would become a whole page of 2 MiB.

    Returns the number of bytes that are then in huge pages; 0 if the kernel or the C library has no huge pages, and then nothing is lost.
    Takes up to a second for a GB.
    """
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("malloc_trim", "madvise", "mincore")):
        return 0
    library.malloc_trim(ctypes.c_size_t(0))
    collapsed = 0
    for begin, end in _private_mappings():
        if end - begin >= _LARGE:
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
        for block in _used_blocks(library, begin, end):
            collapsed += library.madvise(ctypes.c_void_p(block), ctypes.c_size_t(_BLOCK), _MADV_COLLAPSE) == 0
    return collapsed * _BLOCK


def _private_mappings() -> Iterator[tuple[int, int]]:
    """First and end address of the private writable mappings without a file, proc(5), without the main thread's stack."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name != ["[stack]"]:
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)


def _used_blocks(library: ctypes.CDLL, begin: int, end: int) -> Iterator[int]:
    """Yield the address of each whole block of a mapping that has at least half of its pages in memory, by mincore(2). begin, end: of the
    mapping."""
    pages = _BLOCK // mmap.PAGESIZE
    present = (ctypes.c_ubyte * pages)()
    # From the first boundary of a block within the mapping to the last whole block.
    for block in range(-(-begin // _BLOCK) * _BLOCK, end - _BLOCK + 1, _BLOCK):
        if library.mincore(ctypes.c_void_p(block), ctypes.c_size_t(_BLOCK), present) == 0 and 2 * sum(present) >= pages:
            yield block


def import_structlog() -> None:
    """Import structlog without rich. Code that needs rich can import it afterwards. Ends the process with a message if structlog is not
    installed."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # None makes an import of rich fail.
    try:
        import_module("structlog")
    except ModuleNotFoundError as error:
        if error.name != "structlog":
            raise
        sys.exit(
            "error: servers need packages that are not installed: `make wheels` in a clone, then "
            "pip install --find-links dist 'omnistage[server]', for stages 'omnistage[models]'"
        )
    finally:
        del sys.modules["rich"]
