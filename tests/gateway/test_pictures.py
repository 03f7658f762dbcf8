"""Pictures and sound of a prompt over HTTP, as OpenAI's own client sees them: those of the toy film maker, which are known beforehand."""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray

from helpers import servers
from helpers.gateway import gateway
from helpers.openai_document import document, events_of
from helpers.waiting import until
from helpers.web import web
from omnistage.models.toy import film, formulas
from omnistage.models.toy.files import pixels_of, png

PROMPT = "a cat"
SEED = 5
SKETCH = np.add.outer(np.arange(16), 3 * np.arange(16)).astype(np.uint8)
URL_OF_SKETCH = "data:image/png;base64," + b64encode(png(SKETCH)).decode()


@pytest.fixture(scope="module")
def url(film_url: str) -> str:
    """Also of `client`."""
    return film_url


def drawn(
    seed: int = SEED, *, result: int = 0, layer: int = 0, side: int = film.SIDE, shown: int = 0, steps: int = film.STEPS, negative: str = ""
) -> NDArray[np.uint8]:
    """A finished picture as it must be. shown: the sum of the pixels that were given."""
    begun = formulas.noise(seed, np.array([result]), np.arange(side), np.arange(side))[0]
    return formulas.layer(formulas.latent_after(begun, formulas.steer(PROMPT, negative, film.GUIDANCE, shown), steps), layer)


def pixels(b64_json: str | None) -> NDArray[np.uint8]:
    assert b64_json is not None
    return pixels_of(b64decode(b64_json))


def post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/images/{path}", json=body)


def error_of(answer: httpx2.Response) -> tuple[int, str | None]:
    """Its status, and the parameter that it names."""
    return answer.status_code, answer.json()["error"]["param"]


def test_pictures_are_those_of_the_formula(client: openai.OpenAI) -> None:
    ours = {"seed": SEED, "steps": 3, "negative_prompt": "dog"}
    answer = client.images.generate(model="gpt-image-1", prompt=PROMPT, n=2, quality="high", user="ann", extra_body=ours)
    assert answer.data is not None and answer.output_format == "png" and answer.background == "opaque"
    for number, picture in enumerate(answer.data):
        np.testing.assert_array_equal(pixels(picture.b64_json), drawn(result=number, steps=3, negative="dog"))
    assert answer.model_dump()["seed"] == SEED


