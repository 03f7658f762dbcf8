"""A request to a pipeline of pictures, checked whole before anything of it runs: the first of the four phases.

    DrawRequest --plan_drawing--> DrawingPlan --encode--> Conditions --step, step, ...--> Canvas --decode--> pictures

Diffusers checks little of this: it divides by zero steps, draws 1024 by 1024 pixels where 0 were asked for, and makes a black picture of
one step too few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ImageChops
from PIL.Image import Image

from omnistage.engine.types import SEEDS
from omnistage.models.conversation import Media
from omnistage.models.diffusers.own_options import OwnOption, Value, read_options
from omnistage.models.drawing_options import MAX_SIDE, DrawingOptions
from omnistage.models.interface import BadRequest, DrawRequest

PNG, JPEG, WEBP = "image/png", "image/jpeg", "image/webp"
MEDIA_TYPES = (PNG, JPEG, WEBP)
GUIDES = {
    "mask_image": "where to draw: give a picture that is white or transparent there",
    "control_image": "what the picture keeps to: give a picture that shows it",
}
"""Fields of pictures that only some pipelines take; these pipelines always need them. Each has a text that explains it."""
EMPTY_REQUEST = DrawRequest(seed=0, prompt="")
CHECKED = (
    *("width", "height", "steps", "results", "previews", "preview_side", "frames", "seconds", "layers", "media_type"),
    *("sigmas", "strength", "options", *GUIDES),
)
"""Options that every pipeline knows, or refuses in words of its own."""
MIDDLE = 128
"""A level of a channel: from this level on it counts as white, and as opaque."""
SMALLEST_S = 1.0
WEBP_SIDE = 16383
"""The longest side that the format can state."""


@dataclass(frozen=True, slots=True)
class DrawingLimits:
    """The values that one pipeline can be asked for, and its defaults.

    multiple: sides are multiples of it, in pixels. width, height: usual size; 0 if it follows from the edited picture. min_side, max_side,
    max_pixels: bounds of one picture. steps: usual number; min_steps to max_steps: bounds if no strength is given; scheduled_steps: the
    smallest number that its scheduler can be set to, however many of them the strength leaves. guidance: usual scale; a scale above
    guided_above costs a second pass a step, away from the negative prompt. negative: the usual negative prompt. images: smallest and
    largest number of edited pictures. layers, max_layers: usual and largest number for every picture; 0: it knows no layers. sides: if not
    empty, the result has as many pixels as a square of one of these sides, in the shape of its picture. guidable, negatable, previewed,
    step_cached, sized: whether it knows these. max_work: pixels times steps of all pictures, layers too. prompt_tokens: a longer prompt is
    cut to this; 0: it is not cut. second_guidance: whether a second transformer has its own scale. rate_hz: usual frames a second of a
    film. shifted: whether a request can shift its schedule. begins: whether a sound may begin late. max_sigma: largest sigma of a request;
    0: it takes none. strength: usual strength; None: it knows none. masked, controlled: whether it needs a mask and a control image.
    options: the pipeline's own. frames, seconds: usual length of a film and of sound; 0: it makes none. frame_multiple: numbers of frames
    differ by multiples of it. shaped: whether the size follows from a given picture if no size is asked for.
    only_size: the one size that it draws, if there is one: pictures of other sizes are made of drawings of that size.
    takes: further options that it knows; their names are in the revision only if there are any.
    """

    multiple: int
    width: int
    height: int
    steps: int
    guidance: float
    guided_above: float = 1.0
    negative: str = ""
    min_side: int = 32
    max_side: int = MAX_SIDE
    max_pixels: int = 2048 * 2048
    min_steps: int = 1
    scheduled_steps: int = 1
    max_steps: int = 200
    max_guidance: float = 30.0
    images: tuple[int, int] = (0, 0)
    layers: int = 0
    max_layers: int = 0
    max_results: int = 8
    guidable: bool = True
    negatable: bool = True
    previewed: bool = True
    step_cached: bool = True
    sized: bool = True
    sides: tuple[int, ...] = ()
    max_work: int = 2048 * 2048 * 200
    prompt_tokens: int = 0
    max_sigma: float = 1.0
    strength: float | None = None
    masked: bool = False
    controlled: bool = False
    options: tuple[OwnOption, ...] = ()
    frames: int = 0
    frame_multiple: int = 1
    max_frames: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0
    second_guidance: bool = False
    rate_hz: float = 0.0
    shifted: bool = False
    begins: bool = False
    shaped: bool = False
    takes: frozenset[str] = field(default=frozenset(), repr=False)
    only_size: tuple[int, int] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EditedPicture:
    """A picture that is edited. width, height: as it was sent. resized: the picture in each size that the family needs; no other form of it
    is kept. digest: SHA-256 of the file of a mask or a control image. note: what the client should know of it; empty: nothing."""

    width: int
    height: int
    resized: tuple[Image, ...]
    digest: bytes = b""
    note: str = ""

    @property
    def bytes(self) -> int:
        """Bytes in memory: Pillow needs four for a pixel."""
        return sum(4 * each.width * each.height for each in self.resized)


def mask_of(image: Image) -> EditedPicture:
    """The mask that a picture (RGBA) means: white where to draw. If some of it is more transparent than opaque, its transparent part is
    where to draw, as editors save it; else its white part is. Some programs leave an alpha of 254 in opaque pictures."""
    alpha = image.getchannel("A")
    mask = ImageChops.invert(alpha) if np.asarray(alpha).min() < MIDDLE else image.convert("RGB").convert("L")
    return EditedPicture(image.width, image.height, (mask,))


def draws_nothing(mask: EditedPicture) -> bool:
    """Whether no part of a mask is where to draw: pipelines read all that is darker than grey as black."""
    return bool(np.asarray(mask.resized[0]).max() < MIDDLE)


class SourcePicture(NamedTuple):
    """The identity of an edited picture. digest: SHA-256 of its file. background: colour under transparent pixels; None: the default."""

    digest: bytes
    background: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingPlan(DrawingOptions):
    """A request with its defaults filled in: the size that is drawn, the steps, layers, frames and seconds (0 if the pipeline makes none).
    The other options are as in the request, without pictures.

    final_size: width and height of the pictures that come out, if that is not the size that is drawn. prompt_tokens: number of
    tokens of the prompt; None: not known. images: the pictures that are edited.
    sources: the identity of each of them, for caches. mask: white where to draw. control: the picture that the result keeps to.
    negative: the prompt that guidance leads away from; None without guidance. guidance_2: the scale in the steps of a second transformer.
    rate_hz: frames a second of a film. own_options: the given values of the pipeline's own options. history: see StateLayout."""

    prompt: str
    seed: int
    client: str
    negative: str | None
    guidance: float
    guidance_2: float = 0.0
    rate_hz: float = 0.0
    mask: EditedPicture | None = None
    control: EditedPicture | None = None
    own_options: tuple[tuple[str, Value], ...] = ()
    history: NDArray[np.uint32] | None = None
    images: tuple[EditedPicture, ...] = ()
    sources: tuple[SourcePicture, ...] = ()
    final_size: tuple[int, int] | None = None
    prompt_tokens: int | None = None

    @property
    def size(self) -> tuple[int, int]:
        """The width and height of the pictures that come out."""
        return self.final_size or (self.width, self.height)

    @property
    def pictures(self) -> int:
        """The number of pictures that come out, all layers counted."""
        return self.results * max(self.layers, 1)

    @property
    def picture_type(self) -> str:
        return self.media_type or PNG

    def seed_of(self, number: int) -> int:
        """The seed of the picture with that number: a request for three pictures gets the pictures of three requests with a seed each."""
        return (self.seed + number) % SEEDS

    def option(self, name: str, default: Value) -> Value:
        """The value of one of the pipeline's own options; the default if none was given."""
        return dict(self.own_options).get(name, default)


