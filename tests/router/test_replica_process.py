"""The log names the process of a replica that fell silent, and says nothing about some processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from helpers import hanging
from helpers.hanging import BURN
from helpers.servers import ServerProcess, stage_flags
from helpers.watching import thinker, until, watched
from omnistage.connector import shm
from omnistage.router.placement import LOST, SERVING
from omnistage.router.process import ReplicaProcess

MACHINE = {"load", "cpu_pressure", "io_pressure", "memory_pressure"}


async def test_one_that_was_stopped_and_wakes(tmp_path: Path) -> None:
    with thinker(tmp_path) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, signal.SIGSTOP)
            try:
                await until(placement, {stage.address: LOST})
                placement.suspect([stage.address])
                placement.suspect([stage.address])
                known = placement.known("thinker", stage.address)
            finally:
                os.kill(stage.pid, signal.SIGCONT)
            await until(placement, {stage.address: SERVING})
    (lost,) = [line for line in lines if line["event"] == "replica.lost"]
    (suspect,) = [line for line in lines if line["event"] == "replica.suspect"]
    begun, back = [line for line in lines if line["event"] == "replica.state"]
    assert "process" not in begun
    told: list[Mapping[str, Any]] = [lost, suspect, known]
    for line in told:
        assert line["process"]["state"] == "T"
        assert line["process"]["threads"] > 1 and line["process"]["since_s"] > 0
        assert {"cpu_s", "major_faults"} <= line["process"].keys()
        assert line["machine"].keys() <= MACHINE
    assert back["process"]["since_s"] > lost["process"]["since_s"], "since it was heard before it slept"


async def test_one_that_computes_with_the_lock_of_the_interpreter_held(tmp_path: Path) -> None:
    hanging_thinker = ("helpers.hanging", "omnistage.thinker", *stage_flags(), "--address", "127.0.0.1:0")
    with ServerProcess(*hanging_thinker, log_folder=tmp_path, environment=hanging.ENVIRONMENT) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, BURN)
            try:
                await until(placement, {stage.address: LOST})
            finally:
                os.kill(stage.pid, signal.SIGKILL)
    (lost,) = [line for line in lines if line["event"] == "replica.lost"]
    assert lost["why"].startswith("no report")
    assert lost["process"]["cpu_s"] >= 0.1, "nothing is counted in less than a hundredth"


async def test_one_whose_connection_ended_needs_no_guess(tmp_path: Path) -> None:
    with thinker(tmp_path) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, signal.SIGKILL)
            await until(placement, {stage.address: LOST})
    (lost,) = [line for line in lines if line["event"] == "replica.lost"]
    assert "process" not in lost


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_of_which_process_it_says_nothing(host: str) -> None:
    """A number may be that of another process, as in a container with numbers of its own."""
    here, own = shm.boot_id(), os.getpid()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listens, socket.socket(family) as bound:
        for each in (listens, bound):
            try:
                each.bind((host, 0))
            except OSError:
                pytest.skip("this machine has no such addresses")
        listens.listen()
        address, silent = (f"localhost:{each.getsockname()[1]}" for each in (listens, bound))

        def known(address: str, pid: int, boot_id: str = here) -> dict[str, object]:
            process = ReplicaProcess(address)
            process.is_at(pid, boot_id)
            process.heard()
            return process.known()

        assert known(address, own)
        for other in (os.getppid(), 1, 0, 2**31 - 1, 2**32 - 1):
            assert not known(address, other)
        for port in (silent, "localhost:", "localhost", "unix:/x", "localhost:x", "localhost:-1", "localhost:99999999"):
            assert not known(port, own)
        assert not known(address, own, "another boot") and not known(address, own, "")
