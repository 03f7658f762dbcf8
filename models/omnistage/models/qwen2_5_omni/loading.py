"""A Qwen2.5-Omni Thinker from the files of a checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5OmniTextConfig

from omnistage.engine.decoder import LM_HEAD, DecoderParts, PackedDecoder
from omnistage.engine.group import ALONE, Group, RanksApart
from omnistage.engine.head import TokenHead
from omnistage.engine.kv import page_bytes
from omnistage.engine.linear import WHOLE, LinearMaker, build_exact, whole
from omnistage.engine.pages import PAGE_ROWS
from omnistage.engine.rope import contiguous, rotary
from omnistage.engine.tap import last_and_embedding
from omnistage.models.common.cache_size import CacheSize
from omnistage.models.common.checkpoint import BadCheckpoint, name_of
from omnistage.models.common.constraint import FORMS
from omnistage.models.common.encoders.queue import Pass, Slice
from omnistage.models.common.encoders.reader import MediaReader
from omnistage.models.common.encoders.spectrograms import Spectrograms
from omnistage.models.common.engine_model import Started, chosen_dtype, decoder_weights, limits_of
from omnistage.models.common.lru import LruCache
from omnistage.models.common.revision import computed
from omnistage.models.common.slices import config_of_part, weights_of_part
from omnistage.models.common.spool import MEDIA_PORTS
from omnistage.models.common.team import Team, options_of
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.errors import LoadError
from omnistage.models.interface import ModelInfo
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.audio import AudioEncoder
from omnistage.models.qwen2_5_omni.config import RENAMED, ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.media import (
    encoding_of_pictures,
    encoding_of_sounds,
    picture_pass,
    preprocessing_of,
    rows_of,
    sound_pass,
)
from omnistage.models.qwen2_5_omni.options import ThinkerOptions
from omnistage.models.qwen2_5_omni.ports import thinker_ports
from omnistage.models.qwen2_5_omni.processor import PictureSettings, read_pictures
from omnistage.models.qwen2_5_omni.sizes import Sizes
from omnistage.models.qwen2_5_omni.thinker import QwenThinker, tokenizer_of
from omnistage.models.qwen2_5_omni.vision import VisionEncoder

CODE_REVISION = "2"
"""Part of the revision; grows whenever this family's code could give other tokens for equal input. The engine has a number of its own."""

HEAD_PLAN = {"lm_head": "colwise_gather_output"}
"""As the model of Transformers adds it to the plan of its config; that model takes seconds to import."""

_PREFIX = "thinker."
_OTHERS = ("talker.", "token2wav.")


def load_thinker(folder: Path, options: LoadOptions) -> QwenThinker:
    """Raises LoadError, or ValueError for ill-shaped weights."""
    config = read_thinker_config(folder)
    config_of_part(config.text, options.tensor_parallel_size)  # Before others are started for nothing.
    with ExitStack() as undo:
        if team := Team.for_options(f"{__name__}:{read_decoder.__name__}", folder, options):
            undo.callback(team.close)
        try:
            thinker = _loaded(folder, options_of(options, 0), config, team)
        except RanksApart as error:
            raise LoadError(str(error)) from error
        undo.pop_all()
    return thinker


def _loaded(folder: Path, options: LoadOptions, config: ThinkerConfig, team: Team | None) -> QwenThinker:
    dtype, device = chosen_dtype(options), torch.device(options.device)
    torch.set_num_threads(options.threads)
    tokenizer, spectrograms, pictures = (
        tokenizer_of(folder, config),
        Spectrograms(folder, config.audio.mel_bins),
        read_pictures(folder, config),
    )
    parts = read_parts(folder, config, dtype, device, ALONE if team is None else team.group)
    if team is not None:
        team.connect(device)
    wanted = ThinkerOptions.from_settings(options.family).context
    # The ranks of a CPU take of the same memory.
    sharing = options.tensor_parallel_size if device.type == "cpu" else 1
    row_bytes = sharing * page_bytes(parts.decoder.spec) // PAGE_ROWS
    cache = CacheSize.chosen(options, row_bytes=row_bytes, context=config.text.context, wanted=wanted)
    sizes = Sizes.chosen(config, options, cache)
    limits, kv_bytes = limits_of(options, sizes.batch_rows), cache.kv_bytes // sharing
    started = Started.of(parts.decoder, TokenHead, folder, options, limits=limits, kv_bytes=kv_bytes, team=team)
    together, encoded = computed(partial(_encode, parts, config, pictures), options.threads)
    info = ModelInfo(
        name=name_of(folder),
        revision=started.revision(CODE_REVISION, results=encoded, settings=f"{cache.context} {sizes.medium_rows}"),
        accepts=MEDIA_PORTS,
        produces=thinker_ports(config.text.hidden_size, started.dtype),
        max_sessions=options.sessions,
        inputs=("text", "image", "audio", "video"),
        constraints=FORMS,
        settings={
            **started.settings,
            **sizes.why,
            "products of the encoders": parts.products,
            "encoders": "several media in one pass" if together else "one piece of a medium in a pass",
        },
    )
    encoders = Worker("encoders", options.threads)
    reader = MediaReader(
        MediaDecoder(processes=sizes.decoders),
        preprocessing_of(config, pictures, spectrograms.sample_rate_hz, sizes.medium_rows, cache.context),
        encoding_of_pictures(encoders, parts.vision, pictures.colours, most_patches=sizes.pass_patches, together=together),
        encoding_of_sounds(encoders, parts.audio, spectrograms, most_frames=sizes.pass_frames, together=together),
        partial(rows_of, config=config),
        LruCache(sizes.feature_bytes),
        info.revision.encode(),
    )
    return QwenThinker(config, started.engine, tokenizer, reader, encoders, info, cache.context, team)


