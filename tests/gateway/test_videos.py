"""Films over HTTP: those of the toy film maker, whose frames are known beforehand."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from helpers import servers
from helpers.gateway import gateway, local_gateway
from helpers.openai_document import document
from helpers.videos import FRAMES, PROMPT, SEED, ask, by, frames, get, over
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.failure import ApiError
from omnistage.gateway.film_store import FilmJob, Growing, Store
from omnistage.models.toy.files import png
from omnistage.models.toy.film import FILM

SKETCH = np.add.outer(np.arange(16), 3 * np.arange(16)).astype(np.uint8)
URL_OF_SKETCH = "data:image/png;base64," + b64encode(png(SKETCH)).decode()


@pytest.fixture(scope="module")
def film_maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A piece of a film is one frame to four."""
    with servers.stack(tmp_path_factory.mktemp("film"), kinds=["diffusion"], pipeline="toy-film", family="toy-film") as stack:
        yield stack


@pytest.fixture(scope="module")
def url(film_maker: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(film_maker.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in front of one that pauses before each step."""
    folder = tmp_path_factory.mktemp("slow")
    chain: dict[str, Any] = {"kinds": ["diffusion"], "pipeline": "toy-film", "family": "toy-film", "options": {"interval_s": 0.1}}
    with servers.stack(folder, **chain) as stack, gateway(stack.address, folder) as server:
        yield f"http://{server.address}"


async def test_a_film_is_made_while_nobody_waits(url: str) -> None:
    created = ask(url, size="32x32", frames_per_second=11).json()
    assert created["object"] == "video" and created["status"] in ("queued", "in_progress") and created["seed"] == SEED
    assert (created["size"], created["seconds"], created["prompt"], created["error"]) == ("32x32", "1", PROMPT, None)
    shown = await over(url, created["id"])
    assert (shown["status"], shown["progress"], shown["model"], shown["frames"]) == ("completed", 100, "toy-film", FRAMES)
    assert shown["expires_at"] == pytest.approx(shown["completed_at"] + 86_400, abs=1) and shown["media_type"] == FILM
    file = get(url, f"/{created['id']}/content")
    assert file.content == frames() and file.headers["content-type"] == FILM and file.headers["x-content-type-options"] == "nosniff"


async def test_jobs_are_as_the_document_had_them(url: str) -> None:
    created = ask(url, size="32x32").json()
    shown = await over(url, created["id"])
    failed = await over(url, ask(url, frames=65).json()["id"])
    listed = get(url, "?limit=3").json()
    for one in (created, shown, failed):
        document().check({**one, "size": "1280x720"}, "VideoResource")  # Other sizes had no name there.
    document().check({**listed, "data": [{**one, "size": "1280x720"} for one in listed["data"]]}, "VideoListResource")
    document().check(httpx2.delete(f"{url}/v1/videos/{created['id']}", headers=by("ann")).json(), "DeletedVideoResource")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning", "ignore:The Videos API:DeprecationWarning")
async def test_openais_own_client_makes_one(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="ben", max_retries=0) as client:
        extra = {"seed": SEED, "frames": FRAMES}
        sketch = ("sketch.png", png(SKETCH), "image/png")
        made = await client.videos.create_and_poll(
            model="sora-2", prompt=PROMPT, input_reference=sketch, extra_body=extra, poll_interval_ms=50
        )
        assert (made.status, made.model, made.error) == ("completed", "toy-film", None)
        file = await client.videos.download_content(made.id)
        assert file.read() == frames(shown=int(SKETCH.sum()))
        assert [one.id async for one in client.videos.list()] == [made.id]
        await client.videos.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.videos.retrieve(made.id)


async def test_a_picture_in_json_begins_it(url: str) -> None:
    created = ask(url, input_reference={"image_url": URL_OF_SKETCH}).json()
    assert (await over(url, created["id"]))["status"] == "completed"
    assert get(url, f"/{created['id']}/content").content == frames(shown=int(SKETCH.sum()))


async def test_without_a_seed_there_is_one_that_makes_the_same_again(url: str) -> None:
    first, other = (ask(url, seed=None).json() for _ in range(2))
    assert first["seed"] < 10**9 > other["seed"]  # A page in JavaScript shows it exactly.
    again = ask(url, seed=first["seed"]).json()
    files = []
    for one in (first, other, again):
        await over(url, one["id"])
        files.append(get(url, f"/{one['id']}/content").content)
    assert files[0] == files[2] == frames(first["seed"])
    assert files[1] == frames(other["seed"]) and first["seed"] != other["seed"]


async def test_parts_of_the_file_are_given(url: str) -> None:
    created = ask(url).json()
    await over(url, created["id"])
    part = get(url, f"/{created['id']}/content", Range="bytes=100-299")
    assert (part.status_code, part.headers["content-range"]) == (206, f"bytes 100-299/{len(frames())}")
    assert part.content == frames()[100:300]
    assert get(url, f"/{created['id']}/content?stream=true").content == frames()
    assert get(url, f"/{created['id']}/content", Range="bytes=9999999-").status_code == 416


async def test_it_is_read_while_it_is_made(slow: str) -> None:
    """A reader that comes before the first frame waits for it; two readers get the same bytes."""
    created = ask(slow).json()
    early = get(slow, f"/{created['id']}/content")
    error = early.json()["error"]
    assert (early.status_code, error["code"], early.headers["x-should-retry"]) == (409, "not_ready", "false") and "stream=true" in error[
        "hint"
    ]
    paths = [f"/{created['id']}/content?stream=true"] * 2
    for answer in await asyncio.gather(*(asyncio.to_thread(get, slow, path) for path in paths)):
        assert (answer.content, answer.headers["content-type"]) == (frames(), FILM)
        assert "content-length" not in answer.headers and answer.headers["x-content-type-options"] == "nosniff"


async def test_a_film_that_is_called_completed_can_be_had(film_maker: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while that is still being written into the database."""
    goes_on, put = threading.Event(), Store.put

    def slow_put(store: Store, job: FilmJob) -> None:
        if job.status == "completed":
            goes_on.wait(60)
        put(store, job)

    monkeypatch.setattr(Store, "put", slow_put)
    async with local_gateway(film_maker.address) as (url, _):
        try:
            name = (await asyncio.to_thread(ask, url)).json()["id"]
            await asyncio.to_thread(asyncio.run, over(url, name))
            for path in (f"/{name}/content", f"/{name}/content?stream=true"):
                assert (await asyncio.to_thread(get, url, path)).content == frames()
        finally:
            goes_on.set()


async def test_what_there_is_of_a_film_is_read_before_the_rest(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "film.part")
    reading = growing.read()
    first = asyncio.ensure_future(anext(reading))
    await growing.write(b"one")
    assert await first == b"one" and growing.readers == 1
    second = asyncio.ensure_future(anext(reading))
    await growing.write(b"two")
    assert await second == b"two"
    late = growing.read()
    assert await anext(late) == b"onetwo"
    (tmp_path / "film.part").rename(tmp_path / "film")
    await growing.reset(is_whole=True)
    growing.end()
    assert [piece async for piece in reading] == [piece async for piece in late] == []
    assert growing.readers == 0


@pytest.mark.parametrize("is_last", [False, True])
async def test_who_reads_a_film_that_fails_or_begins_anew_is_broken_off(tmp_path: Path, is_last: bool) -> None:
    """The bytes that came may not be the beginning of the later ones."""
    growing = Growing(tmp_path / "film.part")
    await growing.write(b"one")
    reading = growing.read()
    assert await anext(reading) == b"one"
    waiting = growing.read()
    await growing.reset(is_whole=False)
    assert not (tmp_path / "film.part").exists()
    if is_last:
        growing.end()
        with pytest.raises(ApiError, match="ended"):
            await anext(waiting)
    else:
        first = asyncio.ensure_future(anext(waiting))
        await growing.write(b"ONE")
        assert await first == b"ONE"
        await waiting.aclose()
        growing.end()
    with pytest.raises(BrokenOff):
        await anext(reading)


async def test_films_are_listed_in_pages_to_whoever_asked_for_them(url: str) -> None:
    names = [ask(url, "cat").json()["id"] for _ in range(3)]
    listed = get(url, "?limit=2", "cat").json()
    assert [one["id"] for one in listed["data"]] == [names[2], names[1]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"], listed["object"]) == (names[2], names[1], True, "list")
    rest = get(url, f"?limit=2&after={names[1]}", "cat").json()
    assert [one["id"] for one in rest["data"]] == [names[0]] and not rest["has_more"]
    assert [one["id"] for one in get(url, "?order=asc", "cat").json()["data"]] == names
    assert get(url, "", "dan").json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for path in (f"/{names[0]}", f"/{names[0]}/content", f"?after={names[0]}"):
        answer = get(url, path, "dan")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert httpx2.delete(f"{url}/v1/videos/{names[0]}", headers=by("dan")).status_code == 404
    assert get(url, f"/{names[0]}", "cat").status_code == 200


async def test_one_that_the_model_cannot_make_fails_and_says_why(url: str) -> None:
    shown = await over(url, ask(url, frames=65).json()["id"])
    assert shown["status"] == "failed" and shown["error"]["code"] == "invalid_value" and "frames" in shown["error"]["message"]
    assert shown["completed_at"] is None and shown["expires_at"] is not None
    answer = get(url, f"/{shown['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_failed")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"size": "large"}, "size"),
        ({"size": "0x32"}, "size"),
        ({"size": "99999x32"}, "size"),
        ({"frames": 0}, "frames"),
        ({"frames": 1.5}, "frames"),
        ({"frames": 1 << 17}, "frames"),
        ({"frames": None, "seconds": 0}, "seconds"),
        ({"frames": None, "seconds": "long"}, "seconds"),
        ({"frames": None, "seconds": 3601}, "seconds"),
        ({"seconds": 4}, "seconds"),
        ({"frames_per_second": 0}, "frames_per_second"),
        ({"frames_per_second": 121}, "frames_per_second"),
        ({"steps": 0}, "steps"),
        ({"steps": 1001}, "steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale_2": 101}, "guidance_scale_2"),
        ({"flow_shift": -1}, "flow_shift"),
        ({"seed": 1 << 64}, "seed"),
        ({"format": "gif"}, "format"),
        ({"model": "none-such"}, "model"),
        ({"options": {f"o{n}": n for n in range(65)}}, "options"),
        ({"input_reference": {"image_url": "/etc/passwd"}}, "input_reference.image_url"),
        ({"input_reference": {"image_url": "https://media.example.com/cat.png"}}, "input_reference.image_url"),
        ({"input_reference": {"image_url": "data:image/png;base64,!"}}, "input_reference"),
        ({"input_reference": {"file_id": "file-1"}}, "input_reference.file_id"),
        ({"input_reference": {}}, "input_reference.image_url"),
        ({"tools": []}, "tools"),
        ({"remix_id": "video_1"}, "remix_id"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(asked: dict[str, Any], param: str, url: str) -> None:
    answer = ask(url, "eve", **asked)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400) and error["param"] == param and error["message"], error
    assert get(url, "", "eve").json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"files": {"input_reference": b"no picture"}, "data": {"prompt": PROMPT}}, "input_reference"),
        ({"files": {"input_reference": b""}, "data": {"prompt": PROMPT}}, "input_reference"),
        ({"files": {"image": png(SKETCH)}, "data": {"prompt": PROMPT}}, "image"),
        ({"files": {"input_reference": png(SKETCH)}}, "prompt"),
        ({"files": {"input_reference": png(SKETCH)}, "data": {"prompt": PROMPT, "frames": "many"}}, "frames"),
        ({"files": [("input_reference", png(SKETCH))] * 2, "data": {"prompt": PROMPT}}, None),
        ({"data": {"prompt": PROMPT}}, None),
        ({"content": b"", "headers": {"Content-Type": "text/plain"}}, None),
    ],
)
def test_a_form_that_is_none_is_refused(sent: dict[str, Any], param: str | None, url: str) -> None:
    answer = httpx2.post(f"{url}/v1/videos", **sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("?limit=101", 400, "invalid_value"),
        ("?limit=-1", 400, "invalid_value"),
        ("?order=any", 400, "invalid_value"),
        ("?after=video_1", 404, "not_found"),
        ("/video_1", 404, "not_found"),
        ("/video_1/content", 404, "not_found"),
        ("/video_1/content?variant=poster", 400, "invalid_value"),
        ("/video_1/content?variant=thumbnail", 400, "unsupported_parameter"),
        ("/..%2F.lock/content", 404, None),
    ],
)
def test_what_there_is_not_is_not_found(path: str, status: int, code: str | None, url: str) -> None:
    answer = get(url, path)
    assert answer.status_code == status and code in (None, answer.json()["error"]["code"]), answer.text


def test_remixes_are_not_offered(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/videos/video_1/remix", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_offered")


def test_who_makes_no_films_says_so(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(toy.address, tmp_path) as server:
        for asked, told in (({}, "no pipeline here can make films"), ({"model": "toy"}, "toy cannot make films")):
            answer = ask(f"http://{server.address}", **asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported") and told in answer.text
