"""A Qwen2.5-Omni Thinker from the files of a checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from omnistage.engine.decoder import EMBEDDING, PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.head import TokenHead
from omnistage.engine.kv import page_bytes
from omnistage.engine.linear import WHOLE, LinearMaker, build_exact, whole
from omnistage.engine.pages import PAGE_ROWS
from omnistage.engine.results import fixed_results
from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.constraint import FORMS
from omnistage.models.common.memory import free_bytes, memory_told
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.spool import MEDIA_PORTS
from omnistage.models.common.thinker import MAX_SESSIONS, chosen_dtype, limits_of, told_settings
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.devices import hardware
from omnistage.models.interface import ModelInfo
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.audio import AudioEncoder
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.encoding import Pass, Slice
from omnistage.models.qwen2_5_omni.features import FeatureCache
from omnistage.models.qwen2_5_omni.media import MediaPreprocessing, MediaReader, picture_pass, picture_queue, sound_pass, sound_queue
from omnistage.models.qwen2_5_omni.ports import name_of, thinker_ports
from omnistage.models.qwen2_5_omni.processor import PictureSettings, Spectrograms, read_pictures
from omnistage.models.qwen2_5_omni.sizes import Sizes
from omnistage.models.qwen2_5_omni.text import OmniTokenizer
from omnistage.models.qwen2_5_omni.thinker import QwenThinker
from omnistage.models.qwen2_5_omni.vision import VisionEncoder

CODE_REVISION = "1"
"""Part of the revision; grows whenever this family's code could give other tokens for equal input. The engine has a number of its own."""

_PREFIX = "thinker."
_OTHERS = ("talker.", "token2wav.")


