"""The folder of films: what is kept in it, and what damage in it costs."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from helpers.videos import SEED
from omnistage.gateway.film_store import DATABASE, FilmJob, Growing, Store
from omnistage.host.errors import StartError


def test_other_users_read_nothing_in_a_folder_that_is_open_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = Store(str(tmp_path))
    given: dict[str, Any] = {"created_at": 1, "prompt": "a cat", "options": {}, "model": "", "size": "", "seconds": ""}
    job = FilmJob(f"video_{'a' * 32}", "ann", **given)
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
    given: dict[str, Any] = {"created_at": 1, "prompt": "a cat", "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    jobs = [FilmJob(f"video_{letter * 32}", "ann", **given) for letter in "abcdefg"]
    for job in jobs:
        store.put(job)
    whole = json.loads(jobs[0].row)
    faults = [
        "{",
        "[" * 100_000,
        json.dumps({**whole, "created_at": None}),
        json.dumps({**whole, "status": "lost"}),
        json.dumps({**whole, "options": {}}),
        json.dumps({**whole, "ended_at": "yesterday"}),
        json.dumps({**whole, "status": "failed"}),
        json.dumps({**whole, "error": ["lost"]}),
        json.dumps({**whole, "options": {"seed": math.nan}}),
        json.dumps({**whole, "ended_at": math.inf, "status": "completed"}),
        b"\xff\x00",
        json.dumps({name: value for name, value in whole.items() if name != random.Random(seed).choice(["who", "prompt", "size"])}),
        "null",
    ]
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
    text = {"created_at": 1, "prompt": "\N{CAT}" * 20_000, "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    names = [f"video_{number:032}" for number in range(40)]
    for name in names:
        store.put(FilmJob(name, "ann", **text))  # type: ignore[arg-type]
    store.close()
    data = bytearray((tmp_path / DATABASE).read_bytes())
    page_bytes = int.from_bytes(data[16:18])
    pages = [
        number for number in range(4, len(data) // page_bytes) if (data[number * page_bytes] == 13) == (place == "in the list of rows")
    ]
    begin = source.choice(pages) * page_bytes
    data[begin : begin + page_bytes] = source.randbytes(page_bytes)
    (tmp_path / DATABASE).write_bytes(data)
    store = Store(str(tmp_path))
    left_names = [job.id for job in store.jobs()]
    assert left_names == [name for name in names if name in left_names] and len(left_names) >= (39 if place == "in a page of a row" else 1)
    store.close()


def test_a_table_that_cannot_be_read_at_all_is_told(tmp_path: Path, seed: int) -> None:
    store = Store(str(tmp_path))
    text: dict[str, Any] = {"created_at": 1, "prompt": "a cat", "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    store.put(FilmJob(f"video_{'a' * 32}", "ann", **text))
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
    text: dict[str, Any] = {"created_at": 1, "prompt": "a cat", "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    ended: dict[str, Any] = {"status": "completed", "ended_at": 2.0, "media_type": "video/webm", "size_bytes": 1 << 62}
    done = FilmJob(f"video_{'a' * 32}", "ann", **text, **ended)
    waiting = FilmJob(f"video_{'b' * 32}", "ann", **text, picture_bytes=1 << 62)
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
    given: dict[str, Any] = {"created_at": 1, "prompt": "a cat", "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    jobs = [FilmJob(f"video_{letter * 32}", "ann", **given) for letter in "cab"]
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
