"""Chromium plays films piece by piece, as a page does that shows one while it is drawn."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import pytest

from helpers.browser import browser, needs_chromium
from omnistage.models.media.film_file import KINDS, FilmKind, FilmWriter, Track

FRAMES, RATE_HZ = 32, 16
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 30, 90))
"""Each for half a second."""

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
  const canvas = document.createElement("canvas").getContext("2d");
  const colours = [];
  for (const time of [0.25, 0.75, 1.25, 1.75]) {
    const shown = new Promise((done) => {
      const look = (_, frame) => Math.abs(frame.mediaTime - time) < 0.07 ? done() : film.requestVideoFrameCallback(look);
      film.requestVideoFrameCallback(look);
    });
    film.currentTime = time;
    await Promise.race([shown, failed]);
    canvas.drawImage(film, 0, 0);
    colours.push([...canvas.getImageData(5, 5, 1, 1).data].slice(0, 3));
  }
  return {ends, colours, size: [film.videoWidth, film.videoHeight]};
}"""


@needs_chromium
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("is_heard", [False, True], ids=["silent", "heard"])
async def test_a_film_plays_while_it_grows(kind: FilmKind, is_heard: bool) -> None:
    sound = np.sin(np.arange(2 * 44_100)[:, None] / [15, 20]).astype(np.float32) * 0.3
    writer = FilmWriter(kind, RATE_HZ, FRAMES, Track(sound, 44_100) if is_heard else None)
    frames = [np.full((96, 160, 3), COLOURS[number * 2 // RATE_HZ], np.uint8) for number in range(FRAMES)]
    pieces = [piece for frame in frames if (piece := writer.write(frame))]
    async with browser() as context:
        page = await context.new_page()
        said = [f'{kind.media_type}; codecs="{writer.codecs}"', [b64encode(piece.data).decode() for piece in pieces]]
        played = await page.evaluate(APPEND, said)
    assert played["size"] == [160, 96]
    assert played["ends"] == pytest.approx([number / RATE_HZ for number in range(1, FRAMES + 1)], abs=0.04 if is_heard else 0.002)
    for seen, colour in zip(played["colours"], COLOURS, strict=True):
        assert np.abs(np.subtract(seen, colour)).max() <= 12  # A browser changes the colours in 8 bits, as fast as it can.
