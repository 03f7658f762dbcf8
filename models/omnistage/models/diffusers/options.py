"""What pipelines of pictures can be told beside what all models can. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omnistage.models.common.checkpoint import BadCheckpoint, json_object
from omnistage.models.diffusers.plan import Limits
from omnistage.models.errors import LoadError
from omnistage.models.options import checked_options

DEFAULTS_FILE = "omnistage.json"
"""In the folder of a checkpoint: what it draws where nothing is said, such as {"width": 128, "height": 128, "steps": 16}. Published
checkpoints have none; then it is what the pipeline of Diffusers says."""

AREA = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DiffusersOptions:
    """width, height, steps: of a request that says nothing; 0: as the checkpoint says. guidance: the same; below 0: as the checkpoint says.

    condition_area: pixels that a picture which is edited is resized to, and the result with it where its size is not asked for.
    max_pixels: of one picture that comes out. max_steps. max_tokens: latent tokens of all that is drawn at once, guidance counted as well;
    0: those of some steps. text_cache_bytes, picture_cache_bytes: of what encoders made, kept for who asks again.
    """

    width: int = 0
    height: int = 0
    steps: int = 0
    guidance: float = -1.0
    condition_area: int = AREA
    max_pixels: int = 2048 * 2048
    max_steps: int = 200
    max_tokens: int = 0
    text_cache_bytes: int = 64 << 20
    picture_cache_bytes: int = 256 << 20

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> DiffusersOptions:
        made = cls(**checked_options(options, cls(), "pipelines of pictures"))
        for each in fields(made):
            value = getattr(made, each.name)
            if each.name != "guidance" and value < 0:
                raise LoadError(f"option {each.name} is {value}: it must not be below 0")
        if not made.condition_area or not made.max_pixels or not made.max_steps:
            raise LoadError("options condition_area, max_pixels and max_steps must be above 0")
        return made


@dataclass(frozen=True, slots=True)
class Defaults:
    """The options, and what the folder says of itself under them."""

    options: DiffusersOptions

    @classmethod
    def of(cls, folder: Path, options: DiffusersOptions) -> Defaults:
        """Raises BadCheckpoint for a file that says something else."""
        if not (folder / DEFAULTS_FILE).is_file():
            return cls(options)
        said = json_object(folder / DEFAULTS_FILE)
        names = {"width": "width", "height": "height", "steps": "steps", "guidance_scale": "guidance"}
        for key, name in names.items():
            value = said.get(key)
            if value is None or getattr(options, name) != getattr(DiffusersOptions(), name):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or (name != "guidance" and int(value) != value) or value < 0:
                raise BadCheckpoint(f"{folder / DEFAULTS_FILE}: {key} is {value!r} and must be a number that is not below 0")
            changed: dict[str, Any] = {name: float(value) if name == "guidance" else int(value)}
            options = replace(options, **changed)
        return cls(options)

    def applied(self, limits: Limits) -> Limits:
        """Limits of a pipeline with these for its own. Raises LoadError for what it cannot draw."""
        told = self.options
        made = replace(
            limits,
            width=(told.width or limits.width) if limits.width else 0,
            height=(told.height or limits.height) if limits.height else 0,
            steps=told.steps or limits.steps,
            guidance=told.guidance if told.guidance >= 0 else limits.guidance,
            max_pixels=told.max_pixels,
            max_steps=told.max_steps,
            max_work=told.max_pixels * told.max_steps,
        )
        if made.width % made.multiple or made.height % made.multiple or made.width * made.height > made.max_pixels:
            raise LoadError(
                f"{made.width}x{made.height} pixels are not drawn by default: sides are multiples of {made.multiple}, "
                f"and at most {made.max_pixels} pixels"
            )
        if not made.min_steps <= made.steps <= made.max_steps:
            raise LoadError(f"{made.steps} steps are not taken by default: {made.min_steps} to {made.max_steps} can be")
        return made
