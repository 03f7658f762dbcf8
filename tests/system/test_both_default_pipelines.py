"""One `omnistage serve` that talks and draws: a client in any language asks one address, and need not name a pipeline."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from helpers import lengths
from helpers.command import omnistage
from helpers.example import Example
from helpers.gateway import gateway
from helpers.processes import ProcessFamily, StartedProcess
from helpers.waiting import until
from omnistage.client import AsyncOmni, Omni
from omnistage.client.files import to_pcm16
from tools.examples import LANGUAGES, build

pytestmark = [
    pytest.mark.timeout(400),
    lengths.long_form(
        "cli/test_several.py::test_one_address_answers_and_draws",
        "router/test_choice.py::test_one_router_in_front_of_several_chains",
        "system/test_default_model.py::test_the_words_in_the_sound_are_the_words_on_the_screen",
        "models/diffusers/test_default_picture.py::test_a_picture_follows_its_prompt",
    ),
]

DRAWN = "a large red circle on a blue background"
QUESTION = "What is a kite?"
SEED = 7


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """HOST:PORT of a stack of both, when both are ready."""
    family = ProcessFamily()
    command = [sys.executable, "-m", "omnistage.cli", "serve", "smol", "picture", "--address", "127.0.0.1:0"]
    with StartedProcess(command, stderr=subprocess.PIPE, text=True, env=family.environment) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line.startswith("serving on "), line + server.stderr.read()
        address = line.split()[2]
        with Omni(address=address) as omni:
            asyncio.run(until(lambda: [one.state for one in omni.pipelines()] == ["ready"] * 2))
        yield address
        server.terminate()
        server.communicate(timeout=60)
    assert family.wait_ended() == []


def check_drawn(data: bytes) -> None:
    """Red on blue."""
    with Image.open(io.BytesIO(data)) as image:
        shown = np.asarray(image.convert("RGB"))
    assert shown[shown.shape[0] // 2, shown.shape[1] // 2].argmax() == 0 and shown[2, 2].argmax() == 2


def test_python_talks_and_draws(address: str) -> None:
    with Omni(address=address) as omni:
        answer = omni.generate(QUESTION, seed=SEED, max_tokens=8)
        assert (answer.pipeline, answer.audio is not None) == ("smol", True) and answer.text
        drawing = omni.draw(DRAWN, seed=SEED)
        assert drawing.pipeline == "picture"
        check_drawn(drawing.pictures[0].data)
        prompt = omni.generate(DRAWN, seed=SEED, outputs=["image"])
        assert (prompt.pipeline, prompt.pictures[0].data) == ("picture", drawing.pictures[0].data)
        said = omni.say("Good morning.")
        assert (said.pipeline, said.audio is not None) == ("smol", True)


async def test_they_do_so_at_once(address: str) -> None:
    """Each gives what it gives alone."""
    async with AsyncOmni(address=address) as omni:
        drawn, told = await omni.draw(DRAWN, seed=SEED), await omni.generate(QUESTION, seed=SEED, max_tokens=8)
        both = await asyncio.gather(omni.generate(QUESTION, seed=SEED, max_tokens=8), omni.draw(DRAWN, seed=SEED))
    assert (both[0].text, both[1].pictures[0].data) == (told.text, drawn.pictures[0].data)
    assert both[0].audio is not None and told.audio is not None
    assert np.array_equal(both[0].audio.samples, told.audio.samples)


def test_the_command_talks_and_draws(address: str, tmp_path: Path) -> None:
    """It finds the router, as the one that runs, and starts nothing."""
    variables = {"OMNISTAGE_ROUTER": address}
    asked = omnistage("ask", QUESTION, "--max-tokens", "8", "--seed", str(SEED), "--json", variables=variables)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["pipeline"] == "smol"
    drawn = omnistage("draw", DRAWN, "--seed", str(SEED), "--out", tmp_path / "kite.png", "--json", variables=variables)
    assert drawn.returncode == 0, drawn.stderr
    assert json.loads(drawn.stdout)["pipeline"] == "picture"
    check_drawn((tmp_path / "kite.png").read_bytes())
    status = omnistage("status", "--json", variables=variables)
    assert {one["pipeline"] for one in json.loads(status.stdout)["replicas"]} == {"smol", "picture"}


def test_openai_talks_and_draws(address: str, tmp_path: Path) -> None:
    """By the names of OpenAI's models and voices, which stand for what is here."""
    with Omni(address=address) as omni:
        said = omni.say("Good morning.", seed=SEED)
        drawing = omni.draw(DRAWN, seed=SEED)
    assert said.audio is not None
    seed = {"seed": SEED}
    with gateway(address, tmp_path) as door, openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="test", max_retries=0) as client:
        spoken = client.audio.speech.create(model="tts-1", voice="nova", input="Good morning.", response_format="pcm", extra_body=seed)
        assert spoken.content == to_pcm16(said.audio.samples)
        with pytest.raises(openai.BadRequestError, match="input"):
            client.audio.speech.create(model="tts-1", voice="nova", input="🙂")
        for form in ("png", "jpeg", "webp"):
            drawn = client.images.generate(model="gpt-image-1", prompt=DRAWN, output_format=form, extra_body=seed)
            assert drawn.data is not None and drawn.data[0].b64_json is not None
            data = b64decode(drawn.data[0].b64_json)
            assert drawn.output_format == form
            check_drawn(data)
            assert form != "png" or data == drawing.pictures[0].data
        stream = client.images.generate(model="dall-e-3", prompt=DRAWN, stream=True, partial_images=3, extra_body=seed)
        shown = [b64decode(event.b64_json) for event in stream]
        assert len(set(shown)) == 4 and shown[-1] == drawing.pictures[0].data


