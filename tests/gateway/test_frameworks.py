"""Frameworks that speak to OpenAI get a whole answer of ours when their base URL is changed: LangChain, pipecat, LiveKit.

Each is installed by pip into an environment of its own, which takes half a minute and half a GB."""

from __future__ import annotations

import subprocess
import venv
import wave
from pathlib import Path

import pytest

from helpers import lengths
from omnistage.models.toy import formulas

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "openai" / "python"
PACKAGES = {
    "langchain_chat": ("langchain-openai==1.7.4",),
    "pipecat_voice": ("pipecat-ai[openai]==1.14.0",),
    "livekit_voice": ("livekit-agents==1.8.9", "livekit-plugins-openai==1.8.9"),
}
INSTALL_LIMIT_S, ASK_LIMIT_S = 400, 100


def run(words: list[str], folder: Path, limit_s: float) -> str:
    ended = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s)
    told = ended.stdout.decode(errors="replace")
    assert ended.returncode == 0, told[-4000:]
    return told


@lengths.long_form(
    "gateway/test_openai_examples.py::test_it_talks_speaks_and_draws",
    "gateway/test_chat.py::test_the_client_puts_a_stream_together",
    unkept="each of these frameworks gets an answer",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", PACKAGES)
def test_a_framework_is_answered(example: str, url: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", *PACKAGES[example]], tmp_path, INSTALL_LIMIT_S)
    told = run([python, str(EXAMPLES / f"{example}.py"), url, "toy", "What is a kite?"], tmp_path, ASK_LIMIT_S)
    words = [word for word in told.split() if word.startswith("w") and word[1:].isdecimal()]
    if example == "langchain_chat":
        assert len(words) == formulas.NATURAL_LENGTH
        return
    with wave.open(str(tmp_path / "answer.wav")) as sound:
        assert sound.getframerate() == formulas.SAMPLE_RATE_HZ
        assert sound.getnframes() > 0
