"""`omnistage serve` with several pipelines: one address, one after the other, each by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from helpers import lengths
from helpers.command import omnistage
from helpers.hanging import ENVIRONMENT
from helpers.loading import loading_pipeline, reading
from helpers.output import COMMAND
from helpers.processes import ProcessFamily, StartedProcess
from helpers.serving import serving
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.console import Notices
from omnistage.cli.stack.layout import Layout, PipelineLayout, ServerOptions, StageLayout, by_stage
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.served import announce
from omnistage.client import Omni
from omnistage.client.connection import LOCAL_ADDRESS
from omnistage.client.errors import BadRequestError, StackError
from omnistage.client.private_stack import StackPlan
from omnistage.models.toy import formulas


def test_one_address_answers_and_draws(family: ProcessFamily) -> None:
    """Each in its turn; nobody names a pipeline."""
    with serving(family, "toy", "toy-picture", "--replicas", "talker=2") as server, Omni(address=server.address()) as omni:
        assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
        assert server.report("serving ") == "toy-picture"
        assert len(omni.draw("a kite", seed=1).pictures) == 1
        assert [(one.name, one.state) for one in omni.pipelines()] == [("toy", "ready"), ("toy-picture", "ready")]


def test_the_end_takes_a_pipeline_along_that_is_starting(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    with serving(family, "toy", str(file), environment=ENVIRONMENT) as server:
        server.address()
        with reading(pipe):
            server.terminate()
            assert server.wait(30) == 0


def test_one_that_cannot_start_is_told_and_the_others_go_on(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    pipe.unlink()  # The file that its model is to read is missing.
    with serving(family, toy_pipeline(tmp_path, "one"), str(file), toy_pipeline(tmp_path, "two"), environment=ENVIRONMENT) as server:
        address = server.address()
        failed = server.report("failed ")
        assert failed.startswith("loading: loading-thinker ") and failed.endswith("It is started again in 5 s")
        assert server.report("serving ") == "two"
        with Omni(address=address) as omni:
            assert omni.generate("Hi", pipeline="one").text and omni.generate("Hi", pipeline="two").text
            assert {one.name: one.state for one in omni.pipelines()} == {"one": "ready", "two": "ready", "loading": "starting"}
        assert server.report("failed ").endswith("It is started again in 10 s")


@lengths.long_form("cli/test_several.py::test_one_that_cannot_start_is_told_and_the_others_go_on", unkept="also one that has served")
def test_one_that_was_given_up_is_started_again(family: ProcessFamily, tmp_path: Path) -> None:
    file, pipe = loading_pipeline(tmp_path)
    with serving(family, "toy-picture", str(file), environment=ENVIRONMENT) as server:
        address = server.address()
        with reading(pipe):
            pass
        assert server.report("serving ") == "loading"
        others = set(family.pids())
        with Omni(address=address) as omni:
            assert omni.generate("Hi", pipeline="loading").text  # So that the router knows its process.
            (pid,) = (replica.pid for replica in omni.replicas() if replica.pipeline == "loading")
            pipe.unlink()
            os.kill(pid, signal.SIGKILL)
            assert server.report("given up ").startswith("thinker ")
            assert server.report("failed ").endswith("It is started again in 5 s")
            assert set(family.pids()) == others - {pid}
            os.mkfifo(pipe)
            with reading(pipe):
                pass
            assert server.report("serving ") == "loading"
            assert omni.generate("Hi", pipeline="loading").text


@lengths.long_form(
    "cli/test_several.py::test_an_equal_stage_counts_once_in_all_that_is_told_to_the_router",
    "router/test_placement.py::test_a_replica_counts_once_however_many_pipelines_have_it",
    unkept="both pipelines answer by one process",
)
def test_equal_stages_of_two_pipelines_are_the_same_processes(family: ProcessFamily, tmp_path: Path) -> None:
    words = (toy_pipeline(tmp_path, "one"), toy_pipeline(tmp_path, "two"), toy_pipeline(tmp_path, "three", length=5))
    with serving(family, *words, "--log-dir", str(tmp_path / "logs")) as server:
        address = server.address()
        assert [server.report("serving ") for _ in range(2)] == ["two", "three"]
        with Omni(address=address) as omni:
            one, two, three = (omni.generate("Hi", seed=1, pipeline=name).text for name in ("one", "two", "three"))
            pids = {replica.pipeline: replica.pid for replica in omni.replicas()}
        assert one == two != three
        assert pids["one"] == pids["two"] != pids["three"]
        os.kill(pids["one"], signal.SIGKILL)
        assert server.report("lost ").startswith(f"one-thinker (pid {pids['one']}) ")
        assert server.report("restarted ").startswith("one-thinker ")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["one-thinker.log", "router.log", "three-thinker.log"]


def test_a_setting_is_for_a_stage_of_one_pipeline_or_of_all(tmp_path: Path) -> None:
    choice = Choice(
        [toy_pipeline(tmp_path, "one"), toy_pipeline(tmp_path, "two", length=5)],
        replicas=by_stage(["thinker=2", "two/thinker=3"], "--replicas"),
        settings={"gpu_memory_utilization": by_stage(["0.5", "thinker=0.6", "one/thinker=0.7"], "--gpu-memory-utilization")},
    )
    one, two = (pipeline.stages[0] for pipeline in layout_of(choice).pipelines)
    assert (one.replicas, two.replicas) == (2, 3)
    assert (one.settings, two.settings) == ({"gpu_memory_utilization": "0.7"}, {"gpu_memory_utilization": "0.6"})


def test_what_no_stage_has_and_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    files = [toy_pipeline(tmp_path, "one"), toy_pipeline(tmp_path, "two", length=5)]
    for choice, message in (
        (Choice(files, devices={"talker": "cpu"}), "--device: one has no talker; it has thinker; two has no talker; it has thinker"),
        (Choice(files, devices={"one/talker": "cpu"}), "--device: one has no talker; it has thinker"),
        (Choice(files, devices={"three/thinker": "cpu"}), "--device: there is no pipeline three; there are one, two"),
        (Choice([files[0], files[0]]), "PIPELINE: there are two pipelines one: leave one out"),
        (Choice(files, {"": "/"}), "/ is for one pipeline of one, two: give one=/"),
        (Choice(files, {"three": "/"}), "--checkpoint: there is no pipeline three; there are one, two"),
    ):
        with pytest.raises(BadRequestError, match=re.escape(message)):
            layout_of(choice)
    with pytest.raises(StackError, match="the models of toy have no weights"):
        layout_of(Choice(files, {"two": "/"}))


def test_a_checkpoint_of_one_that_is_left_out_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # As where it is not installed.
    with pytest.raises(BadRequestError, match="--checkpoint: picture is left out: it needs diffusers; there are smol"):
        layout_of(Choice(checkpoints={"picture": "/"}))


def test_an_equal_stage_counts_once_in_all_that_is_told_to_the_router() -> None:
    stages = [StageLayout("thinker", "toy"), StageLayout("talker", "toy")]
    layout = Layout([PipelineLayout("a", "a", stages), PipelineLayout("b", "b.yaml", stages[:1])])
    assert [(group.name, group.pipelines) for group in layout.groups] == [("thinker", ("a", "b")), ("talker", ("a",))]


def test_processes_are_named_by_their_pipeline_only_where_another_one_has_such_a_stage() -> None:
    a = PipelineLayout("a", "a", [StageLayout("thinker", "toy"), StageLayout("talker", "toy", replicas=2)])
    b = PipelineLayout("b", "b", [StageLayout("thinker", "smol"), StageLayout("diffusion", "toy")])
    names = [name for group in Layout([a, b]).groups for name in group.names]
    assert names == ["a-thinker", "talker-0", "talker-1", "b-thinker", "diffusion"]


@pytest.mark.parametrize(
    ("address", "named", "ended"),
    [
        (LOCAL_ADDRESS, "", ""),
        ("[::1]:7", " --address [::1]:7", " [::1]:7"),
        ("0.0.0.0:50050", "", ""),
        ("0.0.0.0:7", " --address 127.0.0.1:7", " 127.0.0.1:7"),
    ],
)
def test_a_stack_is_announced_alike_wherever_it_runs(capsys: pytest.CaptureFixture[str], address: str, named: str, ended: str) -> None:
    """Commands are told the address where they do not find it by themselves: one that can be asked, also of who listens everywhere."""
    shown = []
    options = ServerOptions(http="0.0.0.0:8000", idle_limit_s=1800)
    layout = Layout([PipelineLayout(name, name, []) for name in ("one", "two", "three")], options)
    for pid in (0, 7):
        announce(Notices(), address, layout, pid=pid, http="0.0.0.0:8001", metrics="0.0.0.0:9", log_folder="/logs")
        first, *rest = capsys.readouterr().err.splitlines()
        end = f"pid 7; `omnistage stop{ended}` ends it" if pid else "Ctrl-C ends it"
        assert first == f"serving on {address}   ({end})"
        shown.append(rest)
    lines = [
        "page:     http://127.0.0.1:8001   (the port of 0.0.0.0:8000 is taken; OpenAI's interface is below /v1; any key is taken)",
        f'ask it:   omnistage ask "What is a kite?"{named}',
        f"starting: two, three; `omnistage status{named}` shows how far",
        "metrics:  http://127.0.0.1:9/metrics",
        "logs:     /logs",
        "idle:     it ends by itself when nobody has asked for 1800 s",
    ]
    assert shown == [lines, lines]
    announce(Notices(), address, Layout([PipelineLayout("drawing", "drawing", [StageLayout("diffusion", "diffusers")])]))
    told = f'ask it:   omnistage draw "A hill in the rain."{named}   (or film, or sound: `omnistage pipelines{named}` shows which)'
    assert told in capsys.readouterr().err.splitlines()


def test_a_terminal_of_any_width_shows_addresses_and_commands_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawing = PipelineLayout("drawing", "drawing", [StageLayout("diffusion", "diffusers")])
    layout = Layout([drawing, drawing], ServerOptions(http="0.0.0.0:8000"))
    folder = "/var/log/somebody/with/a/folder/that/is/longer/than/any/line/of/a/terminal/may/be/logs"
    for columns in range(80, 121):
        monkeypatch.setenv("COLUMNS", str(columns))
        announce(Notices(), "127.0.0.1:50051", layout, pid=7, http="0.0.0.0:8001", metrics="0.0.0.0:9", log_folder=folder)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).splitlines()
        commands = ("stop", 'draw "A hill in the rain." --address', "pipelines --address")
        texts = ["http://127.0.0.1:8001", folder, "/v1;", *(f"omnistage {command} 127.0.0.1:50051" for command in commands)]
        assert [text for text in texts if not any(text in line for line in lines)] == [], lines
        assert all(len(line) <= columns for line in lines if folder not in line), lines


def test_several_pipelines_are_a_setting_like_any_other(tmp_path: Path) -> None:
    def printed(*words: str, **variables: str) -> dict[str, object]:
        done = omnistage("serve", *words, "--print-config", variables=variables)
        assert done.returncode == 0, done.stderr
        settings: dict[str, object] = yaml.safe_load(done.stdout)
        return settings

    file, again = tmp_path / "stack.yaml", tmp_path / "again.yaml"
    several = {"pipeline": ["toy", "toy-picture"], "device": {"toy-picture/diffusion": "cpu", "all": "cpu"}}
    several |= {"checkpoint": {"toy": "/a", "toy-picture": "/b"}}
    file.write_text(yaml.safe_dump(several))
    settings = printed("--config", str(file))
    assert {name: settings[name] for name in several} == several
    assert printed("--config", str(file), OMNISTAGE_SERVE_PIPELINE="toy toy-film")["pipeline"] == ["toy", "toy-film"]
    assert printed("toy", "--config", str(file))["pipeline"] == "toy"
    again.write_text(yaml.safe_dump(settings))
    assert printed("--config", str(again)) == settings


@lengths.long_form("client/test_private_stack.py::test_it_is_started_once_for_all_threads_that_ask", unkept="bad lines get an error")
def test_an_owner_asks_for_pipelines_and_hears_of_each(family: ProcessFamily, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMNISTAGE_SERVE_HTTP": "127.0.0.1:0"}  # All the same it takes none: it has an owner.
    command = [*COMMAND, "launch", str(theirs.fileno())]
    with StartedProcess(command, pass_fds=(theirs.fileno(),), env=environment) as server:
        theirs.close()
        with ours, ours.makefile("rw", encoding="utf-8") as owner:
            print(json.dumps(StackPlan({"pipeline": ["toy-picture", toy_pipeline(tmp_path, "one")]}).order), file=owner, flush=True)
            said = json.loads(owner.readline())
            assert said["http"] == ""
            with Omni(address=said["address"]) as omni:
                assert {one.name: one.state for one in omni.pipelines()} == {"toy-picture": "ready", "one": "starting"}
                print('not json\n["one"]\n{"begin": "one"}\n{"start": "toy-picture"}', file=owner, flush=True)
                answers = [json.loads(owner.readline()) for _ in range(4)]
                assert ["error" in said for said in answers] == [True] * 3 + [False]
                for name in ("none", "one", "one", "toy-picture"):
                    print(json.dumps({"start": name}), file=owner, flush=True)
                    said = json.loads(owner.readline())
                    assert said["pipeline"] == name
                    assert ("error" in said) == (name == "none"), said
                assert omni.generate("Hi", pipeline="one").text
            ours.shutdown(socket.SHUT_WR)
            assert owner.readline() == ""
        assert server.wait(30) == 0
    assert family.pids() == []
