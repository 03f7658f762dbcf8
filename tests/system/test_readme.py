"""The commands of README.md do what it says of them, as they are typed there; DIR, a picture and the counts of bench are given. So do the
commands of docs/operate.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import soundfile
import typer.main

from helpers import lengths
from helpers.command import omnistage
from helpers.drawings import checkpoint
from helpers.media_files import picture
from helpers.ports import take_address
from helpers.processes import ProcessFamily, StartedProcess
from helpers.sink import Sink
from helpers.surroundings import usual_variables
from omnistage.cli.main import app
from omnistage.client import Omni
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMIT_S = 280.0
BENCH, SHORT_BENCH = "--concurrency 1,4", "--concurrency 1,2 --requests 2 --warmup 0"
SHORT_ANSWER = "--max-tokens 4 --max-frames 24"
"""The limits for random weights, which otherwise speak on until they may not."""
PLAYER = "#!/bin/sh\ncat > played.wav\n"
"""In place of `aplay`, which a machine without sound lacks."""
INSTALLS = ("make wheels", "pip install", "pipx install")
ELSEWHERE = ("git clone", "make demo", "make up", "make down", "docker compose", *INSTALLS)
"""`make demo` runs in the long form; containers are those of test_compose.py, wheels those of test_installed.py."""
WRITES = {"ask": ["geyser.wav"], "say": ["played.wav"], "draw": ["circle.png"]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Each line of a block that is typed into a shell, without what is said of it."""
    lines = [line.partition(" #")[0].strip() for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if re.match(r"(git|make|docker|\.venv/bin/\w+|python|pip|pipx) ", line)]


@pytest.fixture
def reader(tmp_path: Path, family: ProcessFamily, free_port: int) -> Iterator[Path]:
    """A folder that looks like a checkout to who types there, with a picture of a cat."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "build"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "cat.jpg").write_bytes(picture(7, form="JPEG"))
    player = tmp_path / "bin" / "aplay"
    player.parent.mkdir()
    player.write_text(PLAYER)
    player.chmod(0o755)
    yield tmp_path
    typed(".venv/bin/omnistage stop || true", tmp_path, surroundings(tmp_path, free_port))


def surroundings(folder: Path, port: int) -> dict[str, str]:
    """The reader's variables: a port that is free stands for the usual one."""
    address = f"127.0.0.1:{port}"
    ours = usual_variables()
    return {
        **ours,
        "PATH": f"{folder / 'bin'}:{ours['PATH']}",
        "OMNISTAGE_STATE": str(folder / "state"),
        "OMNISTAGE_SERVE_ADDRESS": address,
        "OMNISTAGE_ROUTER": address,
    }


