"""Films as jobs of a gateway that ends, is killed, is full, or has no room."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from helpers import lengths, servers
from helpers.gateway import gateway
from helpers.memory import peak_bytes
from helpers.metrics import fetched, value
from helpers.servers import NotReady, ServerProcess
from helpers.videos import SLOW_CHAIN, ask, by, film_job, frames, get, over, until_it_is
from helpers.waiting import until
from omnistage.client.errors import OverloadedError, RequestError, StageLostError, StartingError, UnavailableError
from omnistage.gateway import film_jobs
from omnistage.gateway.film_jobs import AGAIN_S, pause_s
from omnistage.gateway.film_store import DATABASE, Growing
from omnistage.models.toy.files import png

LONG: dict[str, Any] = {"steps": 30}
"""Options of a film that takes 3 s here."""

MIB = 1 << 20
LARGE: dict[str, Any] = {"size": "128x128", "frames": 40, "steps": 1}
"""Options of a film of 640 KiB, two of which are more than a MiB."""


@pytest.fixture(scope="module")
def film_maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """It pauses before each step."""
    with servers.stack(tmp_path_factory.mktemp("film"), **SLOW_CHAIN) as stack:
        yield stack


@contextmanager
def kept(router: str, folder: Path, *flags: str) -> Iterator[tuple[str, ServerProcess]]:
    """A gateway that keeps its films in a folder of this one; its URL."""
    with gateway(router, folder, "--video-folder", str(folder / "films"), *flags) as server:
        yield f"http://{server.address}", server


async def ended(url: str, key: str = "ann", **options: Any) -> dict[str, Any]:
    """The last state of a film that is asked for now."""
    return await over(url, ask(url, key, **options).json()["id"], key)


def delete(url: str, name: str) -> httpx2.Response:
    return httpx2.delete(f"{url}/v1/videos/{name}", headers=by("ann"), timeout=60)


def left(folder: Path) -> set[str]:
    """Ends of the names of the files of films."""
    return {path.suffix for path in (folder / "films").iterdir() if path.name.startswith("video_")}


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob("omnistage-films-*"))


@lengths.drawn_cells(1, "how", [signal.SIGTERM, signal.SIGKILL])
@lengths.drawn_cells(1, "key", ["ann", ""])
async def test_films_outlive_their_gateway(how: signal.Signals, key: str, film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """One is finished, one is made, two wait, one of them with a picture. Whoever gave no key is known by his address."""
    sketch = np.arange(64, dtype=np.uint8).reshape(8, 8)
    with kept(film_maker.address, tmp_path, "--video-runs", "1") as (url, server):
        finished = await ended(url, key, steps=1)
        running = ask(url, key, seed=6, **LONG).json()["id"]
        waiting = ask(url, key, seed=7, steps=2).json()["id"]
        asked = {"prompt": "a cat", "seed": "8", "frames": "11", "steps": "2"}
        form = httpx2.post(f"{url}/v1/videos", files={"input_reference": png(sketch)}, data=asked, headers=by(key))
        pictured = form.json()["id"]
        await until(lambda: get(url, f"/{running}", key).json()["progress"] > 3)
        assert get(url, f"/{waiting}", key).json()["status"] == "queued"
        server.process.send_signal(how)
        assert server.wait() == (0 if how is signal.SIGTERM else -how)
    assert (tmp_path / "films").stat().st_mode & 0o777 == 0o700
    with kept(film_maker.address, tmp_path, "--video-runs", "2") as (url, _):
        assert get(url, f"/{finished['id']}", key).json() == finished
        assert get(url, f"/{finished['id']}/content", key).content == frames(steps=1)
        films = (frames(6, steps=LONG["steps"]), frames(7, steps=2), frames(8, steps=2, shown=int(sketch.sum())))
        for name, film in zip((running, waiting, pictured), films, strict=True):
            assert (await over(url, name, key))["status"] == "completed"
            assert get(url, f"/{name}/content", key).content == film
        assert len(get(url, "", key).json()["data"]) == 4 and get(url, "", "somebody-else").json()["data"] == []
        assert left(tmp_path) == {".bin"}


async def test_a_film_that_is_read_while_its_gateway_ends_is_finished(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """As every answer that runs is, within the grace; one that nobody reads is left to the next process."""
    with kept(film_maker.address, tmp_path) as (url, server):
        read, unread = (ask(url, steps=steps).json()["id"] for steps in (10, 60))
        with httpx2.stream("GET", f"{url}/v1/videos/{read}/content?stream=true", headers=by("ann"), timeout=60) as answer:
            server.terminate()
            assert answer.read() == frames(steps=10)
        assert server.wait() == 0
    with sqlite3.connect(tmp_path / "films" / DATABASE) as database:
        assert dict(database.execute("SELECT id, status FROM jobs")) == {read: "completed", unread: "in_progress"}


@lengths.long_form("gateway/test_film_jobs.py::test_the_oldest_films_make_way", unkept="a film goes when its time has come")
async def test_a_film_is_deleted_when_its_time_has_come(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path, "--video-kept", "2") as (url, server):
        shown = await ended(url, steps=1)
        assert get(url, f"/{shown['id']}/content").status_code == 200
        await until(lambda: get(url, f"/{shown['id']}").status_code == 404)
        assert time.time() >= shown["expires_at"]
        assert get(url).json()["data"] == [] and get(url, f"/{shown['id']}/content").status_code == 404
        await until(lambda: not left(tmp_path))
        await until(lambda: value(fetched(server.metrics_address), "omnistage_gateway_film_bytes") == 0)


async def test_the_oldest_films_make_way(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    film_bytes = 40 * 128 * 128
    with kept(film_maker.address, tmp_path, "--video-bytes", str(2 * film_bytes + 280)) as (url, server):
        first, second = [await ended(url, seed=seed, **LARGE) for seed in (1, 2)]
        assert first["status"] == second["status"] == "completed"
        assert get(url, f"/{first['id']}").status_code == 404
        assert get(url, f"/{second['id']}/content").content == frames(2, 40, steps=1, side=128)
        page = fetched(server.metrics_address)
        assert film_bytes < value(page, "omnistage_gateway_film_bytes") < film_bytes + 2000  # With the row of its job.
        assert value(page, "omnistage_gateway_films_ended_total", status="completed", code="OK") == 2


async def test_one_that_is_deleted_is_made_no_more(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    metrics = film_maker.stages["diffusion"].metrics_address

    def drawn() -> float:
        return value(fetched(metrics), "omnistage_stage_inflight")

    with kept(film_maker.address, tmp_path, "--video-runs", "1") as (url, server):
        running, waiting = (ask(url, **LONG).json()["id"] for _ in range(2))
        await until_it_is(("in_progress",), url, running)
        await until(lambda: drawn() == 1)
        for name in (waiting, running):
            assert delete(url, name).json() == {"id": name, "object": "video.deleted", "deleted": True}
            assert get(url, f"/{name}").status_code == 404
        await until(lambda: drawn() == 0)
        assert (await ended(url, steps=1))["status"] == "completed"
        assert value(fetched(server.metrics_address), "omnistage_gateway_films_ended_total", status="deleted", code="CANCELLED") == 2


async def test_one_host_has_a_part_of_the_places_whatever_keys_it_invents(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path, "--video-jobs", "4", "--video-runs", "1") as (url, _):
        names = [ask(url, "ann", **LONG).json()["id"] for _ in range(3)]
        refused = ask(url, "ann", **LONG)
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "OVERLOADED") and int(refused.headers["retry-after"]) > 0
        assert ask(url, "ben", steps=1).status_code == ask(url, "", steps=1).status_code == 503
        assert ask(url, "ann", host="127.0.0.2", steps=1).status_code == 200
        assert ask(url, "cat", host="127.0.0.3", steps=1).status_code == 503
        delete(url, names[2])
        assert ask(url, "cat", host="127.0.0.3", steps=1).status_code == 200


async def test_clients_take_turns(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """One of two places is for a client that has none, however many films another one asked for before."""
    with kept(film_maker.address, tmp_path, "--video-runs", "2") as (url, _):
        long = [ask(url, "ann", **LONG).json()["id"] for _ in range(2)]
        await until_it_is(("in_progress",), url, long[1])
        later = ask(url, "ann", **LONG).json()["id"]
        late = ask(url, "ben", steps=1).json()["id"]
        delete(url, long[0])
        assert (await over(url, late, "ben"))["status"] == "completed"
        assert get(url, f"/{long[1]}").json()["status"] == "in_progress"
        assert get(url, f"/{later}").json()["progress"] < 100


async def test_a_film_waits_for_a_router_that_is_away(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    flags = ("--pipeline", "toy-film", "--stages", f"diffusion={film_maker.addresses['diffusion']}", "--grace", "0")
    with ServerProcess("omnistage.router", *flags, log_folder=tmp_path) as first:
        first.wait_ready()
        with kept(first.address, tmp_path) as (url, server):
            name = ask(url, **LONG).json()["id"]
            await until_it_is(("in_progress",), url, name)
            first.process.kill()
            first.wait()
            await until(lambda: any(json.loads(line)["event"] == "film.waits" for line in server.log().splitlines()))
            assert get(url, f"/{name}").json()["status"] == "queued"
            with ServerProcess("omnistage.router", *flags, "--address", first.address, log_folder=tmp_path) as second:
                second.wait_ready()
                assert (await over(url, name))["status"] == "completed"
                assert get(url, f"/{name}/content").content == frames(steps=LONG["steps"])


def test_a_film_that_ends_servers_is_not_begun_for_ever() -> None:
    loses, waits, busy = (film_job() for _ in range(3))
    loses.progress = 5
    assert [pause_s(StageLostError("lost"), loses) for _ in range(3)] == [AGAIN_S, AGAIN_S, None]
    pauses = [pause_s(StageLostError("none is reachable"), waits) for _ in range(24)]
    assert pauses == [2, 4, 8, 16, *[20] * 19, None]
    for error in (OverloadedError("full"), StartingError("it starts"), UnavailableError("no router")):
        assert [pause_s(error, busy) for _ in range(100)] == [AGAIN_S] * 100
    assert pause_s(RequestError("no"), busy) is None


async def test_a_full_disk_costs_one_film_alone(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path) as (url, server):
        before = await ended(url, steps=1)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (MIB // 2, resource.RLIM_INFINITY))
        failed = await ended(url, **LARGE)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "disk_full") and "cannot write" in failed["error"]["message"]
        noise = np.random.default_rng(1).integers(0, 256, (900, 900), dtype=np.uint8)
        refused = httpx2.post(f"{url}/v1/videos", files={"input_reference": png(noise)}, data={"prompt": "a cat"}, headers=by("ann"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
        assert get(url, f"/{before['id']}/content").content == frames(steps=1)
        assert left(tmp_path) == {".bin"}
        assert (await ended(url, steps=2))["status"] == "completed"
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (await ended(url, **LARGE))["status"] == "completed"


async def test_a_film_that_a_full_disk_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "film.part"
    path.symlink_to("/dev/full")
    growing = Growing(path)
    with pytest.raises(OSError, match="No space left"):
        await growing.write(b"piece")
    await growing.reset(is_whole=False)
    assert not path.is_symlink()
    await growing.write(b"next try")
    growing.end()
    assert path.read_bytes() == b"next try"


async def test_a_job_of_nobody_costs_no_other(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """The name of its client can be no key."""
    with kept(film_maker.address, tmp_path) as (url, _):
        names = [(await ended(url, seed=number, steps=1))["id"] for number in range(2)]
    with sqlite3.connect(tmp_path / "films" / DATABASE) as database:
        (row,) = database.execute("SELECT job FROM jobs WHERE id = ?", (names[0],)).fetchone()
        database.execute("UPDATE jobs SET job = ? WHERE id = ?", (json.dumps({**json.loads(row), "who": "\N{CAT}"}), names[0]))
    with kept(film_maker.address, tmp_path) as (url, _):
        assert [job["id"] for job in get(url).json()["data"]] == names[1:]


async def test_nobody_makes_the_films_of_another_host_go(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """However many jobs it sends that fail at once."""
    with kept(film_maker.address, tmp_path, "--video-bytes", str(MIB)) as (url, _):
        honest = (await ended(url, steps=1))["id"]
        for number in range(20):
            await ended(url, f"key {number}", host="127.0.0.2", prompt="\N{CAT}" * 30_000, options={"nonsense": "1"})
        assert get(url, f"/{honest}").json()["status"] == "completed"
        assert get(url, f"/{honest}/content").status_code == 200
    evil = [film_job(f"video_{n}", f"key {n}", ended_at=1.0, status="failed", host="evil") for n in range(film_jobs.MAX_ENDED_JOBS)]
    jobs = [film_job("video_x", ended_at=1.0, status="completed", host="honest"), *evil]
    assert film_jobs._first_to_go(jobs, lambda job: 1) is jobs[1]


async def test_many_who_ask_at_once_get_no_more_jobs_than_there_may_be(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """Room is made for each of them, which other requests do not wait for."""
    with kept(film_maker.address, tmp_path, "--video-bytes", str(MIB), "--video-jobs", "4") as (url, _):
        for number in range(8):  # Rows that must go.
            await ended(url, seed=number, prompt="\N{CAT}" * 30_000, options={"word": "x"})
        body = {"prompt": "\N{CAT}" * 30_000, **LONG}
        async with httpx2.AsyncClient() as client:
            asking = [client.post(f"{url}/v1/videos", json={**body, "seed": n}, headers=by(f"key-{n}")) for n in range(12)]
            answers = await asyncio.gather(*asking)
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 9
        assert ask(url, host="127.0.0.2").status_code == 200


async def test_what_a_job_holds_beside_its_film_is_counted(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    """The rows of jobs that ended make way for new ones, and the folder stays within its bytes."""
    with kept(film_maker.address, tmp_path, "--video-bytes", str(MIB)) as (url, _):
        options: dict[str, Any] = {"prompt": "\N{CAT}" * 30_000, "options": {"word": "x" * 60_000}, "steps": 1, "frames": 2}
        names = [(await ended(url, seed=number, **options))["id"] for number in range(14)]
        left_jobs = [job["id"] for job in get(url, "?limit=100&order=asc").json()["data"]]
        assert left_jobs and left_jobs == names[-len(left_jobs) :] and len(left_jobs) < len(names)
    with sqlite3.connect(tmp_path / "films" / DATABASE) as database:
        (total,) = database.execute("SELECT SUM(LENGTH(CAST(job AS BLOB))) FROM jobs").fetchone()
        assert total <= MIB
        assert not database.execute("SELECT COUNT(*) FROM jobs WHERE job LIKE '%xxxxxxxx%'").fetchone()[0], "options of jobs that are over"


@lengths.rounds(12, 200)
async def test_jobs_that_hold_all_they_may_go_on_after_a_restart(film_maker: servers.ServerProcesses, tmp_path: Path, rounds: int) -> None:
    """They wait behind a long film until their gateway is killed. Every second one has an option that nobody knows. The next gateway reads
    rows one by one: it needs little more memory than their texts have."""
    flags = ("--video-jobs", str(2 * rounds), "--video-bytes", str(512 * MIB))
    largest: dict[str, Any] = {"prompt": "\N{CAT}" * 32_000, "steps": 1, "frames": 2}
    unknown: dict[str, Any] = {"options": {"word": "\N{CAT}" * 65_000}}
    with kept(film_maker.address, tmp_path, *flags, "--video-runs", "1") as (url, server):
        empty_bytes = peak_bytes(server.pid)
        first = ask(url, steps=1000).json()["id"]
        hosts = [f"127.0.0.{2 + number % 4}" for number in range(rounds)]
        jobs = [ask(url, host=host, seed=n, **largest, **(unknown if n % 2 else {})).json() for n, host in enumerate(hosts)]
        assert {job["status"] for job in jobs} == {"queued"}
        server.process.kill()
        server.wait()
    texts_bytes = 4 * rounds * (32_000 + 65_000 // 2)
    with kept(film_maker.address, tmp_path, *flags, "--video-runs", "2") as (url, server):
        assert peak_bytes(server.pid) - empty_bytes < texts_bytes + 32 * MIB
        delete(url, first)
        states = [await over(url, job["id"]) for job in jobs]
        outcomes = [(job["status"], (job["error"] or {}).get("code")) for job in states]
        assert outcomes == rounds // 2 * [("completed", None), ("failed", "invalid_value")]


async def test_a_film_that_has_more_than_half_of_the_room_costs_no_other(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path, "--video-bytes", str(MIB)) as (url, _):
        first, large = await ended(url, steps=1), await ended(url, **LARGE)
        assert (large["status"], large["error"]["code"], large["bytes"]) == ("failed", "too_large", 0)
        assert get(url, f"/{first['id']}/content").content == frames(steps=1) and left(tmp_path) == {".bin"}


async def test_a_folder_is_of_one_gateway(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path), pytest.raises(NotReady, match="another gateway has it"), kept(film_maker.address, tmp_path):
        pass
    with kept(film_maker.address, tmp_path) as (url, _):
        assert get(url).json()["data"] == []


async def test_without_folder_nothing_is_left(film_maker: servers.ServerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with gateway(film_maker.address, tmp_path) as server:
        url = f"http://{server.address}"
        shown = await ended(url, steps=1)
        assert get(url, f"/{shown['id']}/content").content == frames(steps=1)
        assert temporary(tmp_path)
    assert not temporary(tmp_path)


async def test_the_next_one_removes_leftovers(film_maker: servers.ServerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of others stay: one that runs, one that has just begun, one that a stack has made for its gateway."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    others = [tmp_path / f"omnistage-films-{name}" for name in ("newborn_", "0123456789ab")]
    for other in others:
        other.mkdir()
    (others[1] / ".lock").touch()
    with gateway(film_maker.address, tmp_path) as running, gateway(film_maker.address, tmp_path) as killed:
        before = {*temporary(tmp_path)} - {*others}
        assert len(before) == 2
        killed.process.kill()
        killed.wait()
        with gateway(film_maker.address, tmp_path):
            after = {*temporary(tmp_path)} - {*others}
            assert len(after) == 2 and len(after & before) == 1
        assert running.alive
    assert {*temporary(tmp_path)} == {*others}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The database of a folder while another process writes it."""
    database = sqlite3.connect(folder / "films" / DATABASE, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        database.execute("ROLLBACK")
        database.close()


async def test_a_film_that_cannot_be_deleted_is_still_there(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path) as (url, _):
        name = (await ended(url, steps=1))["id"]
        with locked(tmp_path):
            refused = delete(url, name)
            unkept = httpx2.post(f"{url}/v1/videos", json={"prompt": "a cat"}, headers=by("ann"), timeout=60)
        for answer, told in ((refused, "cannot delete a video"), (unkept, "cannot keep a video")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "not_written") and told in error["message"]
        assert [job["id"] for job in get(url).json()["data"]] == [name]
        assert delete(url, name).status_code == 200
        assert get(url, f"/{name}").status_code == 404 and left(tmp_path) == set()


async def test_a_film_whose_file_was_removed_by_hand_has_failed(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path) as (url, _):
        name = (await ended(url, steps=1))["id"]
        for path in (tmp_path / "films").glob(f"{name}.*"):
            path.unlink()
        answer = get(url, f"/{name}/content")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_lost")
        shown = get(url, f"/{name}").json()
        assert (shown["status"], shown["error"]["code"], shown["bytes"]) == ("failed", "file_lost", 0)


async def test_a_range_that_is_none_is_refused_in_the_shape_of_the_interface(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with kept(film_maker.address, tmp_path) as (url, _):
        shown = await ended(url, steps=1)
        place, size = f"/{shown['id']}/content", shown["bytes"]
        beyond = (f"bytes={size}-", "bytes=" + ",".join(f"{number}-{number}" for number in range(101)))
        refusals = dict.fromkeys(("bytes=5-2", "bytes=a-b", "bytes=", "bytes=-", "lines=0-1"), 400) | dict.fromkeys(beyond, 416)
        for asked, status in refusals.items():
            answer = get(url, place, Range=asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "Range"), asked
        whole = get(url, place).content
        for asked, begin, end in (("bytes=3-9", 3, 10), ("bytes=-4", size - 4, size), (f"bytes={size - 1}-", size - 1, size)):
            answer = get(url, place, Range=asked)
            assert (answer.status_code, answer.content) == (206, whole[begin:end]), asked
            assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
        assert get(url, f"{place}?stream=true").content == whole
        head = httpx2.head(f"{url}/v1/videos{place}", headers=by("ann"))
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(size))


def test_films_are_not_kept_for_ever(film_maker: servers.ServerProcesses, tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="video-kept"), kept(film_maker.address, tmp_path, "--video-kept", "inf"):
        pass
