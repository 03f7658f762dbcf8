"""Films over HTTP: those of the toy film maker, whose frames are known beforehand; and the folder in which a gateway keeps them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from helpers import servers
from helpers.gateway import gateway, local_gateway
from helpers.openai_document import document, events_of
from helpers.videos import FRAMES, PROMPT, SEED, SLOW_CHAIN, ask, by, film_job, frames, get, over
from omnistage.gateway.answering import BrokenOff
from omnistage.gateway.failure import ApiError
from omnistage.gateway.film_store import DATABASE, FilmJob, Growing, Store
from omnistage.gateway.kept import ExpiringCache
from omnistage.host.errors import StartError
from omnistage.models.toy.files import png
from omnistage.models.toy.film import FILM

SKETCH = np.add.outer(np.arange(16), 3 * np.arange(16)).astype(np.uint8)
URL_OF_SKETCH = "data:image/png;base64," + b64encode(png(SKETCH)).decode()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in front of one that pauses before each step."""
    folder = tmp_path_factory.mktemp("slow")
    with servers.stack(folder, **SLOW_CHAIN) as stack, gateway(stack.address, folder) as server:
        yield f"http://{server.address}"


async def test_a_film_is_made_while_nobody_waits(film_url: str) -> None:
    created = ask(film_url, size="32x32", frames_per_second=11).json()
    assert created["object"] == "video" and created["status"] in ("queued", "in_progress") and created["seed"] == SEED
    assert (created["size"], created["seconds"], created["prompt"], created["error"]) == ("32x32", "1", PROMPT, None)
    shown = await over(film_url, created["id"])
    assert (shown["status"], shown["progress"], shown["model"], shown["frames"]) == ("completed", 100, "toy-film", FRAMES)
    assert shown["expires_at"] == pytest.approx(shown["completed_at"] + 86_400, abs=1) and shown["media_type"] == FILM
    file = get(film_url, f"/{created['id']}/content")
    assert file.content == frames() and file.headers["content-type"] == FILM and file.headers["x-content-type-options"] == "nosniff"


async def test_jobs_are_as_the_document_had_them(film_url: str) -> None:
    created = ask(film_url, size="32x32").json()
    shown = await over(film_url, created["id"])
    failed = await over(film_url, ask(film_url, frames=65).json()["id"])
    listed = get(film_url, "?limit=3").json()
    for one in (created, shown, failed):
        document().check({**one, "size": "1280x720"}, "VideoResource")  # Other sizes had no name there.
    document().check({**listed, "data": [{**one, "size": "1280x720"} for one in listed["data"]]}, "VideoListResource")
    document().check(httpx2.delete(f"{film_url}/v1/videos/{created['id']}", headers=by("ann")).json(), "DeletedVideoResource")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning", "ignore:The Videos API:DeprecationWarning")
