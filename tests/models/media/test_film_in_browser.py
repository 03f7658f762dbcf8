"""Chromium plays films piece by piece, as a page does that shows one while it is drawn."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import pytest
from playwright.async_api import Page

from helpers import lengths
from helpers.browser import browser, needs_chromium
from omnistage.models.media.film_file import KINDS, FilmKind, FilmWriter, Track

FRAMES, RATE_HZ = 32, 16
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 30, 90))
"""Each for half a second."""
CLOSE = 12
"""Levels. A browser changes the colours in 8 bits, as fast as it can."""

APPEND = """async ([type, pieces]) => {
  const once = (target, name) => new Promise((done) => target.addEventListener(name, done, {once: true}));
  const film = document.body.appendChild(document.createElement("video"));
  const source = new MediaSource();
  film.src = URL.createObjectURL(source);
  await once(source, "sourceopen");
  const buffer = source.addSourceBuffer(type);
  const failed = once(film, "error").then(() => { throw new Error(film.error.message); });
  const ends = [];
  for (const piece of pieces) {
    buffer.appendBuffer(Uint8Array.from(atob(piece), (letter) => letter.charCodeAt(0)));
    await Promise.race([once(buffer, "updateend"), failed]);
    ends.push(buffer.buffered.length === 1 ? buffer.buffered.end(0) : -1);
  }
  source.endOfStream();
  window.film = film;
  return ends;
}"""

LOOK = """async (time) => {
  const sought = new Promise((done) => film.addEventListener("seeked", done, {once: true}));
  film.currentTime = time;
  await Promise.race([sought, new Promise((done) => setTimeout(done, 1000))]);
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.drawImage(film, 0, 0);
  return [...canvas.getImageData(5, 5, 1, 1).data].slice(0, 3);
}"""
LOOKS = 60
"""At most: a browser may show the frame before for a while, on a machine that is busy."""


@needs_chromium
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@lengths.drawn_cells(1, "is_heard", [False, True], ids=["silent", "heard"])
async def test_a_film_plays_while_it_grows(kind: FilmKind, is_heard: bool) -> None:
    sound = np.sin(np.arange(2 * 44_100)[:, None] / [15, 20]).astype(np.float32) * 0.3
    writer = FilmWriter(kind, RATE_HZ, FRAMES, Track(sound, 44_100) if is_heard else None)
    frames = [np.full((96, 160, 3), COLOURS[number * 2 // RATE_HZ], np.uint8) for number in range(FRAMES)]
    pieces = [piece for frame in frames if (piece := writer.write(frame))]
    async with browser() as context:
        page = await context.new_page()
        said = [f'{kind.media_type}; codecs="{writer.codecs}"', [b64encode(piece.data).decode() for piece in pieces]]
        ends = await page.evaluate(APPEND, said)
        apart = [await _apart(page, 0.25 + 0.5 * number, colour) for number, colour in enumerate(COLOURS)]
        size = await page.evaluate("[film.videoWidth, film.videoHeight]")
    assert size == [160, 96]
    assert ends == pytest.approx([number / RATE_HZ for number in range(1, FRAMES + 1)], abs=0.04 if is_heard else 0.002)
    assert max(apart) <= CLOSE


async def _apart(page: Page, time_s: float, colour: tuple[int, int, int]) -> int:
    """By how many levels the film shows another colour at that time."""
    for _ in range(LOOKS):
        if (apart := int(np.abs(np.subtract(await page.evaluate(LOOK, time_s), colour)).max())) <= CLOSE:
            break
    return apart