def load_thinker(folder: Path, options: LoadOptions) -> QwenThinker:
    """Raises LoadError, or ValueError for ill-shaped weights."""
    dtype, torch_dtype = chosen_dtype(options.dtype, options.device)
    device, sessions = torch.device(options.device), options.max_sessions or MAX_SESSIONS
    torch.set_num_threads(options.threads)
    config = read_thinker_config(folder)
    tokenizer, spectrograms, pictures = OmniTokenizer(folder, config), Spectrograms(folder, config), read_pictures(folder, config)
    parts = read_parts(folder, config, torch_dtype, device)
    free = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
    sizes = Sizes.chosen(config, options, sessions=sessions, row_bytes=page_bytes(parts.decoder.spec) // PAGE_ROWS, free=free)
    limits = limits_of(sessions, options.max_batch_size, sizes.batch_rows)
    engine = Engine(
        parts.decoder,
        TokenHead(parts.decoder.logits),
        pages=sizes.kv_bytes // page_bytes(parts.decoder.spec),
        limits=limits,
        kept_pages=None if options.keeps_prompts else 0,
    )
    together, encoded = computed(partial(_encode, parts, config, pictures), options.threads)
    results = computed(partial(fixed_results, parts.decoder, parts.decoder.logits, engine.attention.backend), options.threads)
    info = ModelInfo(
        name=name_of(folder),
        revision=revision(
            folder,
            CODE_REVISION,
            dtype=dtype,
            device=hardware(options.device),
            threads=options.threads,
            results=[*results, *encoded],
            settings=f"{sizes.context} {sizes.medium_rows}",
        ),
        accepts=MEDIA_PORTS,
        produces=thinker_ports(config.text.hidden_size, dtype),
        max_sessions=sessions,
        inputs=("text", "image", "audio", "video"),
        constraints=FORMS,
        settings={
            **told_settings(options, dtype, limits),
            **sizes.why,
            **memory_told(folder),
            "products": parts.products,
            "attention": engine.attention.reason,
            "encoders": "several media in one pass" if together else "one piece of a medium in a pass",
        },
    )
    encoders = Worker("encoders", options.threads)
    reader = MediaReader(
        config,
        MediaDecoder(processes=sizes.decoders),
        MediaPreprocessing(config, pictures, spectrograms.sample_rate_hz, sizes.medium_rows, sizes.context),
        spectrograms,
        picture_queue(encoders, parts.vision, pictures.colours, most_patches=sizes.pass_patches, together=together),
        sound_queue(encoders, parts.audio, most_frames=sizes.pass_frames, together=together),
        FeatureCache(sizes.feature_bytes),
        info.revision.encode(),
    )
    return QwenThinker(config, engine, tokenizer, reader, encoders, info, sizes.context)


# The weights ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a Thinker. products: how they multiply, and why."""

    decoder: PackedDecoder
    vision: VisionEncoder
    audio: AudioEncoder
    products: str


def read_parts(folder: Path, config: ThinkerConfig, dtype: torch.dtype, device: torch.device) -> Parts:
    """Raises BadCheckpoint for a weight that is missing, or that nobody reads; ValueError for an ill-shaped one."""
    with Weights(folder) as weights:
        language = partial(_language_weight, weights, config.tied, dtype, device)
        decoder = PackedDecoder(config.text, language)
        build = partial(_encoders, weights, config, dtype, device)
        if device.type == "cpu":
            (vision, audio), products = build_exact(build, dtype, device)
        else:
            # A medium that is alone in its pass has the same bits every time, and products of a whole picture are what a GPU is made for.
            (vision, audio), products = build(whole), WHOLE.name
        weights.check_read(ignored=_OTHERS)
    return Parts(decoder, vision, audio, f"{decoder.products}; of the encoders: {products}")


def _language_weight(weights: Weights, tied: bool, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor | None:
    """A weight of the language model by the decoder's name."""
    if name == "lm_head.weight":
        found = weights.read(_PREFIX + name)
        if found is None and not tied:
            raise BadCheckpoint(f"{weights.directory} lacks the weight {_PREFIX + name}")
        return None if found is None or tied else found.to(device, dtype)
    found = (weights.mapped if name == EMBEDDING else weights.read)(f"{_PREFIX}model.{name}")
    return None if found is None else found.to(device, dtype)


def _encoders(
    weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, linear: LinearMaker
) -> tuple[VisionEncoder, AudioEncoder]:
    def need(part: str, name: str) -> torch.Tensor:
        found = weights.read(f"{_PREFIX}{part}.{name}")
        if found is None:
            raise BadCheckpoint(f"{weights.directory} lacks the weight {_PREFIX}{part}.{name}")
        return found.to(device, dtype)

    weights.read(f"{_PREFIX}audio_tower.audio_bos_eos_token.weight")  # The published code has it and does not use it.
    return VisionEncoder(config.vision, partial(need, "visual"), linear), AudioEncoder(config.audio, partial(need, "audio_tower"), linear)


# Fixed media ---------------------------------------------------------------------------------------------------------------------------


def _encode(parts: Parts, config: ThinkerConfig, pictures: PictureSettings) -> tuple[bool, list[torch.Tensor]]:
    """The rows of random pictures and sounds, whose sizes make whole windows and chunks and parts of some; and whether they have the same
    bits alone and together."""
    random = np.random.default_rng(0)
    side, chunk = config.vision.patch_size * config.vision.merge, config.audio.chunk
    sizes = ((2, 3), (5, 9), (8, 4))
    seen = [random.integers(0, 256, (config.vision.frames, rows * side, columns * side, 3), np.uint8) for rows, columns in sizes]
    heard = [
        torch.from_numpy(random.standard_normal((frames, config.audio.mel_bins), np.float32))
        for frames in (chunk // 3, 2 * chunk, chunk + 7)
    ]
    with torch.inference_mode():
        alone = [*_each(picture_pass(parts.vision, pictures.colours), seen), *_each(sound_pass(parts.audio), heard)]
        together = [*picture_pass(parts.vision, pictures.colours)(seen, _nothing), *sound_pass(parts.audio)(heard, _nothing)]
    return all(map(torch.equal, alone, together)), alone


def _each(encode: Pass[Slice], slices: Sequence[Slice]) -> list[torch.Tensor]:
    return [encode([one], _nothing)[0] for one in slices]


def _nothing() -> None:
    """Between the layers."""
