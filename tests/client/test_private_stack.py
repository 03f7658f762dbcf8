"""A stack of one's own: it serves, starts another pipeline when it is asked to, and nothing of it is left, however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.hanging import ENVIRONMENT
from helpers.loading import loading_pipeline, reading
from helpers.processes import ProcessFamily, StartedProcess, wait_end
from helpers.toy_pipeline import toy_pipeline
from helpers.waiting import until
from omnistage.client import AsyncOmni, BadRequestError, ClosedError, DeadlineError, Omni, OverloadedError, StackError
from omnistage.client.private_stack import PrivateStack, StackPlan
from omnistage.models.toy import formulas

PROCESSES, ALONE = 5, 3
"""The launcher, the router and three stages, or one."""
TEXT = formulas.text(1, "Hi", formulas.NATURAL_LENGTH)


@pytest.fixture
def family(family: ProcessFamily) -> Iterator[ProcessFamily]:
    """Nothing is left of it when the test is over."""
    yield family
    assert family.pids() == []


@contextmanager
def stack_of(*pipelines: str, **settings: Any) -> Iterator[PrivateStack]:
    stack = PrivateStack(StackPlan({"pipeline": pipelines, **settings}))  # type: ignore[typeddict-item]
    try:
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """A pipeline of one stage, for what is the same with more of them."""
    return toy_pipeline(tmp_path)


def kill_owner(family: ProcessFamily, number: signal.Signals, pipeline: str, code: str, processes: int = 0) -> None:
    """Kill a Python process that owns a stack when it has written a line. processes: how many there are then, if that is certain."""
    command = [sys.executable, "-c", textwrap.dedent(code), pipeline]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        assert not processes or len(family.pids()) == processes
        owner.send_signal(number)
        owner.wait(30)
    assert family.wait_ended() == []


@lengths.long_form(
    "client/test_private_stack.py::test_it_is_started_once_for_all_threads_that_ask",
    "client/test_request.py::test_settings_become_the_order_of_the_launcher",
    "cli/test_serve.py::test_what_dies_is_started_again_at_its_address",
    "link/test_chain.py::test_a_replica_that_comes_back_in_time_is_waited_for",
)
async def test_a_call_waits_for_a_killed_stage_and_other_programs_can_use_the_stack(family: ProcessFamily) -> None:
    code = "import sys, json; from omnistage.client import Omni; print(json.dumps(Omni(address=sys.argv[1]).generate('Hi', seed=1).text))"
    async with AsyncOmni(pipeline="toy", replicas={"thinker": 2}) as omni:
        before = {replica.address: replica for replica in await omni.replicas()}
        (talker,) = [replica for replica in before.values() if replica.stage == "talker"]
        assert sorted(replica.stage for replica in before.values()) == ["code2wav", "talker", "thinker", "thinker"]
        os.kill(talker.pid, signal.SIGKILL)
        assert await asyncio.to_thread(wait_end, talker.pid, 30)
        assert (await omni.generate("Hi", seed=1, timeout_s=120.0, max_retries=100)).text == TEXT
        after = {replica.address: replica for replica in await omni.replicas()}
        assert after.keys() == before.keys()
        assert [address for address, replica in after.items() if replica.pid != before[address].pid] == [talker.address]
        command = [sys.executable, "-c", code, omni.address]
        other = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert json.loads(other.stdout) == TEXT


def test_settings_reach_the_stages_or_are_refused(family: ProcessFamily) -> None:
    with Omni(pipeline="toy", gpu_memory_utilization=0.5, max_sessions=1, max_retries=0) as omni:
        told = [replica.settings["gpu_memory_utilization"] for replica in omni.replicas()]
        stream = omni.stream("Hi", max_tokens=32768, ignore_eos=True)
        assert next(stream)
        with pytest.raises(OverloadedError) as caught:
            omni.generate("Hi")
        assert caught.value.retry_delay_s is not None and caught.value.retry_delay_s > 0, "a full house says when to ask again"
        stream.close()
    assert told == ["0.5, which means nothing on a CPU"] * 3
    with pytest.raises(StackError, match="no stage of toy has a use for it") as raised, Omni(pipeline="toy", tensor_parallel_size=2):
        pass
    assert "replicas={'talker': 2}" in raised.value.message
    with pytest.raises(StackError, match="max_batch_size 2: the talker of toy"), Omni(pipeline="toy", max_batch_size={"talker": 2}):
        pass


def test_an_owner_that_never_closes_leaves_no_process(family: ProcessFamily, alone: str) -> None:
    code = """
        import sys
        from omnistage.client import Omni
        omni = Omni(pipeline=sys.argv[1])
        print(omni.generate("Hi", seed=1).text)
    """
    owner = subprocess.run([sys.executable, "-c", textwrap.dedent(code), alone], capture_output=True, text=True, timeout=60)
    assert (owner.returncode, owner.stdout.strip()) == (0, TEXT.strip()) and "Traceback" not in owner.stderr


@lengths.one_or_all("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_an_owner_that_is_killed_leaves_no_process(family: ProcessFamily, alone: str, name: str, seed: int) -> None:
    code = """
        import sys
        from omnistage.client import Omni
        omni = Omni(pipeline=sys.argv[1])
        print("ready", flush=True)
        sys.stdin.read()
    """
    kill_owner(family, signal.Signals[lengths.draw(name, ["SIGKILL", "SIGTERM", "SIGINT"], seed)], alone, code, ALONE + 1)


def test_an_owner_killed_in_the_middle_of_the_start_leaves_no_process(family: ProcessFamily, alone: str) -> None:
    code = """
        import sys, threading
        from omnistage.client import Omni
        threading.Thread(target=Omni, kwargs={"pipeline": sys.argv[1]}, daemon=True).start()
        print("started", flush=True)
        sys.stdin.read()
    """
    kill_owner(family, signal.SIGKILL, alone, code)


def test_a_killed_launcher_takes_its_processes_along(family: ProcessFamily, alone: str) -> None:
    with Omni(pipeline=alone) as omni:
        stages = {replica.pid for replica in omni.replicas()}
        launcher = next(pid for pid in family.pids() if pid not in stages and b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(launcher, signal.SIGKILL)
        for pid in stages:
            assert wait_end(pid, 30)
    assert family.wait_ended() == []


def test_a_stack_that_cannot_start_says_why_and_leaves_nothing(family: ProcessFamily, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "name: broken\ndescription: x\ninputs: [text]\noutputs: [text]\n"
        "stages:\n  - {kind: thinker, family: toy}\n  - {kind: talker, family: absent, takes: [hidden]}\n"
    )
    with pytest.raises(StackError, match="no talker named 'absent'"):
        Omni(pipeline=str(broken))


def test_an_unknown_pipeline_is_told_once(family: ProcessFamily, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StackError, match="no pipeline 'absent'"):
        Omni(pipeline="absent")
    assert capfd.readouterr().err == "", "the launcher leaves the telling to who started it"


def test_a_start_that_takes_too_long_ends(family: ProcessFamily) -> None:
    with pytest.raises(StackError, match="not ready within"):
        Omni(pipeline="toy", start_timeout_s=0.01)


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
    with stack_of("toy-picture", "toy", device={"toy-picture/diffusion": "cpu"}) as stack, Omni(address=stack.start()) as omni:
        before = len(family.pids())
        assert {one.name: one.state for one in omni.pipelines()} == {"toy-picture": "ready", "toy": "starting"}
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(stack.begin, ("toy", "toy-picture", "toy", "toy"))) == [None] * 4
        assert len(family.pids()) == before + 3
        assert omni.generate("Hi", seed=1, pipeline="toy").text == TEXT


@lengths.long_form(
    "cli/test_several.py::test_one_that_cannot_start_is_told_and_the_others_go_on",
    unkept="who asks for it is told each time, and nothing of it is left",
)
def test_one_that_cannot_start_is_told_each_time_and_the_first_goes_on(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    pipe.unlink()
    with stack_of("toy-picture", str(file)) as stack, Omni(address=stack.start()) as omni:
        before = set(family.pids())
        for _ in range(2):
            with pytest.raises(StackError, match="thinker"):
                stack.begin("loading")
            assert set(family.pids()) == before
        with pytest.raises(StackError, match="no pipeline none; it has toy-picture, loading"):
            stack.begin("none")
        assert omni.draw("a kite", seed=1).pictures


@lengths.long_form(
    "cli/test_several.py::test_the_end_takes_a_pipeline_along_that_is_starting",
    unkept="all who wait for it are told, and none of them takes a thread",
)
async def test_stopping_ends_one_that_is_starting(family: ProcessFamily, tmp_path: Path) -> None:
    """For all who wait, none of whom takes a thread."""
    file, pipe = loading_pipeline(tmp_path)
    stack = PrivateStack(StackPlan({"pipeline": ("toy-picture", str(file))}))
    await stack.start_on_thread()
    before = threading.active_count()
    waiting = [asyncio.create_task(stack.begin_on_loop("loading")) for _ in range(50)]
    await asyncio.sleep(0)  # All have begun to wait then.
    assert threading.active_count() == before
    with await asyncio.to_thread(open, pipe, "wb"):
        await asyncio.to_thread(stack.stop)
        for each in waiting:
            with pytest.raises(ClosedError):
                await each
    with pytest.raises(ClosedError):
        stack.begin("loading")


def test_who_asks_for_it_waits_until_it_serves(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    with stack_of("toy-picture", str(file)) as stack:
        stack.start()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(stack.begin, "loading")
            with reading(pipe):
                started = set(family.pids())
                assert not first.done()
            first.result()
            stack.begin("loading")
        assert set(family.pids()) == started


@lengths.long_form(
    "client/test_private_stack.py::test_who_asks_for_it_waits_until_it_serves",
    unkept="a pipeline that was given up is started again for who asks",
)
def test_one_that_was_given_up_is_started_again_when_it_is_asked(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    with stack_of("toy-picture", str(file)) as stack, Omni(address=stack.start()) as omni, ThreadPoolExecutor(1) as threads:
        before = set(family.pids())

        def begin_and_ask() -> None:
            begun = threads.submit(stack.begin, "loading")
            with reading(pipe):
                pass
            begun.result()
            assert omni.generate("Hi", pipeline="loading").text  # So that the router knows its process.

        begin_and_ask()
        (pid,) = (replica.pid for replica in omni.replicas() if replica.pipeline == "loading")
        pipe.unlink()
        os.kill(pid, signal.SIGKILL)
        asyncio.run(until(lambda: is_refused(stack, "loading")))  # Until it is given up it is one that serves.
        assert set(family.pids()) == before
        os.mkfifo(pipe)
        begin_and_ask()


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
    assert err.splitlines()[-1] == "KeyboardInterrupt" and "Exception" not in err and "never" not in err
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
    assert (await second).text == TEXT
    assert set(started) <= set(family.pids())
    await omni.close()


@lengths.long_form(
    "client/test_private_stack.py::test_it_ends_a_stack_whose_model_is_being_loaded",
    unkept="a close ends the start, and the call that waits for it",
)
async def test_closing_ends_a_start_that_another_call_waits_for(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    omni = AsyncOmni(pipeline=str(file))
    call = asyncio.create_task(omni.generate("Hi"))
    with await asyncio.to_thread(open, pipe, "wb"):
        await omni.close()
        with pytest.raises(ClosedError):
            await call
        assert family.pids() == []


PROMPT = "a large red circle on a blue background"


@lengths.long_form(
    "client/test_private_stack.py::test_it_is_started_once_for_all_threads_that_ask",
    "client/test_drawing.py::test_generate_draws_where_nothing_else_can_be_done",
    "models/diffusers/test_default_picture.py::test_a_picture_follows_its_prompt",
    unkept="the stack that nobody has chosen has both default models",
)
async def test_the_default_stack_answers_and_draws(family: ProcessFamily) -> None:
    """The picture model starts with the first drawing, which waits for it; where the call's time is over before, the next one finds it."""
    omni = AsyncOmni(api_key="swordfish")
    try:
        await omni.start()
        assert [(one.name, one.state) for one in await omni.pipelines()] == [("smol", "ready"), ("picture", "starting")]
        with pytest.raises(DeadlineError):
            await omni.draw(PROMPT, timeout_s=0.2)
        drawn = await omni.draw(PROMPT, seed=7, outputs=["image", "latents", "pixels"])
        assert drawn.pipeline == "picture"
        shown = np.asarray(drawn.images[0])
        assert shown.shape == (128, 128, 3)
        assert shown[64, 64].argmax() == 0 and shown[2, 2].argmax() == 2, "red on blue"
        assert np.array_equal(drawn.rows["pixels"].reshape(shown.shape), shown)
        assert drawn.rows["latents"].dtype == np.float32 and drawn.rows["latents"].std() > 0
        named = await omni.draw(PROMPT, seed=7, pipeline=drawn.pipeline)
        assert named.pictures[0].data == drawn.pictures[0].data

        assert {(one.name, one.state) for one in await omni.pipelines()} == {("smol", "ready"), ("picture", "ready")}
        assert {replica.pipeline for replica in await omni.replicas()} == {"smol", "picture"}
        again = await omni.generate(PROMPT, seed=7, width=128)
        assert (again.pipeline, again.pictures[0].data) == ("picture", drawn.pictures[0].data)
        answer = await omni.generate("What is a kite?", outputs=["text"], max_tokens=4)
        assert (answer.pipeline, answer.pictures, answer.drew) == ("smol", (), False) and answer.text
        said = await omni.say("2 * 3, 你好 🙂!", max_frames=100)
        assert (said.unspoken, said.unspoken_words, said.drew, said.notes) == (3, "你好 🙂", False, ())
        other = await omni.say("2 * 3, 你好 🙂!", max_frames=100, seed=said.seed + 1)
        assert said.audio is not None and other.audio is not None and np.array_equal(said.audio.samples, other.audio.samples)
        assert (drawn.drew, drawn.notes) == (True, ())
        (note,) = (await omni.draw("a cat", seed=1)).notes
        assert note == "this model draws coloured shapes: circle, square, triangle, star, heart; this prompt names none of them"
        with pytest.raises(BadRequestError, match="smol does not draw"):
            await omni.draw(PROMPT, pipeline="smol")
        with pytest.raises(BadRequestError, match="picture does not speak a text"):
            await omni.say("Good morning.", pipeline="picture")
    finally:
        await omni.close()
    assert family.wait_ended() == []