def plan_drawing(request: DrawRequest, limits: DrawingLimits, name: str) -> DrawingPlan:
    """The plan of pictures, without its images yet. name: of the model. Raises BadRequest."""
    width, height = final_size = _size(request, limits, name)
    if limits.only_size:
        width, height = limits.only_size
    if request.results > limits.max_results:
        raise _bad("results", f"{name} draws at most {limits.max_results} at once, not {request.results}")
    if request.previews and not limits.previewed:
        raise _bad("previews", f"{name} shows none: leave it out")
    _check_pictures(request, limits, name)
    _check_known(request, limits, name)
    steps, layers = _steps(request, limits, name), _layers(request, limits, name)
    guidance, negative = _guidance(request, limits, name)
    decided = {
        "width": width,
        "height": height,
        "steps": steps,
        "layers": layers,
        "previews": min(request.previews, steps),
        "frames": _frames(request, limits, name),
        "seconds": _seconds(request, limits, name),
        "mask_image": None,
        "control_image": None,
    }
    plan = DrawingPlan(
        prompt=request.prompt,
        seed=request.seed,
        client=request.client,
        negative=negative,
        guidance=guidance,
        guidance_2=guidance if request.guidance_scale_2 is None else _scale("guidance_scale_2", request.guidance_scale_2, limits, name),
        rate_hz=request.frames_per_second or limits.rate_hz,
        own_options=read_options(request.options, limits.options, name),
        history=request.history,
        final_size=None if final_size == (width, height) else final_size,
        **{each.name: getattr(request, each.name) for each in fields(DrawingOptions)} | decided,
    )
    check_size(plan, limits, name)
    return plan


