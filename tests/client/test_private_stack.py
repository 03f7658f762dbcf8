"""A stack of one's own: it serves, and nothing of it is left, however its owner ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import lengths
from helpers.processes import ProcessFamily, wait_end
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AsyncOmni, Omni, OverloadedError, Picture, StackError
from omnistage.models.toy import formulas

PROCESSES = 5
"""The launcher, three stages and the router."""
ALONE = 3
"""The same with one stage."""


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """A pipeline of one stage, for what is the same with more of them."""
    return toy_pipeline(tmp_path)


def start_owner(pipeline: str, code: str) -> subprocess.Popen[str]:
    """A Python process that owns a stack."""
    command = [sys.executable, "-c", textwrap.dedent(code), pipeline]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


@lengths.long_form(
    "client/test_begin.py::test_it_is_started_once_for_all_threads_that_ask",
    "client/test_private_stack.py::test_settings_reach_the_stages_or_are_refused",
)
def test_others_can_use_a_stack_and_closing_leaves_no_process(family: ProcessFamily) -> None:
    code = "import sys, json; from omnistage.client import Omni; print(json.dumps(Omni(address=sys.argv[1]).generate('Hi', seed=1).text))"
    with Omni(pipeline="toy") as omni:
        assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        assert len(family.pids()) == PROCESSES
        other = subprocess.run([sys.executable, "-c", code, omni.address], capture_output=True, text=True, timeout=60)
        assert json.loads(other.stdout) == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    assert family.pids() == []


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
    assert family.pids() == []


@lengths.long_form(
    "client/test_interrupted_start.py::test_a_call_that_is_cancelled_leaves_the_start_to_the_next_one",
    "client/test_request.py::test_settings_become_the_command_line_of_the_launcher",
)
async def test_the_async_client_owns_a_stack_too(family: ProcessFamily, alone: str) -> None:
    async with AsyncOmni(pipeline=alone, replicas={"thinker": 2}) as omni:
        assert [replica.stage for replica in await omni.replicas()] == ["thinker", "thinker"]
        assert (await omni.generate("Hi", seed=1)).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
    assert family.pids() == []


def test_an_owner_that_never_closes_leaves_no_process(family: ProcessFamily, alone: str) -> None:
    code = """
        import sys
        from omnistage.client import Omni
        omni = Omni(pipeline=sys.argv[1])
        print(omni.generate("Hi", seed=1).text)
    """
    owner = subprocess.run([sys.executable, "-c", textwrap.dedent(code), alone], capture_output=True, text=True, timeout=60)
    assert owner.returncode == 0
    assert owner.stdout.strip() == formulas.text(1, "Hi", formulas.NATURAL_LENGTH).strip()
    assert "Traceback" not in owner.stderr
    assert family.pids() == []


@lengths.one_or_all("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_an_owner_that_is_killed_leaves_no_process(family: ProcessFamily, alone: str, name: str, seed: int) -> None:
    number = signal.Signals[lengths.draw(name, ["SIGKILL", "SIGTERM", "SIGINT"], seed)]
    code = """
        import sys
        from omnistage.client import Omni
        omni = Omni(pipeline=sys.argv[1])
        print("ready", flush=True)
        sys.stdin.read()
    """
    with start_owner(alone, code) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert len(family.pids()) == ALONE + 1
        owner.send_signal(number)
        owner.wait(30)
    assert family.wait_ended() == []


def test_an_owner_killed_in_the_middle_of_the_start_leaves_no_process(family: ProcessFamily, alone: str) -> None:
    code = """
        import sys, threading
        from omnistage.client import Omni
        threading.Thread(target=Omni, kwargs={"pipeline": sys.argv[1]}, daemon=True).start()
        print("started", flush=True)
        sys.stdin.read()
    """
    with start_owner(alone, code) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.kill()
        owner.wait(30)
    assert family.wait_ended() == []


def test_a_killed_launcher_takes_its_processes_along(family: ProcessFamily, alone: str) -> None:
    with Omni(pipeline=alone) as omni:
        stages = {replica.pid for replica in omni.replicas()}
        launcher = next(pid for pid in family.pids() if pid not in stages and b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes())
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
    assert family.pids() == []


def test_an_unknown_pipeline_is_told_once(family: ProcessFamily, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StackError, match="no pipeline 'absent'"):
        Omni(pipeline="absent")
    assert capfd.readouterr().err == "", "the launcher leaves the telling to who started it"
    assert family.pids() == []


def test_a_start_that_takes_too_long_ends(family: ProcessFamily) -> None:
    with pytest.raises(StackError, match="not ready within"):
        Omni(pipeline="toy", start_timeout_s=0.01)
    assert family.pids() == []


@lengths.long_form(
    "cli/test_serve.py::test_what_dies_is_started_again_at_its_address",
    "link/test_killed_stages.py::test_a_replica_that_comes_back_in_time_is_waited_for",
)
def test_a_stage_that_is_killed_is_started_again_and_a_call_waits_for_that(family: ProcessFamily) -> None:
    with Omni(pipeline="toy") as omni:
        before = {replica.stage: replica for replica in omni.replicas()}
        os.kill(before["talker"].pid, signal.SIGKILL)
        assert wait_end(before["talker"].pid, 30)
        answer = omni.generate("Hi", seed=1, timeout_s=120.0, max_retries=100)
        assert answer.text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        after = {replica.stage: replica for replica in omni.replicas()}
        assert {stage for stage in after if after[stage].pid != before[stage].pid} == {"talker"}
        assert {stage: replica.address for stage, replica in after.items()} == {stage: replica.address for stage, replica in before.items()}
    assert family.pids() == []


@lengths.long_form(
    "client/test_drawing.py::test_a_stream_of_a_drawing_tells_its_steps",
    "client/test_drawing.py::test_asyncio",
    "cli/test_several.py::test_one_address_answers_and_draws",
)
def test_a_drawing_pipeline_gives_pictures(family: ProcessFamily) -> None:
    with Omni(pipeline="toy-picture") as omni:
        answer = omni.draw("a kite", seed=1)
        assert len(answer.pictures) == 1
        assert answer.pictures[0].media_type.startswith("image/")
        assert answer.audio is None
        pictures = [event for event in omni.stream_draw("a kite", seed=1, results=1) if isinstance(event, Picture)]
        assert [picture.data for picture in pictures] == [answer.pictures[0].data]