async def test_openais_own_client_makes_one(film_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{film_url}/v1", api_key="ben", max_retries=0) as client:
        sketch: dict[str, Any] = {
            "input_reference": ("sketch.png", png(SKETCH), "image/png"),
            "extra_body": {"seed": SEED, "frames": FRAMES},
        }
        made = await client.videos.create_and_poll(model="sora-2", prompt=PROMPT, poll_interval_ms=50, **sketch)
        assert (made.status, made.model, made.error) == ("completed", "toy-film", None)
        file = await client.videos.download_content(made.id)
        assert file.read() == frames(shown=int(SKETCH.sum()))
        assert [one.id async for one in client.videos.list()] == [made.id]
        await client.videos.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.videos.retrieve(made.id)


async def test_a_picture_in_json_begins_it(film_url: str) -> None:
    created = ask(film_url, input_reference={"image_url": URL_OF_SKETCH}).json()
    assert (await over(film_url, created["id"]))["status"] == "completed"
    assert get(film_url, f"/{created['id']}/content").content == frames(shown=int(SKETCH.sum()))


async def test_a_seed_comes_back_as_it_was_sent(film_url: str) -> None:
    """A seed may be written in two ways, and each comes back in its own."""
    jobs = {seed: ask(film_url, seed=seed).json() for seed in (-1, (1 << 64) - 1, -(1 << 63), 1 << 63, 0)}
    for seed, job in jobs.items():
        shown = await over(film_url, job["id"])
        assert job["seed"] == shown["seed"] == seed
        assert get(film_url, f"/{job['id']}/content").content == frames(seed % (1 << 64))
    for seed in (-1, (1 << 64) - 1):
        asked = {"prompt": "a cat", "seed": seed, "n": 2}
        assert httpx2.post(f"{film_url}/v1/images/generations", json=asked).json()["seed"] == seed
        streamed = httpx2.post(f"{film_url}/v1/images/generations", json={**asked, "stream": True, "include_events": True})
        assert [data["seed"] for _, data in events_of(streamed.text) if data["type"] == "omnistage.usage"] == [seed]
        streamed = httpx2.post(f"{film_url}/v1/audio/generate", json={"prompt": "rain", "seed": seed, "seconds": 1, "stream_format": "sse"})
        assert [data["seed"] for _, data in events_of(streamed.text) if data["type"] == "audio.done"] == [seed]


async def test_without_a_seed_there_is_one_that_makes_the_same_again(film_url: str) -> None:
    first, other = (ask(film_url, seed=None).json() for _ in range(2))
    assert first["seed"] < 10**9 > other["seed"]  # A page in JavaScript shows it exactly.
    again = ask(film_url, seed=first["seed"]).json()
    files = []
    for one in (first, other, again):
        await over(film_url, one["id"])
        files.append(get(film_url, f"/{one['id']}/content").content)
    assert files[0] == files[2] == frames(first["seed"])
    assert files[1] == frames(other["seed"]) and first["seed"] != other["seed"]


async def test_it_is_read_while_it_is_made(slow: str) -> None:
    """A reader that comes before the first frame waits for it; two readers get the same bytes."""
    created = ask(slow).json()
    early = get(slow, f"/{created['id']}/content")
    error = early.json()["error"]
    assert (early.status_code, error["code"], early.headers["x-should-retry"]) == (409, "not_ready", "false")
    assert "stream=true" in error["hint"]
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


async def test_films_are_listed_in_pages_to_whoever_asked_for_them(film_url: str) -> None:
    names = [ask(film_url, "cat").json()["id"] for _ in range(3)]
    listed = get(film_url, "?limit=2", "cat").json()
    assert [one["id"] for one in listed["data"]] == [names[2], names[1]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"], listed["object"]) == (names[2], names[1], True, "list")
    rest = get(film_url, f"?limit=2&after={names[1]}", "cat").json()
    assert [one["id"] for one in rest["data"]] == [names[0]] and not rest["has_more"]
    assert [one["id"] for one in get(film_url, "?order=asc", "cat").json()["data"]] == names
    assert get(film_url, "", "dan").json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for path in (f"/{names[0]}", f"/{names[0]}/content", f"?after={names[0]}"):
        answer = get(film_url, path, "dan")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert httpx2.delete(f"{film_url}/v1/videos/{names[0]}", headers=by("dan")).status_code == 404
    assert get(film_url, f"/{names[0]}", "cat").status_code == 200


async def test_one_that_the_model_cannot_make_fails_and_says_why(film_url: str) -> None:
    shown = await over(film_url, ask(film_url, frames=65).json()["id"])
    assert shown["status"] == "failed" and shown["error"]["code"] == "invalid_value" and "frames" in shown["error"]["message"]
    assert shown["completed_at"] is None and shown["expires_at"] is not None
    answer = get(film_url, f"/{shown['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_failed")


ABSENT: dict[tuple[int, str | None], tuple[str, ...]] = {
    (400, "invalid_value"): ("?limit=101", "?limit=-1", "?order=any", "/video_1/content?variant=poster"),
    (400, "unsupported_parameter"): ("/video_1/content?variant=thumbnail",),
    (404, "not_found"): ("?after=video_1", "/video_1", "/video_1/content"),
    (404, None): ("/..%2F.lock/content",),
}


@pytest.mark.parametrize(("status", "code", "path"), [(*told, path) for told, paths in ABSENT.items() for path in paths])
def test_what_there_is_not_is_not_found(status: int, code: str | None, path: str, film_url: str) -> None:
    answer = get(film_url, path)
    assert answer.status_code == status and code in (None, answer.json()["error"]["code"]), answer.text


# Values and jobs that a gateway keeps


def test_other_users_read_nothing_in_a_folder_that_is_open_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = Store(str(tmp_path))
    job = film_job(f"video_{'a' * 32}")
    store.put_new(job, b"a picture")
    growing = Growing(store.file(job, "part"))
    asyncio.run(growing.write(b"a film"))
    growing.end()
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}
    store.file(job, "picture").chmod(0o644)
    store.close()
    Store(str(tmp_path)).close()
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


def test_a_damaged_row_is_left_where_it_is_and_the_others_live(tmp_path: Path, seed: int) -> None:
    store = Store(str(tmp_path))
    jobs = [film_job(f"video_{letter * 32}") for letter in "abcdefg"]
    for job in jobs:
        store.put(job)
    whole = json.loads(jobs[0].row)
    changes: list[dict[str, Any]] = [
        *({"created_at": None}, {"status": "lost"}, {"options": {}}, {"ended_at": "yesterday"}, {"status": "failed"}),
        *({"error": ["lost"]}, {"options": {"seed": math.nan}}, {"ended_at": math.inf, "status": "completed"}),
    ]
    lost = random.Random(seed).choice(["who", "prompt", "size"])
    incomplete = json.dumps({name: value for name, value in whole.items() if name != lost})
    faults = ["{", "[" * 100_000, *(json.dumps({**whole, **change}) for change in changes), b"\xff\x00", incomplete, "null"]
    for fault in faults:
        with sqlite3.connect(tmp_path / DATABASE) as database:
            database.execute("UPDATE jobs SET job = ? WHERE id = ?", (fault, jobs[3].id))
        film = tmp_path / f"{jobs[3].id}.webm"
        film.write_bytes(b"a film")
        store.close()
        store = Store(str(tmp_path))
        assert [job.id for job in store.jobs()] == [job.id for job in jobs if job is not jobs[3]], fault
        assert film.exists()
    store.close()


@pytest.mark.parametrize("place", ["in a page of a row", "in the list of rows"])
def test_a_damaged_page_costs_its_own_rows(place: str, tmp_path: Path, seed: int) -> None:
    """Each row has some pages of its own; the list of them has others."""
    source, store = random.Random(seed), Store(str(tmp_path))
    names = [f"video_{number:032}" for number in range(40)]
    for name in names:
        store.put(film_job(name, prompt="\N{CAT}" * 20_000))
    store.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        roots = {page - 1 for (page,) in database.execute("SELECT rootpage FROM sqlite_master")}  # No job is read without these.
    data = bytearray((tmp_path / DATABASE).read_bytes())
    page_bytes = int.from_bytes(data[16:18])
    is_list = place == "in the list of rows"
    numbers = set(range(1, len(data) // page_bytes)) - roots
    pages = [number for number in sorted(numbers) if (data[number * page_bytes] == 13) == is_list]
    begin = source.choice(pages) * page_bytes
    data[begin : begin + page_bytes] = source.randbytes(page_bytes)
    (tmp_path / DATABASE).write_bytes(data)
    store = Store(str(tmp_path))
    left_names = [job.id for job in store.jobs()]
    assert left_names == [name for name in names if name in left_names] and len(left_names) >= (1 if is_list else 39)
    store.close()


def test_a_table_that_cannot_be_read_at_all_is_told(tmp_path: Path, seed: int) -> None:
    store = Store(str(tmp_path))
    store.put(film_job(f"video_{'a' * 32}"))
    store.close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name IN ('jobs', 'sqlite_sequence')"
        pages = [page for (page,) in database.execute(query)]
    database.close()
    data = bytearray((tmp_path / DATABASE).read_bytes())
    page_bytes = int.from_bytes(data[16:18])
    for page in pages:
        data[(page - 1) * page_bytes : page * page_bytes] = random.Random(seed).randbytes(page_bytes)
    (tmp_path / DATABASE).write_bytes(data)
    store = Store(str(tmp_path))
    with pytest.raises(StartError, match=r"jobs\.sqlite3 is damaged .* move it away"):
        store.jobs()
    store.close()


def test_what_files_tell_counts_and_odd_files_cost_no_other(tmp_path: Path) -> None:
    """A row that names another size, a link to nowhere, a folder in the place of a file."""
    store = Store(str(tmp_path))
    done = film_job(f"video_{'a' * 32}", status="completed", ended_at=2.0, media_type="video/webm", size_bytes=1 << 62)
    waiting = film_job(f"video_{'b' * 32}", picture_bytes=1 << 62)
    for job in (done, waiting):
        store.put(job)
    store.film(done).write_bytes(b"a film")
    store.file(waiting, "webm").symlink_to("/nowhere/film")
    store.file(waiting, "part").mkdir()
    store.close()
    store = Store(str(tmp_path))
    assert [(job.id, job.size_bytes, job.picture_bytes) for job in store.jobs()] == [(done.id, 6, 0), (waiting.id, 0, 0)]
    store.close()


def test_a_folder_of_another_version_is_left_alone(tmp_path: Path) -> None:
    Store(str(tmp_path)).close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StartError, match=r"another version.*--video-folder"):
        Store(str(tmp_path))


def test_a_folder_keeps_jobs_in_order_and_no_files_of_others(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    jobs = [film_job(f"video_{letter * 32}") for letter in "cab"]
    for job in jobs:
        store.put(job)
    jobs[1].status, jobs[1].ended_at = "failed", 5.0
    store.put(jobs[1])
    store.remove(jobs[2])
    (tmp_path / f"video_{'z' * 32}.webm").write_bytes(b"nobody's")
    (tmp_path / "notes.txt").write_text("somebody's")
    secret = store.secret
    store.close()
    again = Store(str(tmp_path))
    assert again.jobs() == jobs[:2] and again.secret == secret
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt"} and not (tmp_path / f"video_{'z' * 32}.webm").exists()
    again.close()


# Values


def test_it_is_found_by_its_name_alone() -> None:
    kept: ExpiringCache[str] = ExpiringCache(100)
    names = {kept.put("host", "picture", 10)[0] for _ in range(5)}
    assert len(names) == 5 and all(kept.get(name) == "picture" for name in names)
    assert kept.get("picture") is None


@pytest.mark.parametrize(
    ("puts", "expected"),
    [
        pytest.param([("host", 40)] * 4, [2, 3], id="the oldest make way"),
        pytest.param([("honest", 30), *[("greedy", 20)] * 8], [0, 6, 7, 8], id="nobody makes those of others go"),
        pytest.param([("host", 101), ("host", 100)], [1], id="what is larger than all is not kept"),
    ],
)
def test_what_is_kept_has_a_bound(puts: list[tuple[str, int]], expected: list[int]) -> None:
    kept: ExpiringCache[int] = ExpiringCache(100)
    names = [kept.put(host, number, size_bytes)[0] for number, (host, size_bytes) in enumerate(puts)]
    assert [number for name in names if (number := kept.get(name)) is not None] == expected


def test_its_time_ends() -> None:
    kept: ExpiringCache[str] = ExpiringCache(100, kept_s=0)
    name, _ = kept.put("host", "picture", 100)
    assert kept.get(name) is None
    kept.put("host", "another", 100)
