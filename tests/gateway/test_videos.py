"""Films over HTTP, as jobs: those of the toy film maker, whose frames are known beforehand."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.openai_document import document
from helpers.waiting import until
from omnistage.models.toy import film, formulas
from omnistage.models.toy.files import png
from omnistage.models.toy.products import FILM

PROMPT = "a cat"
SEED = 5
FRAMES = 11
SKETCH = np.add.outer(np.arange(16), 3 * np.arange(16)).astype(np.uint8)
URL_OF_SKETCH = "data:image/png;base64," + b64encode(png(SKETCH)).decode()
ASKED = {"prompt": PROMPT, "seed": SEED, "frames": FRAMES}


@pytest.fixture(scope="module")
def film_maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Stack]:
    """A piece is one frame to four."""
    with servers.stack(tmp_path_factory.mktemp("film"), kinds=["diffusion"], pipeline="toy-film", family="toy-film") as stack:
        yield stack


@pytest.fixture(scope="module")
def url(film_maker: servers.Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(film_maker.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}"


def frames(seed: int = SEED, count: int = FRAMES, shown: int = 0, steps: int = film.STEPS) -> bytes:
    """The file of a film. shown: the sum of the pixels that were given."""
    begun = formulas.noise(seed, np.arange(count), np.arange(film.SIDE), np.arange(film.SIDE))
    return formulas.drawn(begun, formulas.steer(PROMPT, "", film.GUIDANCE, shown), steps).astype(np.uint8).tobytes()


def ask(url: str, key: str = "ann", **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/videos", json={**ASKED, **body}, headers={"Authorization": f"Bearer {key}"})


def get(url: str, path: str = "", key: str = "ann") -> httpx2.Response:
    return httpx2.get(f"{url}/v1/videos{path}", headers={"Authorization": f"Bearer {key}"})


async def over(url: str, name: str, key: str = "ann") -> dict[str, Any]:
    """When it has ended."""
    shown: dict[str, Any] = {}

    def is_over() -> bool:
        shown.update(get(url, f"/{name}", key).json())
        return shown.get("status") in ("completed", "failed")

    await until(is_over)
    return shown


async def test_a_film_is_made_while_nobody_waits(url: str) -> None:
    created = ask(url, size="32x32", frames_per_second=11).json()
    assert created["object"] == "video" and created["status"] in ("queued", "in_progress") and created["seed"] == SEED
    assert (created["size"], created["seconds"], created["prompt"], created["error"]) == ("32x32", "1", PROMPT, None)
    shown = await over(url, created["id"])
    assert (shown["status"], shown["progress"], shown["model"], shown["frames"]) == ("completed", 100, "toy-film", FRAMES)
    assert shown["expires_at"] == pytest.approx(shown["completed_at"] + 86_400, abs=1) and shown["media_type"] == FILM
    file = get(url, f"/{created['id']}/content")
    assert file.content == frames() and file.headers["content-type"] == FILM and file.headers["x-content-type-options"] == "nosniff"
    for one in (created, shown, get(url).json()["data"][0]):
        document().check({**one, "size": "1280x720"}, "VideoResource")  # Others had no name there.
