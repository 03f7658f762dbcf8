"""Films of the toy film maker, as they are asked for over HTTP, and as they must be."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np

from helpers.waiting import until
from omnistage.gateway.film_store import FilmJob
from omnistage.models.toy import film, formulas

PROMPT = "a cat"
SEED = 5
FRAMES = 11
ASKED = {"prompt": PROMPT, "seed": SEED, "frames": FRAMES}
CHAIN: dict[str, Any] = {"kinds": ["diffusion"], "pipeline": "toy-film", "family": "toy-film"}
"""Arguments of `servers.stack` for the toy film maker."""
SLOW_CHAIN: dict[str, Any] = {**CHAIN, "options": {"interval_s": 0.1}}
"""The same with a pause before each step."""


def frames(seed: int = SEED, count: int = FRAMES, *, shown: int = 0, steps: int = film.STEPS, side: int = film.SIDE) -> bytes:
    """The file of a film: a byte for each pixel. shown: the sum of the pixels that were given."""
    begun = formulas.noise(seed, np.arange(count), np.arange(side), np.arange(side))
    return formulas.latent_after(begun, formulas.steer(PROMPT, "", film.GUIDANCE, shown), steps).astype(np.uint8).tobytes()


def ask(url: str, key: str = "ann", host: str = "127.0.0.1", **body: Any) -> httpx2.Response:
    """For a film, in JSON. host: address on loopback that the request comes from. body: beside `ASKED`, or in its place; None: without
    it."""
    asked = {name: value for name, value in {**ASKED, **body}.items() if value is not None}
    with httpx2.Client(transport=httpx2.HTTPTransport(local_address=host)) as client:
        return client.post(f"{url}/v1/videos", json=asked, headers=by(key))


def get(url: str, path: str = "", key: str = "ann", **headers: str) -> httpx2.Response:
    """path: below /v1/videos."""
    return httpx2.get(f"{url}/v1/videos{path}", headers={**by(key), **headers})


def film_job(name: str = "video_1", who: str = "ann", **fields: Any) -> FilmJob:
    """A job as a gateway keeps it. fields: beside, or in place of, those of a small film."""
    common = {"created_at": 1, "prompt": PROMPT, "options": {"seed": SEED}, "model": "", "size": "", "seconds": ""}
    return FilmJob(name, who, **{**common, **fields})


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def over(url: str, name: str, key: str = "ann") -> dict[str, Any]:
    """The last state of a job, when it has ended."""
    return await until_it_is(("completed", "failed"), url, name, key)


async def until_it_is(status: tuple[str, ...], url: str, name: str, key: str = "ann") -> dict[str, Any]:
    shown: dict[str, Any] = {}

    def is_so() -> bool:
        shown.update(get(url, f"/{name}", key).json())
        return shown["status"] in status

    await until(is_so)
    return shown
