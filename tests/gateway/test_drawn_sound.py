"""Sound of a prompt over HTTP: that of the toy film maker, whose samples are known beforehand."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from helpers import servers
from helpers.gateway import gateway
from helpers.openai_document import events_of
from omnistage.models.toy import film, formulas

PROMPT = "rain"
SEED = 5
SECONDS = 1.5


@pytest.fixture(scope="module")
def film_maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    with servers.stack(tmp_path_factory.mktemp("film"), kinds=["diffusion"], pipeline="toy-film", family="toy-film") as stack:
        yield stack


@pytest.fixture(scope="module")
def url(film_maker: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(film_maker.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}"


def sound(seconds: float = SECONDS, negative: str = "") -> NDArray[np.int16]:
    """The sound that must come."""
    steer = formulas.steer(PROMPT, negative, film.GUIDANCE)
    samples = formulas.film_sound(SEED, steer, 0, round(seconds * formulas.SAMPLE_RATE_HZ))[:, 0]
    return np.round(samples * 32768).astype(np.int16)


def post(url: str, **body: Any) -> httpx2.Response:
    asked = {"prompt": PROMPT, "seed": SEED, "seconds": SECONDS, **body}
    return httpx2.post(f"{url}/v1/audio/generate", json={name: value for name, value in asked.items() if value is not None})


@pytest.mark.parametrize(("form", "kind"), [("wav", "audio/wav"), ("flac", "audio/flac"), ("pcm", "audio/pcm"), (None, "audio/wav")])
def test_samples_are_those_of_the_formula(form: str | None, kind: str, url: str) -> None:
    answer = post(url, response_format=form, negative_prompt="wind", steps=3)
    assert answer.headers["content-type"] == kind and "content-length" not in answer.headers
    if form == "pcm":
        samples = np.frombuffer(answer.content, "<i2")
    else:
        samples, rate_hz = soundfile.read(io.BytesIO(answer.content), dtype="int16")
        assert rate_hz == formulas.SAMPLE_RATE_HZ
    np.testing.assert_array_equal(samples, sound(negative="wind"))


@pytest.mark.parametrize(("form", "kind"), [("opus", "audio/ogg"), ("mp3", "audio/mpeg"), ("aac", "audio/aac")])
def test_other_files_are_as_long(form: str, kind: str, url: str) -> None:
    answer = post(url, response_format=form)
    assert answer.headers["content-type"] == kind
    with av.open(io.BytesIO(answer.content), "r") as file:
        lengths = [frame.samples / frame.sample_rate for frame in file.decode(audio=0)]
    assert sum(lengths) == pytest.approx(SECONDS, abs=0.1)


def test_events_tell_how_far_it_is_and_have_the_file(url: str) -> None:
    events = list(events_of(post(url, stream_format="sse", response_format="pcm").text))
    kinds = [data["type"] for _, data in events]
    steps = [data["done"] for _, data in events if data["type"] == "omnistage.progress"]
    assert steps == list(range(1, film.STEPS + 1)) and kinds[-1] == "audio.done" and kinds.count("audio.delta") > 1
    whole = b"".join(b64decode(data["audio"]) for _, data in events if data["type"] == "audio.delta")
    np.testing.assert_array_equal(np.frombuffer(whole, "<i2"), sound())
    done = events[-1][1]
    assert (done["seed"], done["pipeline"]) == (SEED, "toy-film") and done["usage"]["stages"][0]["stage"] == "diffusion"


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": 11}, "seconds"),
        ({"seconds": 3601}, "seconds"),
        ({"seconds": "long"}, "seconds"),
        ({"begin_s": -1}, "begin_s"),
        ({"steps": 1001}, "steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"seed": 1 << 64}, "seed"),
        ({"response_format": "midi"}, "response_format"),
        ({"voice": "alloy"}, "voice"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(asked: dict[str, Any], param: str, stream_format: str, url: str) -> None:
    answer = post(url, stream_format=stream_format, **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and param in error["message"]


def test_who_makes_no_sound_of_a_prompt_says_so(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    """A pipeline that speaks does not."""
    with gateway(toy.address, tmp_path) as server:
        answer = post(f"http://{server.address}", model="toy")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["hint"]) == (400, "unsupported", "Ask POST /v1/chat/completions for it.")
        assert "toy cannot make sound of a prompt" in error["message"]