def typed(line: str, folder: Path, variables: Mapping[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(command, cwd=folder, env=variables, input=text, capture_output=True, text=True, timeout=LIMIT_S)


def folder_of(line: str, omni_checkpoint: Path) -> str:
    """The checkpoint that a command stands for, and what makes its answer a short one."""
    match line.split()[1]:
        case "film":
            return f"{checkpoint('wan2.2-t2v')} --frames 5 --size 64x64 --steps 2"
        case "sound":
            return f"{checkpoint('stable-audio')} --steps 2 --seconds 1"
    return f"{omni_checkpoint} {SHORT_ANSWER}"


@lengths.long_form(
    "system/test_readme.py::test_its_python",
    "system/test_readme.py::test_what_it_names_is_there",
    unkept="The commands of the page work as they are typed there, one after the other.",
)
def test_its_commands(reader: Path, free_port: int, omni_checkpoint: Path) -> None:
    variables = surroundings(reader, free_port)
    ran = set[str]()
    for line in commands():
        if line.startswith(ELSEWHERE):
            continue
        asked = line.replace("DIR", folder_of(line, omni_checkpoint)).replace(BENCH, SHORT_BENCH)
        done = typed(asked, reader, variables, "Hi.\n" if line.endswith("chat") else "")
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        ran |= set(re.findall(r"omnistage ([a-z]+)", line))
        for name in WRITES.get(line.split()[1], []) if "DIR" not in line else []:
            assert (reader / name).stat().st_size > 1000, line
    assert (reader / "played.wav").read_bytes()[:4] == b"RIFF"
    assert {"serve", "ask", "say", "draw", "chat", "status", "bench", "stop"} <= ran


def test_its_python(reader: Path, free_port: int) -> None:
    variables = surroundings(reader, free_port)
    started = typed(".venv/bin/omnistage serve smol --detach", reader, variables)
    assert started.returncode == 0, started.stderr
    for number, snippet in enumerate(blocks("python")):
        (reader / f"snippet{number}.py").write_text(snippet, encoding="utf-8")
        done = typed(f".venv/bin/python snippet{number}.py", reader, variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert (reader / "plants.wav").stat().st_size > 1000


def test_what_it_names_is_there() -> None:
    """Targets of make, and commands, also in the middle of a sentence."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", README, re.MULTILINE))
    assert named and named <= targets
    listed = [line.split()[0] for line in typed("make", ROOT, usual_variables()).stdout.splitlines()]
    assert sorted(listed) == sorted(targets), "`make` lists the targets"
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    assert [line for line in commands() if line.startswith(INSTALLS) and line not in page] == []
    help_text = typed(f"{sys.executable} -m omnistage.cli --help", ROOT, usual_variables()).stdout
    for command in set(re.findall(r"(?:`|bin/)omnistage ([a-z][a-z-]*)", README)):
        assert re.search(rf"\b{command}\b", help_text), command


@pytest.mark.parametrize("target", [pytest.param("demo", marks=lengths.LONG)])
def test_its_first_commands_in_a_new_clone(target: str, tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no clone can be made of what is no clone")
    sink = Sink(tmp_path / "sink", speed=0.0)
    clone = f"git clone --quiet {ROOT} omnistage && cd omnistage && make {target} PYTHON={sys.executable}"
    done = typed(clone, tmp_path, {**usual_variables(), "CI": "true", "OMNISTAGE_PLAYER": sink.variable})
    assert done.returncode == 0, done.stdout + done.stderr
    samples, rate_hz = soundfile.read(tmp_path / "omnistage" / "demo.wav", dtype="float32")
    assert sink.rate_hz == rate_hz and len(sink.samples()) == len(samples) > rate_hz, "it is heard, whole"


PAGE = Path(__file__).parents[2] / "docs" / "operate.md"


def block(heading: str) -> list[str]:
    """The commands of the first block below a heading."""
    below = PAGE.read_text().partition(f"\n{heading}\n")[2]
    found = re.search(r"```\n(.*?)```", below, re.DOTALL)
    assert found is not None
    return [line for line in found[1].splitlines() if line and not line.startswith("#")]


def test_two_hosts_by_hand(family: ProcessFamily, tmp_path: Path) -> None:
    """Two addresses of the loopback network stand for the hosts, free ports for the ports, and the toy for the model."""
    commands = block("## Two hosts by hand")
    ports = {port: take_address().rpartition(":")[2] for port in ("50050", "50051", "50052", "50053")}

    def here(line: str) -> str:
        line = line.partition("    #")[0].replace("a.example", "127.0.0.1").replace("b.example", "127.0.0.2")
        line = line.replace("smol", "toy").replace("python ", f"{shlex.quote(sys.executable)} ")
        return re.sub(r"\b5005[0-3]\b", lambda found: ports[found[0]], line)

    secret, export, *servers = map(here, commands)
    assert export == "export OMNISTAGE_TOKEN_FILE=token"
    subprocess.run(["sh", "-c", secret], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    environment = {name: value for name, value in os.environ.items() if name != "OMNISTAGE_TOKEN"}
    environment["OMNISTAGE_TOKEN_FILE"] = "token"
    assert [line.split()[2] for line in servers] == ["omnistage.code2wav", "omnistage.talker", "omnistage.thinker", "omnistage.router"]
    with ExitStack() as running:
        started = []
        for number, line in enumerate(servers):
            log = running.enter_context((tmp_path / f"{number}.log").open("wb"))
            started.append(running.enter_context(StartedProcess(shlex.split(line), cwd=tmp_path, env=environment, stdout=log, stderr=log)))
        try:
            with Omni(address=f"127.0.0.1:{ports['50050']}", connect_timeout_s=60) as omni:
                deadline = time.monotonic() + 60
                while not omni.pipelines():  # The router waits for its stages.
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                answer = omni.generate("Hi", seed=1)
                assert answer.audio is not None
                assert {replica.address.rpartition(":")[0] for replica in omni.replicas()} == {"127.0.0.1", "127.0.0.2"}
        finally:
            for server in started:
                server.terminate()
        assert [server.wait(60) for server in started] == [0] * 4, [path.read_text() for path in tmp_path.glob("*.log")]


def test_the_file_of_the_page_is_one(tmp_path: Path) -> None:
    """And the page names every setting by its right name."""
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "stack.yaml").write_text(found[1])
    done = omnistage("serve", "--config", "stack.yaml", "--print-config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replicas: {talker: 2}  # the file" in done.stdout
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    there = {option for name in ("serve", "stop", "bench", "logs") for one in commands[name].params for option in one.opts}
    servers = {f"--{name.replace('_', '-')}" for name in (*StageSettings.model_fields, *RouterSettings.model_fields)}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE.read_text())) <= there | servers