def check_size(plan: DrawingPlan, limits: DrawingLimits, name: str, decided_by: str = "") -> None:
    """Raises BadRequest for too long sides, too many pixels, or too many pixels times steps. decided_by: the field that a wrong size comes
    from, if it is not the longer side itself."""
    width, height = plan.size
    field = decided_by or ("width" if width >= height else "height")
    if max(width, height) > limits.max_side:
        raise _bad(field, f"{name} draws at most {limits.max_side} pixels a side, {width}x{height} was asked for or comes of it")
    if width * height > limits.max_pixels:
        fault = f"draws at most {limits.max_pixels} pixels, {width}x{height} are {width * height}"
        raise _bad(field, f"{name} {fault}: ask for fewer, or have its operator allow more (setting max_pixels)")
    if plan.media_type == WEBP and max(width, height) > WEBP_SIDE:
        raise _bad("media_type", f"{WEBP} has at most {WEBP_SIDE} pixels a side, {width}x{height} was asked for: take {PNG}")
    work = plan.width * plan.height * plan.pictures * max(plan.frames, 1) * plan.steps
    if work > limits.max_work and plan.frames:
        raise _bad(*_less_film(plan, limits, name, field))
    if work > limits.max_work:
        raise _bad("steps", f"{name} draws at most {limits.max_work:.3g} pixels times steps at once, this is {work:.3g}: ask for less")


def _less_film(plan: DrawingPlan, limits: DrawingLimits, name: str, side: str) -> tuple[str, str]:
    """The field to lower for a film that is too much work, and the text of the error, with the value to lower it to. It is the field
    furthest above its usual value. side: the field of the size."""
    pixels, usual_area = plan.width * plan.height, limits.width * limits.height
    work = pixels * plan.frames * plan.steps
    ratios = {"frames": plan.frames / limits.frames, side: pixels / usual_area if usual_area else 1.0, "steps": plan.steps / limits.steps}
    field = max(ratios, key=lambda each: ratios[each])
    # The limit of work, divided by the two other factors.
    max_value = limits.max_work // (work // {"frames": plan.frames, side: pixels, "steps": plan.steps}[field])
    if field == "frames":
        min_frames = (plan.frames - 1) % limits.frame_multiple + 1
        max_value -= (max_value - min_frames) % limits.frame_multiple  # Numbers of frames differ by whole multiples.
    size_text = f"{plan.width}x{plan.height} pixels, {plan.frames} frames and {plan.steps} steps"
    fault = f"{name} draws at most {limits.max_work:.3g} pixels times frames times steps, {size_text} are {work:.3g}"
    return field, f"{fault}: ask for " + (f"at most {max_value} {'pixels' if field == side else field}" if max_value > 0 else "less")


