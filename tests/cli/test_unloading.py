"""`omnistage serve --idle-unload`: the processes of a pipeline that nobody asks end, and the next request starts them and is answered."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from helpers import lengths
from helpers.command import omnistage
from helpers.processes import ProcessFamily
from helpers.serving import pid_of, pids_of, serving
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import Omni
from omnistage.client.connection import Pipeline, Replica

UNLOADED = ", as nobody has asked for it; the next request loads it"


def states(omni: Omni) -> dict[str, str]:
    return {pipeline.name: pipeline.state for pipeline in omni.pipelines()}


def replicas_of(omni: Omni, pipeline: str) -> list[Replica]:
    return [replica for replica in omni.replicas() if replica.pipeline == pipeline]


def once_unloaded(omni: Omni, name: str) -> Pipeline:
    deadline = time.monotonic() + 60
    while (pipeline := next(one for one in omni.pipelines() if one.name == name)).state != "unloaded":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pipeline


def test_a_pipeline_is_unloaded_and_loaded_again(family: ProcessFamily, tmp_path: Path) -> None:
    """The stage that it shares with another pipeline stays. A router that was started anew knows what is unloaded."""
    one = toy_pipeline(tmp_path, "one", length=5)
    two = toy_pipeline(tmp_path, "two", length=5, samples_per_frame=240)
    words = ("--idle-unload", "two=1", "--http", "127.0.0.1:0")
    with serving(family, one, two, *words) as server, Omni(address=server.address()) as omni:
        assert server.report("serving ") == "two"
        assert server.report("unloaded ") == f"two{UNLOADED}"
        once_unloaded(omni, "two")
        unloaded_stages = [replica.stage for replica in replicas_of(omni, "two") if replica.state == "unloaded"]
        assert unloaded_stages == ["talker", "code2wav"], "its Thinker is that of the other pipeline too"
        for is_killed in (False, True):
            if is_killed:
                os.kill(pid_of("omnistage.router", family), signal.SIGKILL)
                assert server.report("restarted ").startswith("router (pid ")
            assert states(omni) == {"one": "ready", "two": "unloaded"}
            answer = omni.generate("Hi", pipeline="two")
            assert answer.text and answer.audio is not None
            assert server.report("serving ") == "two"
            assert server.report("unloaded ") == f"two{UNLOADED}"
            once_unloaded(omni, "two")
        assert omni.generate("Hi", pipeline="one").text


@lengths.rounds(short=3, long=20)
def test_requests_at_the_moment_of_unloading_are_answered(rounds: int, family: ProcessFamily, tmp_path: Path) -> None:
    with serving(family, toy_pipeline(tmp_path), "--no-http", "--idle-unload", "0.5") as server, Omni(address=server.address()) as omni:
        for number in range(rounds):
            time.sleep(0.45 + 0.01 * (number % 10))
            assert omni.generate("Hi", timeout_s=60).text
        once_unloaded(omni, "toy-of-a-test")
        assert omni.generate("Hi").text


def test_the_only_pipeline_is_loaded_again_after_a_load_that_failed(family: ProcessFamily, tmp_path: Path) -> None:
    words = (toy_pipeline(tmp_path, load_s=1), "--no-http", "--idle-unload", "1")
    with serving(family, *words) as server, Omni(address=server.address()) as omni, ThreadPoolExecutor(1) as pool:
        assert server.report("unloaded ") == f"toy-of-a-test{UNLOADED}"
        answer = pool.submit(omni.generate, "Hi", timeout_s=60)
        deadline = time.monotonic() + 30
        while not (stages := pids_of("omnistage.thinker", family)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(stages[0], signal.SIGKILL)
        assert server.report("failed ").endswith("It is started again in 5 s")
        assert answer.result().text
        assert server.report("serving ") == "toy-of-a-test"


def test_a_pipeline_is_unloaded_that_nobody_asked_before_the_gateway_served(family: ProcessFamily, tmp_path: Path) -> None:
    """Nothing of it counts as missing then: alerts look at these metrics."""
    words = (toy_pipeline(tmp_path), "--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--idle-unload", "0.05")
    with serving(family, *words) as server:
        metrics = server.report("metrics: ")
        assert server.report("unloaded ") == f"toy-of-a-test{UNLOADED}"
        with build_opener(ProxyHandler({})).open(metrics) as page:
            values = re.findall(r"^omnistage_process_up\{process=\"(.+)\"\} (.+)$", page.read().decode(), re.MULTILINE)
        assert dict(values) == {"router": "1.0", "gateway": "1.0", "launcher": "1.0"}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("soon", "--idle-unload soon: expected [PIPELINE=]SECONDS"),
        ("toy=-1", "--idle-unload toy=-1: expected [PIPELINE=]SECONDS"),
        ("nan", "--idle-unload nan: expected [PIPELINE=]SECONDS"),
        ("smool=5", "--idle-unload: there is no pipeline smool; there are toy"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(word: str, text: str) -> None:
    result = omnistage("serve", "toy", "--idle-unload", word)
    assert result.returncode in (1, 2) and text in " ".join(result.stderr.split())
