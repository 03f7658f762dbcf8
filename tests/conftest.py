"""What any test may use: a seed that a failure shows, a free port, the processes it started."""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from helpers.processes import MARK, Family
from omnistage.models.devices import check_possible
from omnistage.models.errors import LoadError

# Before anything imports torch: several threads in each of several processes on a few cores spin instead of working.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whatever serves on this machine is not of the tests.
os.environ["OMNISTAGE_ROUTER"] = "none"
os.environ["OMNISTAGE_STATE"] = str(Path(tempfile.gettempdir()) / f"omnistage-tests-{os.geteuid()}")  # what a person said to it, too
os.environ["OMNISTAGE_PLAYER"] = "none"  # and whoever works on it need not hear them

# Before anything imports Triton, as Transformers does: where no GPU can be, its kernels are interpreted.
try:
    check_possible("cuda")
except LoadError:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts something in the background has it ignore Ctrl-C, and nohup the hang-up: all that a test starts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent

DEAREST = (
    "system/test_compose.py",
    "system/test_omni_speech.py",
    "models/qwen2_5_omni/test_code2wav.py",
    "models/qwen2_5_omni/test_code2wav_threads.py",
    "system/test_pictures.py",
    "models/diffusers/test_spread.py",
    "models/diffusers/test_model.py",
    "system/test_default_resume.py",
    "system/test_spoken_words.py",
    "system/test_ranks.py",
    "system/test_default_model.py",
    "models/test_team.py",
    "engine/test_engine.py",
    "models/contract/test_contract.py",
    "system/test_engine_chain.py",
    "cli/test_serve.py",
    "client/test_router_loss.py",
    "system/test_resume.py",
    "models/test_resumed_thinker.py",
    "models/test_smol_thinker.py",
    "system/test_omni_thinker.py",
    "system/test_omni_talker.py",
    "system/test_frozen.py",
    "host/test_watchdog.py",
    "models/test_revision.py",
    "system/test_picture_by_name.py",
    "system/test_rolling_restart.py",
    "client/test_private_stack.py",
    "client/test_default_pictures.py",
    "cli/test_draw.py",
    "cli/test_commands.py",
    "cli/test_checks.py",
    "hostile/test_counts.py",
    "engine/test_exactness.py",
    "models/qwen2_5_omni/test_thinker.py",
    "models/qwen2_5_omni/test_tiny.py",
    "cli/test_interrupts.py",
)
"""Files that take twenty seconds and more of a CPU. Several workers begin with them: one that began last would leave the others idle."""

# No deadlines: how long an example takes depends on what else the machine does. The blob lets anyone repeat a failure.
settings.register_profile("omnistage", deadline=None, print_blob=True)
settings.load_profile("omnistage")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only serial tests are asked for, files without any are not imported, which takes several times as long as those with some."""
    expression: str = config.option.markexpr
    asks_for_serial = "serial" in re.findall(r"(?:\bnot )?\w+", expression) and " or " not in expression
    if asks_for_serial and collection_path.match("test_*.py") and "mark.serial" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For several workers: the dearest files first, the others as they were found."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {TESTS / file: place for place, file in enumerate(DEAREST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def seed() -> int:
    """A random seed, printed so that a failure shows it. Set OMNISTAGE_TEST_SEED to repeat one."""
    value = int(os.environ.get("OMNISTAGE_TEST_SEED") or secrets.randbits(32))
    print(f"OMNISTAGE_TEST_SEED={value}")
    return value


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback address that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


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
    from helpers.omni_checkpoint import omni_checkpoint  # here, since most tests need no torch

    return omni_checkpoint(tmp_path_factory)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """Whatever the test starts; ended after it, so that a failure leaves nothing either."""
    family = Family()
    monkeypatch.setenv(MARK, family.mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("logs")))  # a killed launcher cannot remove its own
    yield family
    for pid in family.pids():
        os.kill(pid, signal.SIGKILL)