def _size(request: DrawRequest, limits: DrawingLimits, name: str) -> tuple[int, int]:
    """The width and height to draw, 0 for a side that follows from a picture. Raises BadRequest."""
    for side, value in (("width", request.width), ("height", request.height)):
        if not value:
            continue
        if not limits.sized:
            raise _bad(side, f"{name} draws in the size of the picture that it edits: leave it out")
        if limits.sides:
            if value not in limits.sides or request.width != request.height:
                listed = " or ".join(f"{each}x{each}" for each in limits.sides)
                raise _bad(side, f"{name} draws as many pixels as {listed} has, in the shape of the picture: ask for that, or leave it out")
            continue
        if value % limits.multiple:
            nearest = _multiple(value, limits.multiple)
            raise _bad(side, f"{name} draws multiples of {limits.multiple} pixels, not {value}: ask for {nearest}")
        if value < limits.min_side:
            raise _bad(side, f"{name} draws {limits.min_side} pixels at least, not {value}")
    has_one_side = bool(request.width) != bool(request.height)
    if has_one_side and limits.only_size:
        ratio = limits.only_size[0] / limits.only_size[1]
        return request.width or _multiple(request.height * ratio, 1), request.height or _multiple(request.width / ratio, 1)
    if request.images and (has_one_side or limits.shaped):
        return request.width, request.height  # A side of 0 follows: see in_shape.
    return request.width or limits.width, request.height or limits.height


def in_shape(plan: DrawingPlan, multiple: int) -> DrawingPlan:
    """The plan with both sides: a side that is not asked for follows from the shape of the last picture, in steps of `multiple`."""
    if bool(plan.width) == bool(plan.height):
        return plan
    last = plan.images[-1]
    if plan.width:
        return replace(plan, height=_multiple(plan.width * last.height / last.width, multiple))
    return replace(plan, width=_multiple(plan.height * last.width / last.height, multiple))


def _multiple(side: float, multiple: int) -> int:
    """The multiple that is nearest to a side, and not 0."""
    return max(round(side / multiple), 1) * multiple


def crop_to_shape(image: Image, width: int, height: int, multiple: int = 1) -> tuple[Image, str]:
    """The middle part of a picture that has the shape of a size, and a note that says so. A picture of that shape, up to the rounding of a
    side to `multiple`, stays as it is, without a note; resizing any other one would distort it."""
    ratio = image.height / image.width
    if min(abs(width * ratio - height), abs(height / ratio - width)) <= multiple / 2:
        return image, ""
    new_width, new_height = min(image.width, round(image.height * width / height)), min(image.height, round(image.width * height / width))
    new_width, new_height = max(new_width, 1), max(new_height, 1)
    if (new_width, new_height) == image.size:
        return image, ""
    x, y = (image.width - new_width) // 2, (image.height - new_height) // 2
    part = f"its middle part of {new_width}x{new_height} is used, in the shape of {width}x{height}"
    note = f"a picture of {image.width}x{image.height} has another shape than what is made of it: {part}"
    return image.crop((x, y, x + new_width, y + new_height)), note


def with_guides(request: DrawRequest, limits: DrawingLimits, image: Media) -> DrawRequest:
    """The request with `image` as mask and as control image, if the pipeline wants them."""
    mask, control = (image if is_needed else None for is_needed in (limits.masked, limits.controlled))
    return replace(request, mask_image=mask, control_image=control)


