"""The commands of docs/operate.md, typed as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import typer.main

from helpers.command import omnistage
from helpers.ports import take_address
from helpers.processes import ProcessFamily, StartedProcess
from omnistage.cli.main import app
from omnistage.client import Omni
from omnistage.router.settings import RouterSettings
from omnistage.stage.settings import StageSettings

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
    there = {option for name in ("serve", "stop", "bench") for one in commands[name].params for option in one.opts}
    servers = {f"--{name.replace('_', '-')}" for name in (*StageSettings.model_fields, *RouterSettings.model_fields)}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE.read_text())) <= there | servers
