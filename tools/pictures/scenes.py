"""The world of the default picture model: coloured shapes on a background, in words and in pixels.

A Scene is exact; a caption describes it in one of several ways, and may leave out usual things (a medium size, the middle, a white
background). One scene in HELD_OUT_EVERY is never shown in training, in any words: these scenes judge the model.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIDE = 128
OVERSAMPLE = 4
Colour = tuple[int, int, int] | int
"""The value of a pixel: red, green and blue, or one number."""
HELD_OUT_EVERY = 12

COLOURS = {
    "red": (220, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (250, 220, 50),
    "green": (45, 160, 70),
    "blue": (50, 90, 210),
    "purple": (125, 55, 165),
    "pink": (245, 150, 195),
    "black": (25, 25, 25),
    "white": (245, 245, 245),
}
KINDS = ("circle", "square", "triangle", "star", "heart")
RADII = {"small": 15, "medium": 24, "large": 34}
"""Half of the side of the square box that a shape fills, in pixels, by size."""
NEAR, MIDDLE, FAR = 36, 64, 92
PLACES = {
    "top left": (NEAR, NEAR),
    "top": (MIDDLE, NEAR),
    "top right": (FAR, NEAR),
    "left": (NEAR, MIDDLE),
    "middle": (MIDDLE, MIDDLE),
    "right": (FAR, MIDDLE),
    "bottom left": (NEAR, FAR),
    "bottom": (MIDDLE, FAR),
    "bottom right": (FAR, FAR),
}
PAIRS = tuple(
    (one, other) for one, a in PLACES.items() for other, b in PLACES.items() if math.dist(a, b) > 50 and "middle" not in (one, other)
)
"""Pairs of places for two shapes that do not touch."""
JITTER = 2
"""Largest number of pixels by which a centre may be off its place, in either direction."""

_SIZE_WORDS = {
    "small": ("small", "small", "small", "tiny", "little", "very small"),
    "medium": ("", "", "", "medium", "medium-sized"),
    "large": ("large", "large", "big", "huge", "giant", "very large"),
}
KIND_WORDS = {
    "circle": ("circle", "circle", "circle", "disc", "disk", "dot", "ball"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
}
OTHER_COLOUR_WORDS = {"purple": "violet"}
_STARTS = (
    *("",) * 8,
    "a picture of ",
    "draw ",
    "an image of ",
    "please draw ",
    "show me ",
    "a photo of ",
    "make a picture of ",
    "I would like ",
)
_AT = {
    "top": ("at the top", "at the top", "near the top edge", "on top"),
    "bottom": ("at the bottom", "at the bottom", "near the bottom edge"),
    "left": ("on the left", "on the left", "at the left", "on the left side", "to the left"),
    "right": ("on the right", "on the right", "at the right", "on the right side", "to the right"),
    "middle": ("in the middle", "in the centre", "in the center", "at the center"),
}


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape. place: a key of PLACES. dx, dy: pixels from its place to its centre. scale: its size is multiplied by it."""

    colour: str
    kind: str
    size: str
    place: str
    dx: float = 0.0
    dy: float = 0.0
    scale: float = 1.0

    @property
    def centre(self) -> tuple[float, float]:
        """x and y in pixels."""
        x, y = PLACES[self.place]
        return x + self.dx, y + self.dy

    @property
    def radius(self) -> float:
        return RADII[self.size] * self.scale


