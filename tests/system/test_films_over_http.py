"""Films of Wan and sound of Stable Audio, of small checkpoints with random weights, over HTTP and on the page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import av
import httpx2
import numpy as np
import pytest
import soundfile
from PIL import Image
from playwright.async_api import expect

from helpers import lengths, servers
from helpers.browser import ask as ask_page
from helpers.browser import browser, needs_chromium, opened
from helpers.drawings import checkpoint
from helpers.gateway import gateway
from helpers.servers import ServerProcess
from helpers.videos import by, get, over

SIZE = "64x64"
PIPELINE = """
name: {name}
description: What a small checkpoint makes.
inputs: [text]
may_take: [image]
outputs: [image, video, audio, progress]
outputs_vary: true
may_give: [latents, pixels]
stages: [{{kind: diffusion, family: diffusers}}]
"""
CODECS = {None: ("video/webm", "vp9"), "webm": ("video/webm", "vp9"), "mp4": ("video/mp4", "vp9"), "mp4-h264": ("video/mp4", "h264")}
"""By a format."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that makes films, with a picture or without, and one that makes sound."""
    folder = tmp_path_factory.mktemp("films")
    with ExitStack() as stack:
        found, files = [], []
        for name, kind in (("wan", "wan2.2-ti2v"), ("stable", "stable-audio")):
            stage = ("--checkpoint", str(checkpoint(kind)))
            made = stack.enter_context(servers.stack(folder, kinds=["diffusion"], family="diffusers", router_args=None, stage_args=stage))
            found.append(f"{name}/diffusion={made.addresses['diffusion']}")
            files.append(folder / f"{name}.yaml")
            files[-1].write_text(PIPELINE.format(name=name))
        flags = ("--pipeline", ",".join(map(str, files)), "--stages", ",".join(found), "--grace", "5")
        router = stack.enter_context(ServerProcess("omnistage.router", *flags, log_folder=folder))
        router.wait_ready()
        yield f"http://{stack.enter_context(gateway(router.address, folder)).address}"


def frames_of(data: bytes) -> list[np.ndarray[Any, Any]]:
    with av.open(io.BytesIO(data), "r") as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


async def made(url: str, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "a boat", "size": SIZE, "steps": 2, "seed": 3, **body}
    answer = httpx2.post(f"{url}/v1/videos", json=asked, headers=by("ann"))
    assert answer.status_code == 200, answer.text
    shown = await over(url, answer.json()["id"])
    assert shown["status"] == "completed", shown
    return shown


@pytest.mark.parametrize("form", CODECS)
async def test_a_film_is_a_file_of_the_format_that_was_asked_for(form: str | None, url: str) -> None:
    shown = await made(url, frames=9, **({"format": form} if form else {}))
    kind, codec = CODECS[form]
    rate_hz = shown["frames"] / float(shown["seconds"])
    assert (shown["frames"], shown["size"], shown["model"], shown["media_type"].partition(";")[0]) == (9, SIZE, "wan", kind)
    file = get(url, f"/{shown['id']}/content")
    assert file.headers["content-type"].partition(";")[0] == kind and len(file.content) == shown["bytes"]
    with av.open(io.BytesIO(file.content), "r") as opened_file:
        stream = opened_file.streams.video[0]
        assert (stream.codec_context.codec.canonical_name, stream.width, stream.height) == (codec, 64, 64)
        assert float(stream.average_rate or 0) == pytest.approx(rate_hz)
    assert len(frames_of(file.content)) == 9


async def test_its_seconds_and_its_rate_are_those_that_were_asked_for(url: str) -> None:
    shown = await made(url, seconds="1.2", frames_per_second=8)
    assert (shown["frames"], shown["seconds"]) == (9, "1.125")