def _check_pictures(request: DrawRequest, limits: DrawingLimits, name: str) -> None:
    """Raises BadRequest for a wrong number of pictures to begin from, and for wrong fields that go with them."""
    min_images, max_images = limits.images
    if not min_images <= len(request.images) <= max_images:
        count_text = "one picture" if max_images == 1 else f"{min_images} to {max_images} pictures"
        fault = f"{name} edits {count_text}, and {len(request.images) or 'none'} came"
        raise _bad("images", fault if max_images else f"{name} draws from none: leave them out")
    for (guide, explanation), is_wanted in zip(GUIDES.items(), (limits.masked, limits.controlled), strict=True):
        is_given = getattr(request, guide) is not None
        if is_given and not is_wanted:
            raise _bad(guide, f"{name} knows none: leave it out")
        if is_wanted and not is_given:
            raise _bad(guide, f"{name} has to be told {explanation}")
    if request.strength is not None and limits.strength is None:
        raise _bad("strength", f"{name} knows none: leave it out")


def _check_known(request: DrawRequest, limits: DrawingLimits, name: str) -> None:
    """Raises BadRequest for options that this pipeline does not know."""
    flags = {
        "guidance_scale": limits.guidable,
        "negative_prompt": limits.negatable,
        "step_cache": limits.step_cached,
        "guidance_scale_2": limits.second_guidance,
        "frames_per_second": bool(limits.rate_hz),
        "flow_shift": limits.shifted,
        "begin_s": limits.begins,
    }
    known = {*CHECKED, *limits.takes, *(option for option, is_known in flags.items() if is_known)}
    for option in fields(DrawingOptions):
        if option.name not in known and getattr(request, option.name) != getattr(EMPTY_REQUEST, option.name):
            raise _bad(option.name, f"{name} knows none: leave it out")


def _check_sigmas(request: DrawRequest, limits: DrawingLimits, name: str) -> None:
    """Raises BadRequest for sigmas that the pipeline cannot use."""
    if not limits.max_sigma:
        raise _bad("sigmas", f"{name} takes none with its scheduler: leave them out, and give steps")
    if max(request.sigmas) > limits.max_sigma:
        raise _bad("sigmas", f"{name} takes at most {limits.max_sigma:g}, not {max(request.sigmas):g}: give smaller ones")
    if request.steps and request.steps != len(request.sigmas):
        raise _bad("steps", f"{len(request.sigmas)} sigmas are as many steps, not {request.steps}: leave it out")


def _steps(request: DrawRequest, limits: DrawingLimits, name: str) -> int:
    """The number of steps. Raises BadRequest."""
    if request.sigmas:
        _check_sigmas(request, limits, name)
    steps = len(request.sigmas) or request.steps or limits.steps
    if request.strength is not None:
        # A pipeline that begins from a picture leaves out the first steps, in which the picture would be lost. Too few steps would
        # leave none.
        if int(min(steps * request.strength, steps)) < 1:
            raise _bad("strength", f"{request.strength:g} of {steps} steps is none: give a larger one, or more steps")
        limits = replace(limits, min_steps=limits.scheduled_steps)
    if not limits.min_steps <= steps <= limits.max_steps:
        raise _bad("steps", f"{name} takes {limits.min_steps} to {limits.max_steps} steps, not {steps}")
    return steps


