"""A private stack starts another pipeline when it is asked to; nothing of it is left, however that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import lengths
from helpers.hanging import ENVIRONMENT
from helpers.loading import loading_pipeline, reading
from helpers.processes import ProcessFamily
from helpers.waiting import until
from omnistage.client import ClosedError, Omni, StackError
from omnistage.client.private_stack import BEGIN_THREAD, PrivateStack, StackPlan
from omnistage.models.toy import formulas


@pytest.fixture(autouse=True)
def tests_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one starts find the families of the tests."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def is_refused(stack: PrivateStack, pipeline: str) -> bool:
    try:
        stack.begin(pipeline)
    except StackError:
        return True
    return False


def test_it_is_started_once_for_all_threads_that_ask(family: ProcessFamily) -> None:
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", "toy"), "device": {"toy-picture/diffusion": "cpu"}}))
    try:
        with Omni(address=stack.start()) as omni:
            before = len(family.pids())
            assert {one.name: one.state for one in omni.pipelines()} == {"toy-picture": "ready", "toy": "starting"}
            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(stack.begin, ("toy", "toy-picture", "toy", "toy"))) == [None] * 4
            assert len(family.pids()) == before + 3
            assert omni.generate("Hi", seed=1, pipeline="toy").text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    finally:
        stack.stop()
    assert family.pids() == []


@lengths.long_form(
    "cli/test_several.py::test_one_that_cannot_start_is_told_and_the_others_go_on",
    unkept="who asks for it is told each time, and nothing of it is left",
)
def test_one_that_cannot_start_is_told_each_time_and_the_first_goes_on(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    pipe.unlink()
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", str(file))}))
    try:
        with Omni(address=stack.start()) as omni:
            before = set(family.pids())
            for _ in range(2):
                with pytest.raises(StackError, match="thinker"):
                    stack.begin("loading")
                assert set(family.pids()) == before
            with pytest.raises(StackError, match="no pipeline none; it has toy-picture, loading"):
                stack.begin("none")
            assert omni.draw("a kite", seed=1).pictures
    finally:
        stack.stop()
    assert family.pids() == []


@lengths.long_form(
    "cli/test_several.py::test_the_end_takes_a_pipeline_along_that_is_starting",
    unkept="all who wait for it are told, by the work of one thread",
)
async def test_stopping_ends_one_that_is_starting(family: ProcessFamily, tmp_path: Path) -> None:
    """For all who wait, which is the work of one thread."""
    file, pipe = loading_pipeline(tmp_path)
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", str(file))}))
    await stack.started()
    waiting = [asyncio.create_task(stack.begun("loading")) for _ in range(50)]
    await asyncio.sleep(0)  # All have begun to wait then.
    assert [one.name for one in threading.enumerate()].count(BEGIN_THREAD) == 1
    with await asyncio.to_thread(open, pipe, "wb"):
        await asyncio.to_thread(stack.stop)
        for each in waiting:
            with pytest.raises(ClosedError):
                await each
    assert family.pids() == []
    with pytest.raises(ClosedError):
        stack.begin("loading")


def test_who_asks_for_it_waits_until_it_serves(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", str(file))}))
    try:
        stack.start()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(stack.begin, "loading")
            with reading(pipe):
                started = set(family.pids())
                assert not first.done()
            first.result()
            stack.begin("loading")
        assert set(family.pids()) == started
    finally:
        stack.stop()
    assert family.pids() == []


@lengths.long_form(
    "client/test_begin.py::test_who_asks_for_it_waits_until_it_serves", unkept="a pipeline that was given up is started again for who asks"
)
def test_one_that_was_given_up_is_started_again_when_it_is_asked(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", str(file))}))
    try:
        with Omni(address=stack.start()) as omni, ThreadPoolExecutor(1) as threads:
            before = set(family.pids())
            first = threads.submit(stack.begin, "loading")
            with reading(pipe):
                pass
            first.result()
            assert omni.generate("Hi", pipeline="loading").text  # So that the router knows its process.
            (pid,) = (replica.pid for replica in omni.replicas() if replica.pipeline == "loading")
            pipe.unlink()
            os.kill(pid, signal.SIGKILL)
            asyncio.run(until(lambda: is_refused(stack, "loading")))  # Until it is given up it is one that serves.
            assert set(family.pids()) == before
            os.mkfifo(pipe)
            again = threads.submit(stack.begin, "loading")
            with reading(pipe):
                pass
            again.result()
            assert omni.generate("Hi", pipeline="loading").text
    finally:
        stack.stop()
    assert family.pids() == []