async def test_it_begins_with_a_picture(url: str) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "#2060c0").save(picture, "PNG")
    data = {"prompt": "a boat", "size": SIZE, "steps": "2", "seed": "3", "frames": "5"}
    answer = httpx2.post(f"{url}/v1/videos", files={"input_reference": picture.getvalue()}, data=data, headers=by("ann"))
    with_picture = await over(url, answer.json()["id"])
    assert with_picture["status"] == "completed", with_picture
    without = await made(url, frames=5)
    films = [frames_of(get(url, f"/{one['id']}/content").content) for one in (with_picture, without)]
    assert len(films[0]) == len(films[1]) == 5 and not np.array_equal(films[0], films[1])


async def test_it_can_be_seen_before_it_is_whole(url: str) -> None:
    """The part of a film that has come at any moment is a film."""
    asked = {"prompt": "a boat", "size": "256x256", "steps": 1, "frames": 41, "seed": 3}
    name = httpx2.post(f"{url}/v1/videos", json=asked, headers=by("ann")).json()["id"]
    begun, pieces = b"", 0
    with httpx2.stream("GET", f"{url}/v1/videos/{name}/content?stream=true", headers=by("ann"), timeout=90) as answer:
        for piece in answer.iter_bytes():
            if not begun:
                begun = piece
                assert get(url, f"/{name}").json()["status"] == "in_progress"
            pieces += 1
    shown = await over(url, name)
    assert pieces > 1 and 0 < len(frames_of(begun)) < 41 == shown["frames"]


@pytest.mark.parametrize(
    ("asked", "code", "told"),
    [
        ({"frames": 6}, "invalid_value", "frames"),
        ({"size": "72x64", "frames": 5}, "invalid_value", "size"),
        ({"flow_shift": 0.0, "frames": 5, "guidance_scale_2": 2.0}, "invalid_value", "guidance_scale_2"),
    ],
)
async def test_what_the_model_cannot_make_fails_in_the_words_of_the_request(asked: dict[str, Any], code: str, told: str, url: str) -> None:
    body = {"prompt": "a boat", "size": SIZE, "steps": 2, **asked}
    body = {name: value for name, value in body.items() if value}
    shown = await over(url, httpx2.post(f"{url}/v1/videos", json=body, headers=by("ann")).json()["id"])
    assert (shown["status"], shown["error"]["code"]) == ("failed", code) and told in shown["error"]["message"], shown


def test_sound_is_as_long_as_it_was_asked_for(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/audio/generate", json={"prompt": "rain", "seconds": 0.5, "steps": 2, "seed": 3}, timeout=90)
    assert answer.status_code == 200, answer.text
    samples, rate_hz = soundfile.read(io.BytesIO(answer.content))
    assert len(samples) == round(0.5 * rate_hz) and np.abs(samples).max() > 0


@lengths.long_form(
    "gateway/test_videos.py::test_it_is_read_while_it_is_made",
    "models/media/test_film_in_browser.py::test_a_film_plays_while_it_grows",
    unkept="The page itself shows a film that grows.",
)
@needs_chromium
async def test_the_page_shows_a_film_that_grows(url: str) -> None:
    async with browser() as context:
        watched = await opened(context, url)
        page = watched.page
        await page.get_by_text("Film", exact=True).click()
        await page.locator("#size").fill("128x128")
        await page.locator("#steps").fill("2")
        await page.get_by_label("Seconds").fill("1.5")
        await ask_page(page, "A boat", 3)
        video = page.locator(".assistant video")
        await video.wait_for()
        await page.get_by_role("link", name="Save film").wait_for()
        await expect(video).to_have_js_property("readyState", 4)
        shown = await video.evaluate("one => [one.dataset.grows, one.videoWidth, one.videoHeight, one.error]")
        assert shown == ["true", 128, 128, None]
        job = get(url, "?limit=1", "").json()["data"][0]
        await page.wait_for_function(
            "seconds => Math.abs(document.querySelector('video').duration - seconds) < 0.1", arg=float(job["seconds"])
        )
        await watched.check(url)
