"""Options of pipelines of pictures, in addition to the options of all models, and what a checkpoint says of itself: the defaults of its
requests, and its vocabulary if it knows few words. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omnistage.models.checkpoint.files import BadCheckpoint, json_object
from omnistage.models.diffusers.plan import DrawingLimits
from omnistage.models.drawing_options import MAX_SIDE
from omnistage.models.options import validate_options
from omnistage.models.reports import LoadError

DEFAULTS_FILE = "omnistage.json"
"""A file in the folder of a checkpoint with the defaults of drawings, such as {"width": 128, "height": 128, "steps": 16}. Published
checkpoints have none; their defaults come from the pipeline of Diffusers."""

AREA = 1024 * 1024
MAX_AREA_FACTOR = 4
"""Models draw well near the area that they were made for: a picture may have so many times its pixels, unless the operator allows more."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "offload": ("group", "disk", "model"),
    "storage": ("float8_e4m3fn", "float8_e5m2"),
    "quantization": ("bitsandbytes_4bit", "bitsandbytes_8bit", "torchao_int8", "quanto_int8"),
    "context_parallel": ("ulysses",),
}
"""The possible values of options that are words; an option may be empty too."""

REFUSED: Mapping[str, str] = {
    "ring": "its attention has to tell how much weight it gave, which that of torch does not, and it takes no prompts of unequal lengths",
    "gguf": "it is one file, and this is the folder of a pipeline",
    **dict.fromkeys(("modelopt", "nunchaku_lite", "auto-round", "sdnq"), "it is for checkpoints that somebody has prepared for it"),
}
"""The reasons why some words that Diffusers knows are no choice here."""

EXCLUSIONS = (
    ("quantization", "storage", "both say what weights are kept in"),
    ("quantization", "offload", "weights that are packed cannot be moved by parts"),
    *((other, "lora", "a LoRA goes beside weights as they are, all of them") for other in ("quantization", "storage", "context_parallel")),
    ("context_parallel", "quantization", "ranks exchange whole rows between whole weights"),
    ("context_parallel", "storage", "ranks exchange whole rows between whole weights"),
    ("context_parallel", "offload", "all ranks are at the same block at the same time, and a disk is not"),
)
"""Options that cannot be chosen together, and why."""

NOT_SET = -1
"""The value of vae_tiling_above that leaves the choice to the device."""


