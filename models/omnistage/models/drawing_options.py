"""The options of a drawing, as models take them. `python -m tools.options` makes this file from the protos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.models.conversation import Media

MAX_SIDE = 16384
"""Largest width and height of a picture, pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingOptions:
    """The options of a drawing. One that is 0, empty or None is the model's default."""

    negative_prompt: str = ""
    """Words for things that the picture must not show."""
    width: int = 0
    """Pixels."""
    height: int = 0
    """Pixels."""
    steps: int = 0
    """Denoising steps."""
    guidance_scale: float | None = None
    """How closely to follow the prompt."""
    results: int = 0
    """How many pictures."""
    previews: int = 0
    """How many previews come during the drawing, of the first result alone."""
    preview_side: int = 0
    """Longest side of a preview, pixels."""
    step_cache: float = 0.0
    """How much the first block may change in a step (1 is all of it) for the step to reuse what the other blocks added before: faster,
    but another picture. 0 is off."""
    frames: int = 0
    """Frames of a film."""
    frames_per_second: float = 0.0
    """Frames a second of a film."""
    seconds: float = 0.0
    """Length of a sound, or of a film if frames are not given."""
    begin_s: float = 0.0
    """The second at which the sound begins, if it is a part of a longer one."""
    guidance_scale_2: float | None = None
    """How closely to follow the prompt in the steps of a second transformer."""
    flow_shift: float = 0.0
    """How far the schedule is shifted to the side of more noise."""
    sigmas: tuple[float, ...] = ()
    """Noise levels of the steps, in place of steps, as the pipeline takes them: at least 1e-6, each below the one before it, at most
    1000 of them."""
    strength: float | None = None
    """How much of the given picture is drawn anew, if the pipeline has this option."""
    mask_image: Media | None = None
    """For a pipeline that fills in: a picture, as large as the other, that is white or transparent where to draw anew."""
    control_image: Media | None = None
    """For a pipeline with a ControlNet: a picture that guides the drawing, such as edges or depths."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the pipeline's own, by their names in diffusers, such as {'cfg_normalization': True}; at most 64."""
    layers: int = 0
    """How many layers each picture has, for a model that draws layers."""
    media_type: str = ""
    """Type of the file, if the model makes it; a film in MP4 is VP9 unless avc1 asks for H.264."""