def smallest(request: DrawRequest, limits: DrawingLimits, max_side: int = 0) -> DrawRequest:
    """The request with as little film or sound as a trial needs. max_side: largest side of its pictures, in pixels, unless their size
    follows from an edited picture; 0: the usual size."""
    if max_side and limits.sized and not limits.sides and limits.width and limits.height:
        lower, upper = (-(-side // limits.multiple) * limits.multiple for side in (limits.min_side, max_side))
        request = replace(request, width=max(min(limits.width, upper), lower), height=max(min(limits.height, upper), lower))
    min_frames = (limits.frames - 1) % limits.frame_multiple + 1
    frames = min(limits.frames, min_frames + limits.frame_multiple)  # One step above the fewest.
    return replace(request, frames=frames, seconds=min(limits.seconds, SMALLEST_S))


def _frames(request: DrawRequest, limits: DrawingLimits, name: str) -> int:
    """The number of frames of the film, 0 for other products. Raises BadRequest."""
    usual_frames, multiple = limits.frames, limits.frame_multiple
    frames = request.frames or _frames_of_seconds(request, limits, name) or usual_frames
    if frames > limits.max_frames and not request.frames:
        fault = f"at most {limits.max_frames} frames, and {request.seconds:g} s have {frames}"
        raise _bad("duration_s", f"{name} makes {fault}: ask for less, or for fewer frames a second")
    if frames > limits.max_frames:
        raise _bad("frames", f"{name} makes at most {limits.max_frames} frames, not {frames}: ask for fewer")
    if frames and (frames - usual_frames) % multiple:
        lower = frames - (frames - usual_frames) % multiple
        able = " or ".join(str(each) for each in (lower, lower + multiple) if 0 < each <= limits.max_frames)
        raise _bad("frames", f"{name} makes {usual_frames} frames, or a multiple of {multiple} more or fewer, not {frames}: ask for {able}")
    return frames


def _frames_of_seconds(request: DrawRequest, limits: DrawingLimits, name: str) -> int:
    """The number of frames that fit into the seconds of a film without sound, at least one; 0 if no frames follow from seconds."""
    if not request.seconds or not limits.frames or limits.max_seconds:
        return 0
    if not limits.rate_hz:
        raise _bad("duration_s", f"{name} makes films of so many frames: leave it out, and give frames")
    frames = round(request.seconds * (request.frames_per_second or limits.rate_hz))
    lower_frames = frames - (frames - limits.frames) % limits.frame_multiple
    return lower_frames if lower_frames > 0 else lower_frames + limits.frame_multiple


def _seconds(request: DrawRequest, limits: DrawingLimits, name: str) -> float:
    """The seconds of sound, 0 for other products. Raises BadRequest."""
    if limits.frames and not limits.max_seconds:  # The frames of a film say how long it is.
        if request.seconds and request.frames:
            raise _bad("duration_s", f"frames say how long the film of {name} is: give one of them")
        return 0.0
    remaining_s = limits.max_seconds - request.begin_s
    if request.begin_s and remaining_s <= 0:
        raise _bad("begin_s", f"{name} knows sound of {limits.max_seconds:g} s, which is over at {request.begin_s:g} s: begin earlier")
    seconds = request.seconds or min(limits.seconds, remaining_s)
    if seconds > limits.max_seconds:
        raise _bad("duration_s", f"{name} makes at most {limits.max_seconds:g} s, not {seconds:g}: ask for less")
    if seconds > remaining_s:
        fault = f"{seconds:g} s from {request.begin_s:g} s on end behind the {limits.max_seconds:g} s that {name} knows"
        raise _bad("duration_s", f"{fault}: ask for at most {remaining_s:g}")
    return seconds


def _layers(request: DrawRequest, limits: DrawingLimits, name: str) -> int:
    """The number of layers, 0 for none. Raises BadRequest."""
    if not limits.max_layers and request.layers:
        raise _bad("layers", f"{name} draws no layers: leave it out")
    layers = request.layers or limits.layers
    if layers > limits.max_layers:
        raise _bad("layers", f"{name} draws at most {limits.max_layers} layers, not {layers}")
    return layers


def _guidance(request: DrawRequest, limits: DrawingLimits, name: str) -> tuple[float, str | None]:
    """The scale of guidance, and the prompt that guidance leads away from (None without guidance). Raises BadRequest."""
    scale = _scale("guidance_scale", limits.guidance if request.guidance_scale is None else request.guidance_scale, limits, name)
    if scale > limits.guided_above:
        return scale, request.negative_prompt or limits.negative
    if request.negative_prompt:
        fault = f"it has no effect at guidance_scale {scale:g}: leave it out, or ask for a scale above {limits.guided_above:g}"
        raise _bad("negative_prompt", fault)
    return scale, None


def _scale(field: str, scale: float, limits: DrawingLimits, name: str) -> float:
    """Return the scale. Raises BadRequest for a scale beyond the limits."""
    if not math.isfinite(scale) or not 0 <= scale <= limits.max_guidance:
        raise _bad(field, f"{name} takes 0 to {limits.max_guidance:g}")
    return scale


def _bad(field: str, description: str) -> BadRequest:
    return BadRequest(f"diffusion.{field}", description)
