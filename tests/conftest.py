"""Fixtures for any test: a free port, the processes that it started, a checkpoint. Random numbers come from helpers/randomness."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from helpers.processes import MARK, ProcessFamily
from omnistage.models.devices import check_possible
from omnistage.models.reports import LoadError

pytest_plugins = ("helpers.collection", "helpers.outcomes", "helpers.randomness", "helpers.surroundings", "helpers.sharing")

# Before anything imports torch: several threads in each of several processes on a few cores spin instead of working.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whatever serves on this machine is not of the tests.
os.environ["OMNISTAGE_ROUTER"] = "none"
os.environ["OMNISTAGE_STATE"] = str(Path(tempfile.gettempdir()) / f"omnistage-tests-{os.geteuid()}")  # what a person said to it, too
os.environ["OMNISTAGE_SERVE_NO_HTTP"] = "true"  # what is started needs no door that no test asks
os.environ["OMNISTAGE_PLAYER"] = "none"  # and whoever works on it need not hear them

# Before anything imports Triton, as Transformers does: where no GPU can be, its kernels are interpreted.
try:
    check_possible("cuda")
except LoadError:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts something in the background has it ignore Ctrl-C, and nohup the hang-up: all that a test starts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadlines: how long an example takes depends on what else the machine does. The blob lets anyone repeat a failure.
settings.register_profile("omnistage", deadline=None, print_blob=True)
settings.load_profile("omnistage")


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback address that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def toy_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a router in front of toy stages, for tests of the client and of the command that only ask; it takes a few answers at
    once."""
    from helpers import servers  # here, since most tests need no gRPC

    with servers.toy_address(tmp_path_factory.mktemp("toy"), "toy", "--max-sessions", "16") as address:
        yield address


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    """Garbage is collected where a test wants it, and nowhere else: the collector would clear away what a test looks for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def omni_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen2.5-Omni with random weights, of size tiny, in float32; nobody may write to it."""
    from helpers.checkpoints import omni_checkpoint  # here, since most tests need no torch

    return omni_checkpoint(tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Qwen3-Omni."""
    from helpers.checkpoints import shared_checkpoint

    return shared_checkpoint(tmp_path_factory)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFamily]:
    """Whatever the test starts; ended after it, so that a failure leaves nothing either."""
    family = ProcessFamily()
    monkeypatch.setenv(MARK, family.mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("logs")))  # a killed launcher cannot remove its own
    yield family
    for pid in family.pids():
        os.kill(pid, signal.SIGKILL)