# The weights ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a Thinker. products: how the encoders multiply, and why."""

    decoder: PackedDecoder
    vision: VisionEncoder
    audio: AudioEncoder
    products: str


def read_parts(folder: Path, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, group: Group = ALONE) -> Parts:
    """Of a rank: its part of the decoder, and all of the encoders. Raises BadCheckpoint for a weight that is missing, or that nobody reads;
    ValueError for an ill-shaped one."""
    with Weights(folder, _OTHERS, RENAMED, computed=dtype) as weights:
        _check_encoders(weights, config)
        decoder = _decoder(weights, config, dtype, device, group)
        build = partial(_encoders, weights, config, dtype, device)
        if device.type == "cpu":
            (vision, audio), products = build_exact(build, dtype, device)
        else:
            # A medium that is alone in its pass has the same bits every time, and products of a whole picture are what a GPU is made for.
            (vision, audio), products = build(whole), WHOLE.name
        weights.check_read()
    return Parts(decoder, vision, audio, products)


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """A `rank.Reader`."""
    dtype = chosen_dtype(options)
    with Weights(folder, _OTHERS, RENAMED, computed=dtype) as weights:
        return _decoder(weights, read_thinker_config(folder), dtype, torch.device(options.device), group)


def _decoder(weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, group: Group) -> PackedDecoder:
    weights.read(_PREFIX + LM_HEAD)  # Some checkpoints have it where it is the embedding once more.
    head = "" if config.tied else _PREFIX + LM_HEAD
    weight = decoder_weights(weights, dtype, device, prefix=f"{_PREFIX}model.", head=head)
    parts = DecoderParts(rope=rotary(config.rope.theta, contiguous(config.rope.sections)), tap=last_and_embedding)
    if group.size == 1:
        return PackedDecoder(config.text, weight, parts)
    plan = {**Qwen2_5OmniTextConfig.base_model_tp_plan, **HEAD_PLAN}
    return PackedDecoder(config_of_part(config.text, group.size), weights_of_part(weight, plan, group), parts, group)


def _check_encoders(weights: Weights, config: ThinkerConfig) -> None:
    """Raises BadCheckpoint for sizes of the encoders that are not those of their weights: what is built and tried follows from them."""
    eyes, ears = config.vision, config.audio
    merged = eyes.hidden_size * eyes.unit
    block, layer = f"{_PREFIX}visual.blocks", f"{_PREFIX}audio_tower.layers"
    for name, shape in {
        f"{_PREFIX}visual.patch_embed.proj.weight": (eyes.hidden_size, eyes.channels, eyes.frames, eyes.patch_size, eyes.patch_size),
        f"{block}.0.mlp.gate_proj.weight": (eyes.ffn_size, eyes.hidden_size),
        f"{block}.{eyes.layers - 1}.norm1.weight": (eyes.hidden_size,),
        f"{_PREFIX}visual.merger.mlp.0.weight": (merged, merged),
        f"{_PREFIX}visual.merger.mlp.2.weight": (eyes.output_size, merged),
        f"{_PREFIX}audio_tower.conv1.weight": (ears.hidden_size, ears.mel_bins, 3),
        f"{layer}.0.fc1.weight": (ears.ffn_size, ears.hidden_size),
        f"{layer}.{ears.layers - 1}.fc1.bias": (ears.ffn_size,),
        f"{_PREFIX}audio_tower.proj.weight": (ears.output_size, ears.hidden_size),
    }.items():
        weights.check_shape(name, shape)


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
