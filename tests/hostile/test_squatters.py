"""Another user of the host who wants the port of a stage, and with it the token that its callers show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.processes import ProcessFamily, wait_end
from helpers.squatter import squatter
from omnistage.cli.stack.resources import Ports
from omnistage.client import Omni

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user for a while")


@pytest.fixture
def ports() -> Iterator[Ports]:
    kept = Ports()
    yield kept
    kept.close()


def test_a_port_that_is_kept_is_taken_by_no_other_user(ports: Ports) -> None:
    """Before anybody has listened there."""
    with squatter(ports.take(), ports.take()) as stranger:
        assert stranger.tries() == "refused"


def test_a_port_is_kept_as_long_as_a_process_that_inherited_it_lives(ports: Ports) -> None:
    """As the router of a stack does whose launcher was killed: it still calls stages, with the token."""
    address = ports.take()
    heir = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=ports.fds)
    try:
        ports.close()
        with squatter(address) as stranger:
            assert stranger.tries() == "refused"
            heir.kill()
            heir.wait(30)
            assert stranger.tries() == f"took {address}"
    finally:
        heir.kill()
        heir.communicate()


def test_a_stage_that_was_killed_gets_its_port_back_and_nobody_else_does(family: ProcessFamily) -> None:
    command = [sys.executable, "-m", "omnistage.cli", "serve", "toy", "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert line.startswith("serving on "), line + server.stderr.read()
            address = line.split()[2]
            with Omni(address=address) as omni:
                stages = {replica.stage: replica for replica in omni.replicas()}
            with squatter(address, *(stage.address for stage in stages.values())) as stranger:
                assert stranger.tries() == "refused"
                for kind in ("talker", "thinker"):
                    os.kill(stages[kind].pid, signal.SIGKILL)
                    assert wait_end(stages[kind].pid, 30)
                    assert stranger.tries() == "refused"
                    assert any(f"Z restarted {kind} " in line for line in iter(server.stderr.readline, ""))
                with Omni(address=address) as omni:
                    assert omni.generate("Hi").text
        finally:
            server.terminate()
            assert server.wait(30) == 0
    assert family.pids() == []