async def test_the_asynchronous_client_and_a_size(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test", max_retries=0) as client:
        answer = await client.images.generate(model="toy-film", prompt=PROMPT, size="24x24", output_format="png", extra_body={"seed": SEED})
    assert answer.data is not None and answer.size == "24x24"
    np.testing.assert_array_equal(pixels(answer.data[0].b64_json), drawn(side=24))


def test_a_seed_that_is_told_draws_the_same_again(client: openai.OpenAI) -> None:
    first = client.images.generate(prompt=PROMPT)
    again = client.images.generate(prompt=PROMPT, extra_body={"seed": first.model_dump()["seed"]})
    assert first.data is not None and again.data is not None and first.data[0].b64_json == again.data[0].b64_json


def test_layers_come_one_by_one(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt=PROMPT, n=2, background="transparent", extra_body={"seed": SEED, "layers": 3})
    assert answer.data is not None and [picture.model_dump()["layer"] for picture in answer.data] == [0, 1, 2] * 2
    for number, picture in enumerate(answer.data):
        np.testing.assert_array_equal(pixels(picture.b64_json), drawn(result=number // 3, layer=number % 3))


@pytest.mark.parametrize("said", [{"model": "dall-e-3"}, {"model": "gpt-image-1", "response_format": "url"}])
def test_a_url_stands_for_a_picture(said: dict[str, str], client: openai.OpenAI, url: str) -> None:
    """The one that was called: by a name, where it was called by that."""
    named = url.replace("127.0.0.1", "localhost")
    answer = client.with_options(base_url=f"{named}/v1").images.generate(prompt=PROMPT, extra_body={"seed": SEED}, **said)  # type: ignore[call-overload]
    (picture,) = answer.data
    assert picture.b64_json is None and picture.url.startswith(f"{named}/v1/images/files/") and picture.url.endswith(".png")
    file = httpx2.get(picture.url)
    np.testing.assert_array_equal(pixels_of(file.content), drawn())
    wanted = {"content-type": "image/png", "cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}
    wanted["content-security-policy"] = "default-src 'none'; sandbox"
    assert {name: file.headers[name] for name in wanted} == wanted


def test_nobody_finds_a_picture_without_its_name(url: str) -> None:
    answer = httpx2.get(f"{url}/v1/images/files/guessed.png")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_partial_images_change_until_they_are_the_finished_one(client: openai.OpenAI) -> None:
    """The toy's previews have 16 shades."""
    stream = client.images.generate(prompt=PROMPT, stream=True, partial_images=3, extra_body={"seed": SEED})
    *partial, completed = list(stream)
    shown = []
    for number, event in enumerate(partial):
        assert event.type == "image_generation.partial_image" and event.partial_image_index == number
        shown.append(pixels(event.b64_json))
    assert len(shown) == 3 and not any(np.array_equal(*pair) for pair in pairwise(shown))
    assert completed.type == "image_generation.completed" and completed.usage.total_tokens == 0
    np.testing.assert_array_equal(pixels(completed.b64_json), drawn())
    np.testing.assert_array_equal(shown[-1], drawn() // 16 * 16)


def test_each_of_several_is_completed(client: openai.OpenAI) -> None:
    events = list(client.images.generate(prompt=PROMPT, stream=True, n=3, extra_body={"seed": SEED}))
    assert [event.type for event in events] == ["image_generation.completed"] * 3
    for number, event in enumerate(events):
        np.testing.assert_array_equal(pixels(event.b64_json), drawn(result=number))


def test_events_of_ours_come_to_whoever_asks(url: str) -> None:
    body = post(url, "generations", prompt=PROMPT, stream=True, partial_images=1, include_events=True).text
    events = list(events_of(body))
    assert all(name == data["type"] for name, data in events)
    progress = [data for name, data in events if name == "omnistage.progress"]
    assert progress == [{"type": "omnistage.progress", "done": step, "total": film.STEPS} for step in range(1, film.STEPS + 1)]
    usage = events[-1][1]
    assert usage["pipeline"] == "toy-film" and usage["session_id"] and "seed" in usage
    assert [stage["stage"] for stage in usage["usage"]["stages"]] == ["diffusion"]
    unasked = {name for name, _ in events_of(post(url, "generations", prompt=PROMPT, stream=True, partial_images=1).text)}
    assert unasked == {"image_generation.partial_image", "image_generation.completed"}


@pytest.mark.parametrize("given", [1, 2])
def test_what_is_given_is_drawn_from(given: int, client: openai.OpenAI) -> None:
    """One picture, or several, as the client sends them in a form."""
    files = [io.BytesIO(png(SKETCH)) for _ in range(given)]
    answer = client.images.edit(image=files[0] if given == 1 else files, prompt=PROMPT, model="gpt-image-1", n=2, extra_body={"seed": SEED})
    assert answer.data is not None
    for number, picture in enumerate(answer.data):
        np.testing.assert_array_equal(pixels(picture.b64_json), drawn(result=number, shown=given * int(SKETCH.sum())))


def test_an_edit_is_streamed(client: openai.OpenAI) -> None:
    stream = client.images.edit(image=png(SKETCH), prompt=PROMPT, stream=True, partial_images=1, extra_body={"seed": SEED})
    partial, completed = stream
    assert partial.type == "image_edit.partial_image" and completed.type == "image_edit.completed"
    np.testing.assert_array_equal(pixels(completed.b64_json), drawn(shown=int(SKETCH.sum())))


def test_an_edit_in_json(url: str) -> None:
    answer = post(url, "edits", prompt=PROMPT, images=[{"image_url": URL_OF_SKETCH}], seed=SEED)
    np.testing.assert_array_equal(pixels(answer.json()["data"][0]["b64_json"]), drawn(shown=int(SKETCH.sum())))


def test_an_edit_of_what_lies_on_a_named_host(film_maker: servers.ServerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with web(tmp_path) as there:
        there.lay("/sketch.png", png(SKETCH), "image/png")
        monkeypatch.setenv("SSL_CERT_FILE", str(there.authority))
        with gateway(film_maker.address, tmp_path, "--media-hosts", f"127.0.0.1:{there.port}") as server:
            images = [{"image_url": f"https://127.0.0.1:{there.port}/{name}.png"} for name in ("sketch", "none")]
            answer = post(f"http://{server.address}", "edits", prompt=PROMPT, images=images[:1], seed=SEED)
            refused = post(f"http://{server.address}", "edits", prompt=PROMPT, images=images)
    np.testing.assert_array_equal(pixels(answer.json()["data"][0]["b64_json"]), drawn(shown=int(SKETCH.sum())))
    assert error_of(refused) == (400, "images[1].image_url")


def test_answers_are_as_the_document_has_them(url: str) -> None:
    """Sizes that OpenAI's models do not draw have no name there: the client's types have any."""
    asked: dict[str, Any] = {"prompt": PROMPT, "model": "gpt-image-1", "n": 2}
    edit = {**asked, "images": [{"image_url": URL_OF_SKETCH}]}
    document().check(asked, "CreateImageRequest")
    document().check(edit, "EditImageBodyJsonParam")
    for path, body in (("generations", asked), ("edits", edit)):
        document().check_answer(post(url, path, **body).json(), f"/images/{path}")
        for _, data in events_of(post(url, path, **body, stream=True, partial_images=2).text):
            document().check_answer(data, f"/images/{path}", media_type="text/event-stream")
    document().check_answer(post(url, "generations", prompt=PROMPT, response_format="url").json(), "/images/generations")


def test_a_mask_is_refused_where_the_pipeline_knows_none(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(image=png(SKETCH), mask=png(SKETCH), prompt=PROMPT)
    assert refused.value.param == "mask" and "knows none" in refused.value.message


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.fixture(scope="module")
def only_draws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcess]:
    """A gateway in front of a pipeline that takes no pictures."""
    folder = tmp_path_factory.mktemp("picture")
    with servers.stack(folder, kinds=["diffusion"], pipeline="toy-picture") as stack, gateway(stack.address, folder) as server:
        yield server


@pytest.mark.parametrize("model", ["toy-picture", "gpt-image-1"])
def test_who_takes_no_pictures_says_so(model: str, only_draws: servers.ServerProcess) -> None:
    images = [{"image_url": URL_OF_SKETCH}]
    answer = post(f"http://{only_draws.address}", "edits", model=model, prompt=PROMPT, images=images)
    assert answer.status_code == 400 and "image" in answer.json()["error"]["message"]


async def test_a_form_that_is_none_is_a_line_in_the_log(only_draws: servers.ServerProcess) -> None:
    """And no more: whoever sends one says nothing else there."""

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in only_draws.log().splitlines()]

    for _ in range(3):
        httpx2.post(f"http://{only_draws.address}/v1/images/edits?of=this", content=b"nothing", headers=FORM)
    await until(lambda: sum(line.get("status") == 400 and line["path"].endswith("/edits") for line in lines()) >= 3)
    assert {line["event"] for line in lines()} == {"gateway.bound", "server.ready", "http.done"}


# Sound


RAIN = "rain"

SECONDS = 1.5


def expected(seconds: float = SECONDS, negative: str = "") -> NDArray[np.int16]:
    """The sound that must come."""
    steer = formulas.steer(RAIN, negative, film.GUIDANCE)
    samples = formulas.film_sound(SEED, steer, 0, round(seconds * formulas.SAMPLE_RATE_HZ))[:, 0]
    return np.round(samples * 32768).astype(np.int16)


def sound(url: str, **body: Any) -> httpx2.Response:
    asked = {"prompt": RAIN, "seed": SEED, "seconds": SECONDS, **body}
    return httpx2.post(f"{url}/v1/audio/generate", json={name: value for name, value in asked.items() if value is not None})


@pytest.mark.parametrize(("form", "kind"), [("wav", "audio/wav"), ("flac", "audio/flac"), ("pcm", "audio/pcm"), (None, "audio/wav")])
def test_samples_are_those_of_the_formula(form: str | None, kind: str, film_url: str) -> None:
    answer = sound(film_url, response_format=form, negative_prompt="wind", steps=3)
    assert answer.headers["content-type"] == kind and "content-length" not in answer.headers
    if form == "pcm":
        samples = np.frombuffer(answer.content, "<i2")
    else:
        samples, rate_hz = soundfile.read(io.BytesIO(answer.content), dtype="int16")
        assert rate_hz == formulas.SAMPLE_RATE_HZ
    np.testing.assert_array_equal(samples, expected(negative="wind"))


@pytest.mark.parametrize(("form", "kind"), [("opus", "audio/ogg"), ("mp3", "audio/mpeg"), ("aac", "audio/aac")])
def test_other_files_are_as_long(form: str, kind: str, film_url: str) -> None:
    answer = sound(film_url, response_format=form)
    assert answer.headers["content-type"] == kind
    with av.open(io.BytesIO(answer.content), "r") as file:
        lengths = [frame.samples / frame.sample_rate for frame in file.decode(audio=0)]
    assert sum(lengths) == pytest.approx(SECONDS, abs=0.1)


def test_events_tell_how_far_it_is_and_have_the_file(film_url: str) -> None:
    events = list(events_of(sound(film_url, stream_format="sse", response_format="pcm").text))
    kinds = [data["type"] for _, data in events]
    steps = [data["done"] for _, data in events if data["type"] == "omnistage.progress"]
    assert steps == list(range(1, film.STEPS + 1)) and kinds[-1] == "audio.done" and kinds.count("audio.delta") > 1
    whole = b"".join(b64decode(data["audio"]) for _, data in events if data["type"] == "audio.delta")
    np.testing.assert_array_equal(np.frombuffer(whole, "<i2"), expected())
    done = events[-1][1]
    assert (done["seed"], done["pipeline"]) == (SEED, "toy-film") and done["usage"]["stages"][0]["stage"] == "diffusion"
