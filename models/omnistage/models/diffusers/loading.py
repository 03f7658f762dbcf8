"""Loading: from the folder of a published pipeline to a model that draws."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as pillow
from torch import Tensor
from torch.backends.cpu import get_cpu_capability

from omnistage.engine.devices import RanksApart
from omnistage.models.checkpoint.files import BadCheckpoint, checkpoint_name
from omnistage.models.checkpoint.revision import compute_on_thread, revision
from omnistage.models.conversation import Media
from omnistage.models.devices import dtype_of, hardware
from omnistage.models.diffusers.films import FilmMemory, FilmPainter, budget_of
from omnistage.models.diffusers.folder import load_pipeline, read_index, silence, weights_of
from omnistage.models.diffusers.longcat import LongCatEditPainter, LongCatPainter
from omnistage.models.diffusers.lora import Lora, add_loras, loras_beside, read_loras
from omnistage.models.diffusers.model import Artist, DrawnModel, StepDrawing
from omnistage.models.diffusers.options import Defaults, DiffusersOptions, Vocabulary
from omnistage.models.diffusers.painter import Painter
from omnistage.models.diffusers.placement import MemoryPlan, place_pipeline, team_of
from omnistage.models.diffusers.plan import (
    PNG,
    DrawingLimits,
    DrawingPlan,
    EditedPicture,
    SourcePicture,
    plan_drawing,
    smallest,
    with_guides,
)
from omnistage.models.diffusers.qwen_image import QwenImageEditPainter, QwenImageEditPlusPainter, QwenImageLayeredPainter, QwenImagePainter
from omnistage.models.diffusers.stable_audio import StableAudioPainter
from omnistage.models.diffusers.wan import WanPainter
from omnistage.models.diffusers.whole import WholeDrawing
from omnistage.models.diffusers.z_image import ZImagePainter
from omnistage.models.interface import BadRequest, Clip, Content, DrawRequest, EncodedPicture, Failed, ModelInfo, Sound
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.film_file import encoders, told_kinds
from omnistage.models.memory import TensorCache
from omnistage.models.options import LoadOptions
from omnistage.models.ranks.team import Team, options_of
from omnistage.models.reports import LoadError
from omnistage.models.worker import Worker

PAINTERS: Mapping[str, type[Painter]] = {
    "QwenImagePipeline": QwenImagePainter,
    "QwenImageEditPipeline": QwenImageEditPainter,
    "QwenImageEditPlusPipeline": QwenImageEditPlusPainter,
    "QwenImageLayeredPipeline": QwenImageLayeredPainter,
    "ZImagePipeline": ZImagePainter,
    "LongCatImagePipeline": LongCatPainter,
    "LongCatImageEditPipeline": LongCatEditPainter,
    "StableAudioPipeline": StableAudioPainter,
    "WanPipeline": WanPainter,
    "WanImageToVideoPipeline": WanPainter,
}
"""The painters, by the class that model_index.json names."""

log = logging.getLogger(__name__)

CODE_REVISION = "6"
"""Raise it with every change of the code that changes drawings."""

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ADMITTED_STEPS = 4
"""All admitted drawings have at most this many times the latent tokens of one step, or the tokens of the largest picture that may be asked
for: latents are small compared with the memory of a step."""
BATCH = 8
"""How many pictures of the usual size, with guidance, share a step by default."""
CPU_FIRST_SIDE = 256
"""Largest side of the first drawing on a CPU, in pixels, unless its size follows from an edited picture. A picture of the usual size takes
minutes with a large model, and on a CPU prepares nothing for later ones."""
CPU_STEP_TOKENS = 256
"""On a CPU a step of more tokens saves little for each picture in it, and the pictures end all together, not one after another."""
PASS_LIMIT_S = 1800.0
"""The time limit of one pass, or of the VAE: a CPU takes minutes for a large picture. Processes that hang are found in seconds."""
IMAGE_AREAS = 4
"""A pipeline that draws in the size of its edited picture may draw this many times the usual pixels; larger pictures are made smaller."""


def load_pictures(folder: Path, options: LoadOptions) -> DrawnModel[Any]:
    """Load a pipeline from its folder as a model. Raises LoadError."""
    with ExitStack() as undo:
        if team := team_of(folder, options):
            undo.callback(team.close)
        try:
            model = _load(folder, options_of(options, 0), team)
        except RanksApart as error:
            raise LoadError(str(error)) from error
        except Failed as error:
            raise BadCheckpoint(f"{folder} was tried: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            # Faults of a config that no class checked when it was built: a scale of zero, a table without rows.
            raise BadCheckpoint(f"{folder} does not draw: {type(error).__name__}: {error}; see its configs") from error
        undo.pop_all()
    return model


def _load(folder: Path, options: LoadOptions, team: Team | None) -> DrawnModel[Any]:
    """Load the pipeline, try it, and describe it as a model. team: the processes that share the transformer; None: this process alone."""
    max_pixels = {"max_pixels": options.max_pixels} if options.max_pixels else {}
    diffusers_options = DiffusersOptions.from_settings({**options.family, **max_pixels})
    dtype = dtype_of(options.device) if options.dtype == "auto" else options.dtype
    torch.set_num_threads(options.threads)
    silence()
    name = checkpoint_name(folder).rpartition("/")[2].lower()
    vocabulary = Vocabulary.of(folder)
    memory = MemoryPlan.of(diffusers_options, options, DTYPES[dtype])
    loras, unused = _loras(folder, diffusers_options)
    artist = _make_artist(folder, name, memory, options, team, loras)
    unable = artist.leave_out(_smallest_plan(artist, name)) if isinstance(artist, WholeDrawing) else {}
    usual_plan = _trial_plan(artist, name)
    step_tokens, max_tokens = _token_limits(artist, name, usual_plan, options, diffusers_options.max_tokens)
    makes_films = any(port.content is Content.VIDEO for port in artist.ports)
    film_memory, prompt_tokens, only_size = getattr(artist, "memory", None), artist.limits.prompt_tokens, artist.limits.only_size
    settings = {  # Those with an empty text are left out.
        "dtype": options.describe("dtype", dtype),
        "drawn": "step by step" if isinstance(artist, StepDrawing) else "by whole calls of the pipeline",
        "drawn in one size": "{}x{} pixels; other sizes are made of that".format(*only_size) if only_size else "",
        "drawn by default": f"{_size_told(usual_plan)} in {usual_plan.steps} steps with guidance {usual_plan.guidance:g}",
        "latent tokens": f"{step_tokens} in a step, {max_tokens} of all that is drawn at once",
        "words of a prompt": f"the first {prompt_tokens} tokens are drawn" if prompt_tokens else "",
        "options of its own": ", ".join(option.name for option in artist.limits.options),
        "options that it cannot follow": "; ".join(f"{option}: {reason}" for option, reason in unable.items()),
        "draws": vocabulary.things,
        "files of films": told_kinds() if makes_films else "",
        "kept of encoders": _kept_told(diffusers_options, options),
        **memory.describe(),
        "memory of the usual film": film_memory.describe(usual_plan) if film_memory else "",
        "LoRA": ", ".join(map(str, loras)),
        "LoRA beside the weights, without effect": "; ".join(unused),
    }
    info = ModelInfo(
        name=name,
        revision=revision(
            folder,
            CODE_REVISION,
            dtype=dtype,
            device=hardware(options.device),
            threads=options.threads,
            results=compute_on_thread(partial(_trial, artist, name), options.threads),
            # In bfloat16 two kinds of CPU may give this small result alike and larger results not, so the kind counts too.
            settings=f"{artist.limits} {diffusers_options.condition_area} {get_cpu_capability()} {memory.settings}".strip()
            + "".join(f" lora {lora.digest}{lora.part}={lora.scale:g}" for lora in loras)
            + (f" {encoders()}" if makes_films else "")
            + "".join(f" {option}" for option in sorted(artist.limits.takes))
            + (f" {only_size}" if only_size else ""),
        ),
        accepts=(),
        produces=artist.ports,
        max_sessions=options.sessions,
        inputs=("text", "image") if _uses_pictures(artist.limits) else ("text",),
        settings={name: text for name, text in settings.items() if text},
    )
    return DrawnModel(
        artist,
        Worker("pictures", options.threads, team.close if team else lambda: None, PASS_LIMIT_S),
        MediaDecoder(),
        info,
        image_pixels=IMAGE_AREAS * diffusers_options.condition_area,
        max_tokens=max_tokens,
        step_tokens=step_tokens,
        max_batch_size=options.max_batch_size,
        vocabulary=vocabulary,
        first_side=CPU_FIRST_SIDE if options.device == "cpu" else 0,
    )


def _token_limits(
    artist: StepDrawing | WholeDrawing, name: str, usual_plan: DrawingPlan, options: LoadOptions, max_tokens: int
) -> tuple[int, int]:
    """The limits of the latent tokens of one step, and of all drawings at once. max_tokens: the user's limit for all drawings; 0: none is
    chosen. Raises LoadError if the usual picture has more."""
    batch_tokens = artist.tokens(replace(usual_plan, results=1, negative="")) * (options.max_batch_size or BATCH)
    step_tokens = min(batch_tokens, CPU_STEP_TOKENS) if options.device == "cpu" and not options.max_batch_size else batch_tokens
    if max_tokens and max_tokens < (usual_tokens := artist.tokens(usual_plan)):
        raise LoadError(f"option max_tokens is {max_tokens}, and the usual picture has {usual_tokens}: give more")
    return step_tokens, max_tokens or max(ADMITTED_STEPS * batch_tokens, artist.tokens(_largest_plan(artist, name)))


def _make_artist(
    folder: Path, name: str, memory: MemoryPlan, options: LoadOptions, team: Team | None = None, loras: Sequence[Lora] = ()
) -> StepDrawing | WholeDrawing:
    """Load the pipeline and its LoRA, and give it its own loop; if there is no loop for it, it is drawn by whole calls."""
    kind, diffusers_options = PAINTERS.get(read_index(folder).class_name), memory.options
    pipe = load_pipeline(folder, memory.dtype, memory.arguments(), [lora.path for lora in loras])
    add_loras(pipe, loras)
    pipe = place_pipeline(pipe, memory, team)
    defaults = Defaults.of(folder, diffusers_options)
    if kind is None:
        return WholeDrawing(pipe, defaults, name, options.threads)
    cache_bytes = diffusers_options.text_cache_bytes, diffusers_options.picture_cache_bytes
    texts, pictures = (TensorCache(each if options.keeps_prompts else 0) for each in cache_bytes)
    painter = kind(pipe, texts, pictures, defaults)
    if not isinstance(painter, FilmPainter):
        return StepDrawing(painter, name)
    drawing = StepDrawing(painter, name, FilmMemory(painter, budget_of(options, diffusers_options.film_bytes)))
    try:
        drawing.check(_smallest_plan(drawing, name))
    except BadRequest as error:
        raise LoadError(f"no film fits: {error.description}; free some memory, or give more") from error
    return drawing


def _size_told(plan: DrawingPlan) -> str:
    if plan.seconds:
        return f"{plan.seconds:g} s of sound"
    pixels = "{}x{} pixels".format(*plan.size)
    return f"{plan.frames} frames of {pixels}" if plan.frames else pixels


def _uses_pictures(limits: DrawingLimits) -> bool:
    """Whether the pipeline can use a picture of the request."""
    return limits.images[1] > 0 or limits.masked or limits.controlled


def _loras(folder: Path, diffusers_options: DiffusersOptions) -> tuple[tuple[Lora, ...], list[str]]:
    """The chosen LoRA, and for each other LoRA in the folder a text: its path, and why it has no effect."""
    loras = read_loras(diffusers_options.lora)
    read = {path.resolve() for path in (*weights_of(folder), *(lora.path for lora in loras))}
    unused = [f"{path}: {reason}" for path, reason in loras_beside(folder, read).items()]
    if unused:
        log.warning("a LoRA beside the weights has no effect: %s", "; ".join(unused[:3]))
    return loras, unused


def _kept_told(diffusers_options: DiffusersOptions, options: LoadOptions) -> str:
    """The results of encoders that are kept for later requests, as text."""
    if not options.keeps_prompts:
        return "nothing"
    return f"{diffusers_options.text_cache_bytes >> 20} MiB of words, {diffusers_options.picture_cache_bytes >> 20} MiB of pictures"


def _trial_plan(
    artist: StepDrawing | WholeDrawing, name: str, *, side: int = 0, steps: int = 0, count: int = 0, is_smallest: bool = False
) -> DrawingPlan:
    """The plan of a picture with this side (0: the model's own), steps (0: the model's own) and number of edited pictures (0: the fewest
    that the model takes). An edited picture is grey, and as large as the drawn picture if a size can be asked for. is_smallest: see
    `smallest`."""
    limits = artist.limits
    fewest_images, _ = limits.images
    count = count or fewest_images
    stand_in = Media(PNG, b"-")  # `plan_drawing` looks only at its type.
    request = DrawRequest(seed=0, prompt="a red circle", images=(stand_in,) * count, steps=steps)
    request = with_guides(smallest(request, limits) if is_smallest else request, limits, stand_in)
    if limits.sized and not limits.sides:  # A model with a list of sides takes no others.
        request = replace(request, width=side, height=side)
    plan = plan_drawing(request, limits, name)
    size = (plan.width or 64, plan.height or 64) if limits.sized else (64, 64)
    grey = pillow.new("RGB", size, (127, 127, 127))
    images = tuple(artist.edited(plan, grey.convert("RGBA") if limits.max_layers else grey) for _ in range(count))
    mask = EditedPicture(*grey.size, (grey.convert("L"),)) if limits.masked else None
    control = EditedPicture(*grey.size, (grey,)) if limits.controlled else None
    return artist.sized(replace(plan, images=images, sources=(SourcePicture(b""),) * count, mask=mask, control=control))


def _largest_plan(artist: StepDrawing | WholeDrawing, name: str) -> DrawingPlan:
    """The plan of one picture of the largest size that may be asked for, from as many edited pictures as may be, with guidance."""
    limits = artist.limits
    side = max(min(math.isqrt(limits.max_pixels), limits.max_side) // limits.multiple * limits.multiple, limits.min_side)
    return replace(_trial_plan(artist, name, side=side, steps=limits.min_steps, count=limits.images[1]), negative="")


def _trial(artist: StepDrawing | WholeDrawing, name: str) -> list[NDArray[np.generic] | Tensor]:
    """Draw the smallest picture in the fewest steps that are allowed; returns its arrays."""
    return _draw(artist, _smallest_plan(artist, name))


def _smallest_plan(artist: StepDrawing | WholeDrawing, name: str) -> DrawingPlan:
    """The plan of the smallest picture in the fewest steps."""
    multiple = artist.limits.multiple
    side = -(-artist.limits.min_side // multiple) * multiple
    return _trial_plan(artist, name, side=side, steps=artist.limits.min_steps, is_smallest=True)


def _draw(artist: Artist[Any], plan: DrawingPlan) -> list[NDArray[np.generic] | Tensor]:
    """Draw a plan; returns the bytes or samples of its pieces, and the last latents."""
    job = artist.job(plan, {artist.product.ports[0].name: 0})
    with torch.inference_mode():
        while not artist.is_done(job):
            artist.step([job], None)
            artist.take(job)
        arrays = [_bits(piece) for piece in artist.decode(job) if isinstance(piece, EncodedPicture | Clip | Sound)]
    artist.give_up(job)
    return [*arrays, *(canvas.latents for canvas in getattr(job, "canvases", ()))]


def _bits(piece: EncodedPicture | Clip | Sound) -> NDArray[np.generic]:
    return piece.samples if isinstance(piece, Sound) else np.frombuffer(piece.data, np.uint8)