@dataclass(frozen=True, slots=True)
class DiffusersOptions:
    """width, height, steps: defaults for a request without them; 0: as the checkpoint says. guidance: the same; below 0: as the checkpoint
    says.

    condition_area: pixels to which an edited picture is resized, and the result with it if no size is asked for. max_pixels: limit of one
    picture, or of a frame; 0: see `Defaults.applied`. max_steps: limit of the steps of a request. max_frames, max_seconds: limits of a film
    and of sound; 0: as much as the model can make. max_work: limit of pixels times frames times steps; 0: see `Defaults.applied`.
    film_bytes: memory above the weights that one film may use; 0: see `films.budget_of`. max_tokens: limit of latent tokens of all drawings
    at once, guidance included; 0: as many as some steps have. text_cache_bytes, picture_cache_bytes: results of encoders that are kept for
    later requests.

    offload, storage, quantization, context_parallel: one of CHOICES, or nothing; see `placement`. offload_folder: the folder
    in which a folder is made for parts that are offloaded to the disk. vae_tiling_above: pixels of one picture above which it is decoded in
    tiles; 0: never. lora: files that change the weights, FILE[=SCALE] with commas between them; see `lora`."""

    width: int = 0
    height: int = 0
    steps: int = 0
    guidance: float = -1.0
    condition_area: int = AREA
    max_pixels: int = 0
    max_steps: int = 200
    max_frames: int = 0
    max_seconds: float = 0.0
    max_work: int = 0
    film_bytes: int = 0
    max_tokens: int = 0
    text_cache_bytes: int = 64 << 20
    picture_cache_bytes: int = 256 << 20
    offload: str = ""
    offload_folder: str = ""
    storage: str = ""
    quantization: str = ""
    vae_tiling_above: int = NOT_SET
    context_parallel: str = ""
    lora: str = ""

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> DiffusersOptions:
        diffusers_options = cls(**validate_options(options, cls(), "pipelines of pictures"))
        for each in fields(diffusers_options):
            value = getattr(diffusers_options, each.name)
            minimum = NOT_SET if each.name == "vae_tiling_above" else 0
            # A guidance below 0 means that of the checkpoint.
            if not isinstance(value, str) and each.name != "guidance" and value < minimum:
                raise LoadError(f"option {each.name} is {value}: it must not be below {minimum}")
        if not diffusers_options.condition_area or not diffusers_options.max_steps:
            raise LoadError("options condition_area and max_steps must be above 0")
        diffusers_options._check_choices()
        return diffusers_options

    def _check_choices(self) -> None:
        """Raises LoadError for a value that is not among its CHOICES, and for options that exclude each other."""
        for name, able in CHOICES.items():
            value = getattr(self, name)
            if value and value not in able:
                reason = f"{REFUSED[value]}; " if value in REFUSED else ""
                raise LoadError(f"option {name} is {value!r}: {reason}it can be {' or '.join(able)}, or be left out")
        for one, other, reason in EXCLUSIONS:
            if getattr(self, one) and getattr(self, other):
                pair_text = f"{one} {getattr(self, one)} and {other} {getattr(self, other)}"
                raise LoadError(f"options {pair_text} exclude each other, since {reason}: leave one of them out")
        if self.offload_folder and self.offload != "disk":
            raise LoadError(f"option offload_folder {self.offload_folder}: nothing is written there without offload disk")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The options, completed by the defaults that the folder states. width, height: of the folder; 0: it states none. has_one_size: whether
    the model draws in no other size."""

    options: DiffusersOptions
    width: int = 0
    height: int = 0
    has_one_size: bool = False

    @classmethod
    def of(cls, folder: Path, options: DiffusersOptions) -> Defaults:
        """The options, with the folder's defaults for options that were not chosen. Raises BadCheckpoint for a default of another type."""
        if not (folder / DEFAULTS_FILE).is_file():
            return cls(options)
        defaults, sides = json_object(folder / DEFAULTS_FILE), {"width": 0, "height": 0}
        names = {"width": "width", "height": "height", "steps": "steps", "guidance_scale": "guidance"}
        for key, name in names.items():
            value = defaults.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_fit(name, value):
                raise BadCheckpoint(f"{folder / DEFAULTS_FILE}: {key} is {value!r} and must be a number that is not below 0")
            changed: dict[str, Any] = {name: float(value) if name == "guidance" else int(value)}
            sides |= {name: changed[name] for name in sides.keys() & changed}
            if getattr(options, name) == getattr(DiffusersOptions(), name):
                options = replace(options, **changed)
        return cls(options, **sides, has_one_size=Vocabulary.of(folder).one_size)

    def applied(self, limits: DrawingLimits) -> DrawingLimits:
        """The limits of a pipeline with these options applied. By default the largest picture has MAX_AREA_FACTOR times the pixels of the
        model's own size, and the limit of work is the largest picture, or the usual film of a million pixels, in the largest number of
        steps. Raises LoadError for options that the pipeline cannot follow."""
        options = self.options
        if self.has_one_size:
            limits = self._in_one_size(limits)
        # A pipeline without a size of its own, or that enlarges, is held to the usual area of such pipelines.
        has_area = limits.width and limits.height and not limits.only_size
        own_area = (self.width or limits.width) * (self.height or limits.height) if has_area else max(AREA, options.condition_area)
        max_pixels = options.max_pixels or MAX_AREA_FACTOR * own_area
        max_frames = options.max_frames or limits.max_frames
        frames = limits.frames
        if frames > max_frames:  # The number of frames can only be lowered by whole multiples.
            frames -= -(-(frames - max_frames) // limits.frame_multiple) * limits.frame_multiple
        seconds = min(options.max_seconds or limits.max_seconds, limits.max_seconds)
        usual_pixels = min(max_pixels, AREA) * frames if frames else max_pixels
        result = replace(
            limits,
            frames=frames,
            max_frames=min(max_frames, limits.max_frames),
            seconds=min(limits.seconds, seconds),
            max_seconds=seconds,
            width=(options.width or limits.width) if limits.width else 0,
            height=(options.height or limits.height) if limits.height else 0,
            steps=options.steps or limits.steps,
            guidance=options.guidance if options.guidance >= 0 else limits.guidance,
            max_pixels=max_pixels,
            max_steps=options.max_steps,
            max_work=options.max_work or usual_pixels * options.max_steps,
        )
        if result.width % result.multiple or result.height % result.multiple or result.width * result.height > result.max_pixels:
            raise LoadError(
                f"{result.width}x{result.height} pixels are not drawn by default: sides are multiples of {result.multiple}, "
                f"and at most {result.max_pixels} pixels"
            )
        if limits.frames and result.frames < 1:
            told_frames = f"films have {limits.frames} frames, or a multiple of {limits.frame_multiple} fewer"
            raise LoadError(f"option max_frames is {options.max_frames}: {told_frames}; give more")
        if not 0 <= result.guidance <= result.max_guidance:
            raise LoadError(f"guidance {result.guidance:g} is not taken by default: 0 to {result.max_guidance:g} can be")
        if not result.min_steps <= result.steps <= result.max_steps:
            raise LoadError(f"{result.steps} steps are not taken by default: {result.min_steps} to {result.max_steps} can be")
        return result

    def _in_one_size(self, limits: DrawingLimits) -> DrawingLimits:
        """The limits of a pipeline that draws in the folder's size alone; pictures may be wanted in any size. Raises BadCheckpoint if the
        pipeline makes no pictures of that size."""
        width, height = self.width or limits.width, self.height or limits.height
        is_able = limits.width and limits.height and limits.sized and not limits.frames and not limits.max_seconds
        if not is_able or width % limits.multiple or height % limits.multiple or min(width, height) < limits.min_side:
            raise BadCheckpoint(f"{DEFAULTS_FILE}: one_size is for pipelines that draw pictures in a size of their own; leave it out")
        return replace(limits, only_size=(width, height), multiple=1, max_side=MAX_SIDE)


def _is_fit(name: str, value: float) -> bool:
    """Whether the value is finite and not below 0, and whole unless it is guidance."""
    return math.isfinite(value) and value >= 0 and (name == "guidance" or int(value) == value)


MAX_WHAT_CHARACTERS = 100
MAX_WORDS = 12
"""The limit of words of one kind that a note names."""
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of a checkpoint. things: what it draws, as text; empty if it does not say. words: the words that it knows, by
    their subject, first the things that can be drawn, as in {"shape": ["circle", ...], "colour": ["red", ...]}. lower_case: it learned
    small letters only, and gets prompts in them. one_size: it draws only in its own size; other sizes are made of that."""

    things: str = ""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lower_case: bool = False
    one_size: bool = False

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """Read the vocabulary from the folder of a checkpoint. Raises BadCheckpoint for a file of another form."""
        path = folder / DEFAULTS_FILE
        entry = json_object(path).get("draws") if path.is_file() else None
        if entry is None:
            return cls()
        if not _is_well_formed(entry):
            example = '{"what": "shapes", "words": {"shape": ["circle"]}, "lower_case": true, "one_size": true}'
            raise BadCheckpoint(f"{path}: draws must be as in {example}")
        words = {name: tuple(map(str.casefold, words)) for name, words in entry["words"].items()}
        return cls(entry["what"], words, entry.get("lower_case", False), entry.get("one_size", False))

    def cased(self, prompt: str) -> str:
        """A prompt in the letters that the model was taught."""
        return prompt.lower() if self.lower_case else prompt

    def notes(self, prompt: str) -> Iterator[str]:
        """Yields a note for the client if its prompt names none of the words."""
        missing = [name for name, words in self.words.items() if not _names_one(prompt, words)]
        if missing:
            # The first subject is the things that can be drawn, which `things` has named already.
            unnamed = "none of them" if missing[0] == next(iter(self.words)) else _none_of(self.words[missing[0]])
            yield f"this model draws {self.things}; this prompt names {unnamed}"


def _none_of(words: Sequence[str]) -> str:
    """The part of a note that lists words. It says "none of", which also fits a prompt with a word that the checkpoint does not list."""
    return f"none of: {', '.join(words[:MAX_WORDS])}{', ...' if len(words) > MAX_WORDS else ''}"


def _names_one(prompt: str, words: Collection[str]) -> bool:
    """Whether a prompt has one of these words, or a plural of one."""
    prompt_words = map(str.casefold, _WORD.findall(prompt))
    return any({word, word.removesuffix("s"), word.removesuffix("es")}.intersection(words) for word in prompt_words)


def _is_well_formed(entry: Any) -> bool:
    """Whether the entry of the file has the form of a vocabulary."""
    if not isinstance(entry, dict) or not isinstance(entry.get("words"), dict) or not isinstance(entry.get("what"), str):
        return False
    words = [word for words in entry["words"].values() if isinstance(words, list) for word in words]
    flags = (entry.get(name, False) for name in ("lower_case", "one_size"))
    return (
        0 < len(entry["what"]) <= MAX_WHAT_CHARACTERS
        and all(isinstance(words, list) and words for words in entry["words"].values())
        and all(isinstance(word, str) for word in words)
        and all(isinstance(flag, bool) for flag in flags)
    )
