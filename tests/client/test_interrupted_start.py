"""Ctrl-C while a private stack starts: the interrupt is raised before the stack was ready, and its processes are gone by then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import lengths
from helpers.hanging import ENVIRONMENT
from helpers.loading import loading_pipeline, reading
from helpers.processes import ProcessFamily, StartedProcess
from omnistage.client import AsyncOmni, ClosedError
from omnistage.models.toy import formulas

PRELUDE = """
import asyncio, os, sys
from helpers.processes import MARK, ProcessFamily
from omnistage.client import AsyncOmni, Omni

settings = {"pipeline": sys.argv[1]}

def tell():
    family = ProcessFamily()
    family.mark = os.environ[MARK]
    print("interrupted, left:", family.pids(), flush=True)
"""

OWNERS = {
    "sync": """
        try:
            Omni(**settings)
            print("ready")
        except KeyboardInterrupt:
            tell()
            raise
    """,
    "async": """
        async def main():
            try:
                async with AsyncOmni(**settings):
                    print("ready")
            except asyncio.CancelledError:
                tell()
                raise

        asyncio.run(main())
    """,
    "a call of nobody's": """
        async def main():
            await AsyncOmni(**settings).generate("Hi")
            print("ready")

        asyncio.run(main())
    """,
}


def interrupt(family: ProcessFamily, owner: str, pipeline: Path, pipe: Path) -> str:
    """Interrupt an owner whose stack reads the pipe, which has no end before the owner has one. Returns what it printed."""
    words = [sys.executable, "-c", PRELUDE + textwrap.dedent(OWNERS[owner]), str(pipeline)]
    environment = {**family.environment, **ENVIRONMENT}
    with StartedProcess(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process, reading(pipe):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception" not in err and "never" not in err
    assert family.pids() == []
    return out


@lengths.drawn_cells(1, "owner", OWNERS)
def test_it_ends_a_stack_whose_model_is_being_loaded(family: ProcessFamily, tmp_path: Path, owner: str) -> None:
    file, pipe = loading_pipeline(tmp_path)
    out = interrupt(family, owner, file, pipe)
    assert out == ("" if owner == "a call of nobody's" else "interrupted, left: []\n")


def test_it_ends_a_launcher_that_has_started_nothing_yet(family: ProcessFamily, tmp_path: Path) -> None:
    pipe = tmp_path / "pipeline.yaml"
    os.mkfifo(pipe)
    assert interrupt(family, "sync", pipe, pipe) == "interrupted, left: []\n"


@pytest.fixture
def tests_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts find the families of the tests."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("tests_found")
async def test_a_call_that_is_cancelled_leaves_the_start_to_the_next_one(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    omni = AsyncOmni(pipeline=str(file))
    first = asyncio.create_task(omni.generate("Hi", seed=1))
    with await asyncio.to_thread(open, pipe, "wb"):
        started = family.pids()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(omni.generate("Hi", seed=1))
        assert set(started) <= set(family.pids()), "nothing of the first start was ended"
    assert (await second).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    assert set(started) <= set(family.pids())
    await omni.close()
    assert family.pids() == []


@lengths.long_form(
    "client/test_interrupted_start.py::test_it_ends_a_stack_whose_model_is_being_loaded",
    unkept="a close ends the start, and the call that waits for it",
)
@pytest.mark.usefixtures("tests_found")
async def test_closing_ends_a_start_that_another_call_waits_for(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    omni = AsyncOmni(pipeline=str(file))
    call = asyncio.create_task(omni.generate("Hi"))
    with await asyncio.to_thread(open, pipe, "wb"):
        await omni.close()
        with pytest.raises(ClosedError):
            await call
        assert family.pids() == []
