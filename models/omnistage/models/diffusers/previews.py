"""Previews: pictures of an unfinished drawing, made without the VAE.

A preview shows the estimate x0 = x - sigma v of the picture without its noise, not the noisy latents, which stay noise through any map
until the last steps. Each place of the latents becomes one pixel by a linear map, which is fitted to the pictures that were served: latents
in, mean colours of the pixels under them out. Until there is one picture the VAE decodes the estimate, which costs as much as a picture.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image as pillow
from PIL.Image import Image
from torch import Tensor

RIDGE = 1e-3
"""Added to the squares, because a map cannot be fitted to the latents of one flat picture alone."""
MEMORY = 0.9
"""The weight of all earlier pictures, compared with the newest picture."""
SIDE = 256
"""Pixels of the longer side of a preview if none is asked for; never more than the picture's."""


class LinearMap:
    """A linear map from latents to colours, by least squares over the pictures that were drawn."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._products: Tensor | None = None
        self._map: Tensor | None = None

    @property
    def is_fitted(self) -> bool:
        return self._map is not None

    def fit(self, grid: Tensor, image: Image) -> None:
        """Learn from a grid of latents, [channels, height, width], and the picture that the VAE made of it."""
        channels, height, width = grid.shape
        small = image.resize((width, height), pillow.Resampling.BOX)
        colours = torch.from_numpy(np.asarray(small, dtype=np.float64).reshape(height * width, -1) / 255)
        rows = _with_one(grid)
        squares, products = rows.T @ rows / len(rows), rows.T @ colours / len(rows)
        if self._squares is not None and self._products is not None and self._products.shape == products.shape:
            squares, products = MEMORY * self._squares + squares, MEMORY * self._products + products
        self._squares, self._products = squares, products
        self._map = torch.linalg.solve(squares + RIDGE * torch.eye(channels + 1, dtype=torch.float64), products)

    def show(self, grid: Tensor) -> Image:
        """The preview of a grid of latents, [channels, height, width], with one pixel for each place."""
        assert self._map is not None
        _, height, width = grid.shape
        colours = (_with_one(grid) @ self._map).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pillow.fromarray(colours.reshape(height, width, -1).numpy())


def _with_one(grid: Tensor) -> Tensor:
    """The latents as rows with a 1 at the end, so that the map can add a constant: [places, channels + 1] in float64."""
    places = grid.flatten(1).T.double().cpu()
    return torch.cat([places, torch.ones(len(places), 1, dtype=torch.float64)], dim=1)


def resize_preview(image: Image, side: int, width: int, height: int) -> Image:
    """The preview, resized so that its longer side is `side`, or SIDE for 0, but no longer than the picture's own."""
    longest = min(side or SIDE, max(width, height))
    scale = longest / max(width, height)
    return image.resize((max(round(width * scale), 1), max(round(height * scale), 1)), pillow.Resampling.BICUBIC)


def is_due(step: int, steps: int, previews: int) -> bool:
    """Whether a preview is shown after this step. previews: their number. Each comes in the middle of its share of the steps before the
    last; the last step shows none, as the picture itself follows."""
    max_step = steps - 1
    shown = min(previews, max_step)
    return step <= max_step and (2 * step * shown + max_step) // (2 * max_step) > (2 * (step - 1) * shown + max_step) // (2 * max_step)
