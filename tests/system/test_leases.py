"""Leases of shared memory between real stages: they end with the reader, also when it is killed, and long before the grace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc.aio
import pytest

from helpers.ask import read, read_all, refusal, request
from helpers.processes import open_files
from helpers.servers import ServerProcess, all_free, local_stage, omni_stub, stack, stage_flags, toy_logic, watch_until
from omnistage.stage import server as stage_server

OPTIONS = {"max_chunk": 1, "width": 4096, "interval_s": 0.005}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}
SHARED = ["--inline-limit", "0"]


async def test_a_killed_stage_gives_its_leases_back_long_before_the_grace(tmp_path: Path) -> None:
    """The Talker is stopped, so that it holds rows, and killed then. The wait for a free Thinker is shorter than the grace of 30 s."""
    with stack(tmp_path, options=OPTIONS, stage_args=SHARED) as running:
        thinker, talker = running.stages["thinker"], running.stages["talker"]
        async with omni_stub(running.address) as stub:
            call = stub.Generate(request("hello", 1, thinker=ENDLESS), timeout=60)
            await read(call)
            await read(call)
            os.kill(talker.pid, signal.SIGSTOP)
            await watch_until(thinker.address, lambda report: report.leases > 20)
            os.kill(talker.pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in read_all(call):
                    pass
            assert refusal(failed.value).reason == "STAGE_LOST"
            await all_free([thinker.address, running.addresses["code2wav"]])


@pytest.mark.serial
def test_a_stage_removes_at_its_start_what_a_killed_one_left(tmp_path: Path) -> None:
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as first:
        first.wait_ready()
        (live,) = [Path(target) for _, target in open_files(first.pid) if target.endswith("-live")]
        first.process.kill()
        first.process.wait()
    assert live.exists()
    os.utime(live, (1, 1))  # a sweep leaves files of the last seconds alone
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as second:
        second.wait_ready()
        assert not list(live.parent.glob(f"{live.name.removesuffix('live')}*"))


def orphan_is_swept() -> bool:
    """Leave what a killed producer leaves, and wait for its end, a bounded time."""
    orphan = Path(f"/dev/shm/omnistage-{os.urandom(16).hex()}-live")
    orphan.touch(mode=0o600)
    os.utime(orphan, (1, 1))
    deadline = time.monotonic() + 30.0
    while orphan.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not orphan.exists()


@pytest.mark.serial
async def test_a_stage_that_runs_sweeps_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_server, "SWEEP_PERIOD_S", 0.02)
    async with local_stage(toy_logic("thinker")):
        assert await asyncio.to_thread(orphan_is_swept)
