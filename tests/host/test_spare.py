"""Parts that a server can do without may fail for any lack of the machine: the server goes on, and tries again if that makes sense."""

from __future__ import annotations

import json
import os
import resource
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

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