def test_a_size_that_programs_send_is_that_of_the_picture_and_said(address: str, tmp_path: Path) -> None:
    """Also where only the prompt that was drawn is shown."""
    note = "drawn at 128x128, the size of this model, and enlarged to 1024x1024"
    with gateway(address, tmp_path) as door, openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="test", max_retries=0) as client:
        plain = client.images.generate(model="gpt-image-1", prompt=DRAWN, extra_body={"seed": SEED})
        sized = client.images.generate(model="gpt-image-1", prompt=DRAWN, size="1024x1024", extra_body={"seed": SEED})
        assert plain.data is not None and sized.data is not None and sized.data[0].b64_json is not None
        assert (plain.to_dict()["notes"], plain.data[0].revised_prompt) == ([], None)
        assert (sized.to_dict()["notes"], sized.data[0].revised_prompt) == ([note], f"{DRAWN} ({note})")
        with Image.open(io.BytesIO(b64decode(sized.data[0].b64_json))) as image:
            assert image.size == (1024, 1024)
        for drawing in (plain, sized):
            assert drawing.usage is not None and drawing.usage.input_tokens == drawing.usage.total_tokens > len(DRAWN.split()) / 2
        *_, last = client.images.generate(model="dall-e-3", prompt=DRAWN, size="1024x1024", stream=True, extra_body={"seed": SEED})
        assert last.to_dict()["notes"] == [note]
        with pytest.raises(openai.BadRequestError, match="at most 4194304 pixels") as refused:
            client.images.generate(model="gpt-image-1", prompt=DRAWN, size="4096x4096", extra_body={"seed": SEED})
        assert refused.value.param == "size"
        with pytest.raises(openai.BadRequestError, match="no pipeline here can make films; serve a checkpoint that does, such as Wan"):
            client.post("/videos", body={"prompt": DRAWN}, cast_to=object)
        look: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{plain.data[0].b64_json}"}}
        with pytest.raises(openai.BadRequestError, match=r"not .image/png.; leave it out; serve a .* such as Qwen2\.5-Omni") as unseen:
            client.chat.completions.create(model="smol", messages=[{"role": "user", "content": [look]}])
        assert unseen.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.skipif(shutil.which("node") is None or shutil.which("npm") is None, reason="Node is not on this machine")
def test_node_talks_and_draws(address: str, tmp_path: Path) -> None:
    example = Example(build(LANGUAGES["node"]), tmp_path)
    status, out, err = example.run(address, str(SEED))
    assert (status, err) == (0, "") and out.strip()
    assert (tmp_path / "answer.wav").stat().st_size > 44
    status, _, err = example.run(address, str(SEED), "", "image")
    assert (status, err) == (0, "")
    with Image.open(tmp_path / "picture.png") as image:
        assert image.size == (128, 128)