@dataclass(frozen=True, slots=True)
class Scene:
    """A background colour with one shape or two."""

    background: str
    things: tuple[Thing, ...]

    @property
    def held_out(self) -> bool:
        """Whether training never shows the scene. It depends on what a caption can describe, not on the jitter."""
        facts = [self.background, *(f"{t.colour} {t.kind} {t.size} {t.place}" for t in self.things)]
        digest = hashlib.sha256("|".join(facts).encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def draw_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """A random scene. held_out: one of the held-out scenes, else one of the others. One scene in three has two shapes."""
    while True:
        background = rng.choice(tuple(COLOURS))
        colours = [colour for colour in COLOURS if colour != background]
        if rng.random() < 2 / 3:
            things: tuple[Thing, ...] = (
                Thing(rng.choice(colours), rng.choice(KINDS), rng.choice(tuple(RADII)), rng.choice(tuple(PLACES))),
            )
        else:
            sizes = ("small", "medium")
            things = tuple(Thing(rng.choice(colours), rng.choice(KINDS), rng.choice(sizes), place) for place in rng.choice(PAIRS))
        scene = Scene(background, things)
        if scene.held_out == held_out:
            return replace(scene, things=tuple(_jitter(rng, thing) for thing in things))


def _jitter(rng: random.Random, thing: Thing) -> Thing:
    """The shape with random dx, dy and scale."""
    return replace(thing, dx=rng.uniform(-JITTER, JITTER), dy=rng.uniform(-JITTER, JITTER), scale=rng.uniform(0.96, 1.04))


# In words --------------------------------------------------------------------------------------------------------------------------


def caption(rng: random.Random, scene: Scene) -> str:
    """Describe a scene in words; the same scene gets many descriptions."""
    words = _words(rng, scene)
    chance = rng.random()
    if chance < 0.2:
        words = words[0].upper() + words[1:]
    elif chance < 0.215:
        words = words.upper()
    elif chance < 0.23:
        words = words.title()
    return words + rng.choice(("", "", "", "", "."))


def _words(rng: random.Random, scene: Scene) -> str:
    """A description in small letters, without a full stop. Usual properties may be left out, but only of one shape."""
    is_alone = len(scene.things) == 1
    silent_background = scene.background == "white" and rng.random() < 0.4
    things = [_thing(rng, thing, is_alone) for thing in scene.things]
    phrase = _pair(rng, scene, things) if len(things) == 2 else things[0]
    if rng.random() < 0.15:
        phrase = _bare(phrase).replace(" and an ", " and ").replace(" and a ", " and ")
    if silent_background:
        return _start(rng, phrase)
    return _on(rng, phrase, _colour(rng, scene.background))


def _on(rng: random.Random, phrase: str, colour: str) -> str:
    """Add the background to the words for the shapes. colour: the word for the background."""
    ground = _article(f"{colour} {rng.choice(('background', 'background', 'background', 'canvas', 'ground'))}")
    comma = rng.choice(("", ","))
    forms = (
        lambda: _start(rng, f"{phrase} on {ground}"),
        lambda: _start(rng, f"{phrase} {rng.choice(('against', 'with', 'over', 'in front of'))} {ground}"),
        lambda: f"{ground} with {phrase}",
        lambda: f"{_bare(phrase)}, {colour} background",
        lambda: f"{colour} background, {phrase}",
        lambda: f"on {ground}{comma} {phrase}",
        lambda: _start(rng, f"{phrase}{comma} {rng.choice(('on', 'on', 'in front of', 'against'))} {colour}"),
        lambda: f"on {colour}{comma} {phrase}",
    )
    return rng.choice(forms)()


def _colour(rng: random.Random, colour: str) -> str:
    """A word for a colour; a few colours have two."""
    return OTHER_COLOUR_WORDS[colour] if colour in OTHER_COLOUR_WORDS and rng.random() < 0.2 else colour


def _start(rng: random.Random, phrase: str) -> str:
    """The words with a random beginning, such as "draw ", or none."""
    return rng.choice(_STARTS) + phrase


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _thing(rng: random.Random, thing: Thing, is_alone: bool) -> str:
    """Words for a shape. is_alone: it is the only one, so the middle need not be named."""
    words = [rng.choice(_SIZE_WORDS[thing.size]), _colour(rng, thing.colour), rng.choice(KIND_WORDS[thing.kind])]
    name = _article(" ".join(filter(None, words)))
    if is_alone and thing.place == "middle" and rng.random() < 0.5:
        return name
    place = _place(rng, thing.place)
    if is_alone and rng.random() < 0.1:
        return f"{place}{rng.choice(('', ','))} {name}"
    return f"{name} {place}"


def _place(rng: random.Random, place: str) -> str:
    """Words for a place."""
    if place in _AT:
        return rng.choice(_AT[place])
    vertical, horizontal = place.split()
    vertical = rng.choice({"top": ("top", "top", "upper"), "bottom": ("bottom", "bottom", "lower")}[vertical])
    return f"{rng.choice(('in', 'in', 'in', 'at', 'on'))} the {vertical} {horizontal}{rng.choice(('', '', ' corner'))}"


def _pair(rng: random.Random, scene: Scene, things: list[str]) -> str:
    """Words for two shapes: each with its place, or, for some pairs, the place of one shape relative to the other. things: words for
    each."""
    one, other = scene.things
    relations = {
        ("left", "right"): ("to the left of", "left of", "next to", "beside"),
        ("right", "left"): ("to the right of", "right of"),
        ("top", "bottom"): ("above", "over"),
        ("bottom", "top"): ("below", "under"),
    }
    relation = relations.get((one.place, other.place))
    if relation is not None and rng.random() < 0.5:
        names = [f"{thing.rsplit(f' {kind} ', 1)[0]} {kind}" for thing, kind in _kinds(things)]  # Without their places.
        return f"{names[0]} {rng.choice(relation)} {names[1]}"
    return f"{things[0]} and {things[1]}"


def _kinds(things: list[str]) -> list[tuple[str, str]]:
    """The words for each shape, with the word in them for its kind."""
    words = {word for names in KIND_WORDS.values() for word in names}
    return [(thing, next(word for word in thing.split() if word in words)) for thing in things]


def _bare(phrase: str) -> str:
    """The words without their article."""
    return phrase.removeprefix("an ").removeprefix("a ")


# In pixels -------------------------------------------------------------------------------------------------------------------------


def outline(thing: Thing) -> list[tuple[float, float]] | None:
    """The corners of a shape in pixels; None for a circle."""
    x, y = thing.centre
    r = thing.radius
    if thing.kind == "square":
        side = 0.9 * r
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    if thing.kind == "triangle":
        return [(x, y - r), (x + r, y + 0.85 * r), (x - r, y + 0.85 * r)]
    if thing.kind == "star":
        corners = [(r if k % 2 == 0 else 0.42 * r, math.pi * (k / 5 - 0.5)) for k in range(10)]  # Outer and inner ones, from the top.
        return [(x + distance * math.cos(angle), y + distance * math.sin(angle)) for distance, angle in corners]
    if thing.kind == "heart":
        return [
            (x + r * math.sin(t) ** 3, y - r * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16)
            for t in (2 * math.pi * k / 40 for k in range(40))
        ]
    return None


def picture(scene: Scene) -> NDArray[np.uint8]:
    """The scene as RGB, [SIDE, SIDE, 3]."""
    return _render(scene, "RGB", COLOURS[scene.background], [COLOURS[thing.colour] for thing in scene.things])


def mask(scene: Scene) -> NDArray[np.float32]:
    """The shapes of a scene, [SIDE, SIDE]: 1 inside a shape, 0 outside, and between the two at edges."""
    return _render(scene, "L", 0, [255] * len(scene.things)).astype(np.float32) / np.float32(255)


def _render(scene: Scene, mode: str, background: Colour, colours: Sequence[Colour]) -> NDArray[np.uint8]:
    """The pixels of a scene, averaged from a picture that is OVERSAMPLE times as large. colours: of the things."""
    image = Image.new(mode, (SIDE * OVERSAMPLE,) * 2, background)
    draw = ImageDraw.Draw(image)
    for thing, colour in zip(scene.things, colours, strict=True):
        if corners := outline(thing):
            draw.polygon([(x * OVERSAMPLE, y * OVERSAMPLE) for x, y in corners], fill=colour)
        else:
            (x, y), r = thing.centre, thing.radius
            draw.ellipse([v * OVERSAMPLE for v in (x - r, y - r, x + r, y + r)], fill=colour)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))
