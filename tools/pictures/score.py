"""Scores pictures of the default model: the background, and the place, colour, kind and size of each shape.

It looks only at pixels, and only of scenes that were never shown in training. Each pixel counts as the colour of the palette that is
nearest to it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from tools.pictures.scenes import COLOURS, KINDS, PLACES, RADII, SIDE, Scene, Thing, caption, draw_scene, mask

BORDER = 6
"""Pixels at each edge of a picture. The most frequent colour there is the background's, because only large shapes reach so far."""
SMALLEST = 60
"""Fewest pixels of a shape that counts as drawn."""


def look_at(pixels: NDArray[np.uint8], scene: Scene) -> dict[str, list[bool]]:
    """Compare a picture with the scene that it should show. Returns which parts are right, by name: the background, and place, colour, kind
    and size of each thing. pixels: [SIDE, SIDE, 3]."""
    names, palette = list(COLOURS), np.array(list(COLOURS.values()), dtype=np.float32)
    nearest = np.square(pixels[:, :, None].astype(np.float32) - palette).sum(-1).argmin(-1)
    edge = np.concatenate([nearest[:BORDER].ravel(), nearest[-BORDER:].ravel(), nearest[:, :BORDER].ravel(), nearest[:, -BORDER:].ravel()])
    background = int(np.bincount(edge, minlength=len(names)).argmax())
    shapes = nearest != background
    y, x = np.mgrid[:SIDE, :SIDE]
    far = np.stack([np.hypot(x - thing.centre[0], y - thing.centre[1]) for thing in scene.things])
    owner = far.argmin(0)
    judgements = [_judge_thing(shapes & (owner == number), nearest, names, thing) for number, thing in enumerate(scene.things)]
    parts = zip(("place", "colour", "kind", "size"), map(list, zip(*judgements, strict=True)), strict=True)
    return {"background": [names[background] == scene.background], **dict(parts)}


def _judge_thing(shape: NDArray[np.bool_], nearest: NDArray[np.intp], names: list[str], thing: Thing) -> tuple[bool, bool, bool, bool]:
    """Whether place, colour, kind and size of one thing are right in the picture; all False if too few pixels show it. shape: [SIDE, SIDE],
    the pixels that are not background and are nearer to this thing than to another. nearest: [SIDE, SIDE], for each pixel the index in
    `names` of the nearest colour."""
    if shape.sum() < SMALLEST:
        return False, False, False, False
    rows, columns = np.nonzero(shape)
    top_y, bottom_y, left_x, right_x = rows.min(), rows.max(), columns.min(), columns.max()
    centre, radius = ((left_x + right_x) / 2, (top_y + bottom_y) / 2), max(right_x - left_x, bottom_y - top_y) / 2
    place = min(PLACES, key=lambda name: float(np.hypot(PLACES[name][0] - centre[0], PLACES[name][1] - centre[1])))
    colour = names[int(np.bincount(nearest[shape], minlength=len(names)).argmax())]
    size = min(RADII, key=lambda name: abs(RADII[name] - radius))
    return place == thing.place, colour == thing.colour, _kind(shape, thing, radius, centre) == thing.kind, size == thing.size


def _kind(shape: NDArray[np.bool_], thing: Thing, radius: float, centre: tuple[float, float]) -> str:
    """The kind that covers the pixels of a shape best, when it is drawn at the same centre and in about the same size. centre, radius: in
    pixels."""

    x, y = PLACES[thing.place]

    def overlap(candidate: tuple[str, float]) -> float:
        """Intersection over union of the shape and a kind in one of the sizes."""
        kind, scale = candidate
        other = replace(thing, kind=kind, dx=centre[0] - x, dy=centre[1] - y, scale=scale * radius / RADII[thing.size])
        kind_mask = mask(Scene("white", (other,))) > 0.5
        return float((kind_mask & shape).sum() / (kind_mask | shape).sum())

    return max(product(KINDS, (0.9, 1.0, 1.1)), key=overlap)[0]


def scenes(count: int, things: int, seed: int) -> list[tuple[Scene, str]]:
    """`count` held-out scenes with `things` shapes, each shape exactly in its place and size; and a caption for each scene."""
    rng = random.Random(seed)
    pairs = list[tuple[Scene, str]]()
    while len(pairs) < count:
        scene = draw_scene(rng, held_out=True)
        if len(scene.things) == things:
            scene = replace(scene, things=tuple(replace(thing, dx=0.0, dy=0.0, scale=1.0) for thing in scene.things))
            pairs.append((scene, caption(rng, scene)))
    return pairs


def score_pictures(draw: Callable[[str, int], NDArray[np.uint8]], pairs: Sequence[tuple[Scene, str]]) -> dict[str, float]:
    """The share of right parts over all pictures, 0 to 1, by name of the part. draw: makes the pixels for a caption and a seed. pairs: the
    scenes and their captions."""
    right, all_of = Counter[str](), Counter[str]()
    for number, (scene, words) in enumerate(pairs):
        for name, values in look_at(draw(words, number), scene).items():
            right[name] += sum(values)
            all_of[name] += len(values)
    return {name: round(right[name] / all_of[name], 3) for name in all_of}


def main(folder: Path, count: int = 64, steps: int = 16, guidance: list[float] | None = None, sheet: Path | None = None) -> None:
    """Draw held-out scenes with a saved model, and print the shares of right parts, for each guidance; the default ones are 0, 1, 2 and 3.
    sheet: a file for a picture of the first 24."""
    import torch
    from diffusers import ZImagePipeline

    torch.set_num_threads(1)
    pipe = ZImagePipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    for scale in guidance or (0.0, 1.0, 2.0, 3.0):
        pictures = list[NDArray[np.uint8]]()

        def draw(words: str, seed: int, scale: float = scale, pictures: list[NDArray[np.uint8]] = pictures) -> NDArray[np.uint8]:
            noise = torch.Generator().manual_seed(seed)
            picture = pipe(words, height=SIDE, width=SIDE, num_inference_steps=steps, guidance_scale=scale, generator=noise).images[0]
            pictures.append(np.asarray(picture))
            return pictures[-1]

        one, two = (score_pictures(draw, scenes(count, things, 7)) for things in (1, 2))
        print(json.dumps({"guidance": scale, "one": one, "two": two}), flush=True)
        if sheet:
            from PIL import Image

            tiles = [*pictures[:12], *pictures[count : count + 12]]
            rows = np.concatenate([np.concatenate(tiles[first : first + 6], 1) for first in range(0, 24, 6)], 0)
            Image.fromarray(rows).save(sheet.with_stem(f"{sheet.stem}-{scale:g}"))


if __name__ == "__main__":
    typer.run(main)
