"""The memory of a server, and its parts that may fail for any lack of the machine: it goes on, and tries again if that makes sense."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helpers.memory import has_huge_pages
from helpers.poor import ERRORS, SPARE
from helpers.servers import ServerProcess, stage_flags, stage_stub
from helpers.waiting import until
from omnistage.host.background import is_spare, start_spare, starting_spare
from omnistage.v1 import stage_pb2

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


def events(server: ServerProcess) -> list[dict[str, Any]]:
    """The lines that a server has logged so far; another one may be under way."""
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{") and line.endswith("}")]


def visit(server: ServerProcess) -> str:
    """The metrics of a server; empty if no answer comes."""
    try:
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as page:
            return str(page.read().decode())
    except OSError:
        return ""


async def serves(server: ServerProcess) -> None:
    async with stage_stub(server.address) as stub:
        described = await stub.Describe(stage_pb2.DescribeRequest(), timeout=30, wait_for_ready=True)
    assert described.kind == stage_pb2.STAGE_KIND_CODE2WAV


@pytest.mark.parametrize("error", ERRORS)
async def test_a_server_goes_on_when_everything_fails_that_it_can_do_without(error: str, tmp_path: Path):
    """Each part fails once: its thread or task may end by that or try again, and the process neither ends nor hangs."""
    words = ("omnistage.code2wav", "0", error, *stage_flags())
    with ServerProcess("helpers.poor", *words, log_folder=tmp_path, environment=ENVIRONMENT) as server:
        server.wait_ready()
        assert visit(server) == ""
        await until(lambda: {told["what"] for told in events(server) if told["event"] == "failed"} == set(SPARE))
        await until(lambda: {"thread.failed", "task.failed", "watchdog.sees_nothing"} <= {told["event"] for told in events(server)})
        await serves(server)
        assert "omnistage_stage_inflight" in visit(server)
        server.terminate()
        assert server.wait() == 0 and "server.stopped" in {told["event"] for told in events(server)}


async def test_a_server_without_a_descriptor_when_its_memory_is_settled_lives_and_serves(tmp_path: Path):
    """As if visitors held all descriptors: five seconds after the server began to serve, it reads a file about its own memory."""
    with ServerProcess("omnistage.code2wav", *stage_flags(), log_folder=tmp_path) as server:
        server.wait_ready()
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        await until(lambda: not server.alive or "omnistage-settle" in {told.get("thread") for told in events(server)})
        assert server.alive
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        await serves(server)


def test_a_thread_that_cannot_be_started_is_none(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert start_spare("comfort", lambda: None).ident is None


def test_what_fails_is_tried_again_until_it_is_done():
    done = threading.Event()
    tries: list[None] = []

    def work() -> None:
        tries.append(None)
        if len(tries) < 3:
            raise MemoryError
        done.set()

    thread = start_spare("comfort", work, again_s=0.001)
    assert done.wait(30) and is_spare(thread)
    thread.join(30)
    assert len(tries) == 3 and not thread.is_alive()


def test_threads_of_a_library_are_as_spare_as_its_own():
    over = threading.Event()
    with starting_spare():
        inside = threading.Thread(target=over.wait)
        inside.start()
    after = threading.Thread(target=over.wait)
    after.start()
    over.set()
    assert is_spare(inside) and not is_spare(after) and not is_spare(threading.main_thread()) and not is_spare(None)
    inside.join()
    after.join()


SCRIPT = """
import ctypes
import platform
import sys
from omnistage.host.startup import tune_malloc

glibc = platform.libc_ver()[0] == "glibc"
assert tune_malloc() is glibc
assert tune_malloc(max_arenas=16) is glibc
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


def output(code: str, *words: str) -> str:
    """The output of a process, which must end well."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_blocks_of_1_mib_come_from_the_heap() -> None:
    output(SCRIPT)


HUGE = """
import ctypes
import mmap
import sys
from omnistage.host.startup import use_huge_pages

PR_SET_THP_DISABLE = 41
MADV_COLLAPSE = 25
MIB = 1 << 20

def held() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))

library = ctypes.CDLL(None)
if sys.argv[1] == "none":
    assert library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
used = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE)
for page in range(0, 64 * MIB, mmap.PAGESIZE):
    used[page : page + 2] = (page // mmap.PAGESIZE % 65536).to_bytes(2, "little")
hardly = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
hardly[4 * MIB] = 1
before = held()
said = use_huge_pages()
assert all(used[page : page + 2] == (page // mmap.PAGESIZE % 65536).to_bytes(2, "little") for page in range(0, 64 * MIB, mmap.PAGESIZE))
assert hardly[4 * MIB] == 1
after = held()
first = ctypes.addressof(ctypes.c_char.from_buffer(used))
for block in range(-(-first // (2 * MIB)) * 2 * MIB, first + 62 * MIB + 1, 2 * MIB):
    library.madvise(ctypes.c_void_p(block), ctypes.c_size_t(2 * MIB), MADV_COLLAPSE)
print(before, said, after, held())
"""


def huge_pages(machine: str) -> list[int]:
    """Bytes in huge pages of a process that has touched 64 MiB: before, as returned, after, and after the kernel was asked for each block
    once more. machine: "with" huge pages, or "none"."""
    return list(map(int, output(HUGE, machine).split()))


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel has no huge pages that can be asked for")
def test_what_is_in_memory_is_held_in_huge_pages() -> None:
    """As far as the kernel has any: where memory is in fragments, it refuses some blocks, and a few of them for a moment alone."""
    before, said, after, again = huge_pages("with")
    assert before == 0 and said <= after and again - said <= 8 << 20


def test_without_huge_pages_all_is_as_before() -> None:
    assert huge_pages("none") == [0, 0, 0, 0]


COLLECTION = """
import gc
import weakref
from omnistage.host.startup import collect_from_now_on, put_off_collection

class Cycle:
    def __init__(self):
        self.itself = self

def is_collected(made):
    for _ in range(200_000):
        Cycle()  # the collector, where it works, is led to look by what is made
    return made() is None

put_off_collection()
begun, kept = weakref.ref(Cycle()), Cycle()
assert not is_collected(begun)
collect_from_now_on()
assert begun() is None, "what loading left behind"
assert is_collected(weakref.ref(Cycle()))
assert not any(each is kept for each in gc.get_objects()), "it is looked at again and again"
"""

SERVING = """
import gc
import os
import runpy
import signal
import sys
import threading

ready, told = os.pipe()

def look():
    os.read(ready, 1 << 16)
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)
    os.kill(os.getpid(), signal.SIGTERM)

sys.argv += ["--ready-fd", str(told)]
threading.Thread(target=look).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def test_the_collector_rests_until_all_is_loaded_and_then_looks_at_what_is_new() -> None:
    output(COLLECTION)


@pytest.mark.parametrize("module", ["omnistage.thinker", "omnistage.talker", "omnistage.code2wav", "omnistage.diffusion"])
def test_a_server_that_serves_has_its_collector(module: str) -> None:
    assert output(SERVING, module, "--family", "toy") == "True True\n"


COMMAND = """
import gc
import sys
from omnistage.cli.__main__ import main
try:
    main()
finally:
    print(gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_a_command_that_runs_has_its_collector() -> None:
    assert output(COMMAND, "pipelines").endswith("\nTrue True\n")
