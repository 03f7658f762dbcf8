"""Shows an encoded picture as coloured half blocks on a terminal: each cell has two pixels, one above the other."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_COLUMNS, MOST_ROWS = 48, 24

UPPER_HALF = "▀"
RESET = "\x1b[0m"

FORMATS = ("PNG", "JPEG", "WEBP")
BEHIND = (96, 96, 96)
"""The colour on which transparent pixels are shown: red, green, blue."""


def cells(data: bytes, columns: int, rows: int) -> list[str]:
    """A picture as lines of text for a terminal with 24 bits of colour; no lines if it cannot be decoded. data: PNG, JPEG or WebP. columns,
    rows: the largest size. Smaller pictures are not enlarged. Raises ModuleNotFoundError without Pillow."""
    if columns < 1 or rows < 1:
        return []
    from PIL import Image

    try:
        image = _flatten(Image.open(io.BytesIO(data), formats=FORMATS))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return []
    image.thumbnail((min(columns, MOST_COLUMNS), 2 * min(rows, MOST_ROWS)))
    width, height = image.size
    pixels = image.tobytes()
    colours = [";".join(map(str, pixels[at : at + 3])) for at in range(0, 3 * width * height, 3)]
    lines = []
    for top in range(0, height, 2):
        upper = colours[top * width : (top + 1) * width]
        lower = [f"48;2;{colour}" for colour in colours[(top + 1) * width : (top + 2) * width]] or ["49"] * width
        line = "".join(f"\x1b[38;2;{above};{below}m{UPPER_HALF}" for above, below in zip(upper, lower, strict=True))
        lines.append(f"{line}{RESET}")
    return lines


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height of an encoded picture in pixels, from its head; None without Pillow, and for a picture that Pillow cannot read."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS).size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _flatten(image: Image) -> Image:
    """The picture as RGB, with BEHIND in place of what is transparent."""
    from PIL import Image as images

    layer = image.convert("RGBA")
    background = images.new("RGBA", layer.size, BEHIND)
    background.alpha_composite(layer)
    return background.convert("RGB")
