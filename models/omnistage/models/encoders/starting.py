"""Starts a Thinker with encoders: chooses the part of free memory that it takes in addition to keys and values, reads its weights, and
makes its engine and its reader of media."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import structlog
import torch

from omnistage.engine.adapter import TokenHead
from omnistage.engine.decoder import LM_HEAD, DecoderParts, PackedDecoder
from omnistage.engine.devices import ONE_RANK, Group
from omnistage.engine.engine import Engine
from omnistage.engine.linear import WHOLE_PRODUCT, LinearMaker, build_exact, make_whole
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.engine.parts import DecoderConfig
from omnistage.models.checkpoint.decoder import HEAD_PLAN, Plan, check_experts, config_of_part, weights_of_part
from omnistage.models.checkpoint.files import BadCheckpoint, name_of
from omnistage.models.checkpoint.revision import compute_on_thread
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.encoder import AudioEncoder, Need, Normalization, VisionEncoder
from omnistage.models.encoders.preparing import PictureSettings, Spectrograms, read_pictures
from omnistage.models.encoders.prompt import RENAMED, ThinkerSizes
from omnistage.models.encoders.reader import (
    MediaPreprocessing,
    MediaReader,
    Pass,
    Slice,
    encoding_of_pictures,
    encoding_of_sounds,
    picture_pass,
    preprocessing_of,
    rows_of,
    sound_pass,
)
from omnistage.models.interface import ModelInfo, PortSpec
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.spool import MEDIA_PORTS
from omnistage.models.memory import CacheSize, LruCache, power_of_two
from omnistage.models.options import LoadOptions, ThinkerOptions
from omnistage.models.ranks.team import Team
from omnistage.models.reports import bytes_told
from omnistage.models.text.engine_model import Started, choose_dtype, decoder_weights, limits_of
from omnistage.models.text.grammar import FORMS
from omnistage.models.worker import Worker

log = structlog.get_logger("omnistage.models.common.encoders.sizes")

FEATURE_SHARE = 0.05
PASS_SHARE = 0.1
"""Part of the free memory that one pass of an encoder may take."""

MEDIUM_ROWS = {"cpu": 2048, "cuda": 16384}
"""Largest number of tokens of one picture or film. Attention takes time by the square of the number of patches, so a CPU gets fewer."""

MIN_MEDIUM_ROWS = 64
PASS_PATCHES = {"cpu": 8192, "cuda": 65536}
PASS_FRAMES = {"cpu": 8192, "cuda": 65536}
"""Largest number of spectrogram frames in a pass; a second of sound has a hundred."""

MAX_FEATURE_BYTES = 2 << 30
BATCH_ROWS = {"cpu": 512, "cuda": 2048}
DECODERS = 3
"""Number of processes that decode media. One of them is never used for films, so that pictures and sounds need not wait for films."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a Thinker with encoders. cache: of keys and values. batch_rows: rows that a step may have. medium_rows: tokens that one
    picture or film may have. pass_patches, pass_frames: bounds of a pass of the picture encoder and of the sound encoder. feature_bytes:
    bytes of kept features. decoders: number of processes that decode. reasons: name of each setting -> its reason, for the user."""

    cache: CacheSize
    batch_rows: int
    medium_rows: int
    pass_patches: int
    pass_frames: int
    feature_bytes: int
    decoders: int
    reasons: dict[str, str]

    @classmethod
    def choose(cls, config: ThinkerSizes, thinker_options: ThinkerOptions, options: LoadOptions, cache: CacheSize) -> Self:
        """Choose the sizes. thinker_options: sizes that the user asked for. cache: the size of keys and values, chosen before."""
        kind, free, reasons = options.device.partition(":")[0], cache.free, dict(cache.reasons)
        patch_bytes, frame_bytes, pass_bytes = config.vision.patch_bytes, config.audio.frame_bytes, int(free * PASS_SHARE)
        pass_rows = pass_bytes // patch_bytes // config.vision.unit
        medium_rows = min(thinker_options.medium_rows or _medium_rows(MEDIUM_ROWS[kind], pass_rows), cache.context)
        # A pass must have room for at least one piece: a whole picture, or a piece of sound.
        pass_patches = max(min(PASS_PATCHES[kind], pass_bytes // patch_bytes), medium_rows * config.vision.unit)
        pass_frames = max(min(PASS_FRAMES[kind], pass_bytes // frame_bytes), config.audio.piece)
        memory = bytes_told(max(pass_patches * patch_bytes, pass_frames * frame_bytes))
        reasons["encoder_memory"] = f"{memory}, for {pass_patches} patches of pictures or {pass_frames} frames of sound in one pass"
        reasons["medium_rows"] = f"{medium_rows} tokens of one picture or film"
        if not thinker_options.medium_rows and medium_rows < min(MEDIUM_ROWS[kind], cache.context):
            # Replicas that differ in it do not go on with each other's answers, and a picture has fewer tokens than the published one has.
            log.warning("medium_rows.small", medium_rows=medium_rows, usual=MEDIUM_ROWS[kind], free=bytes_told(free))
        feature_bytes = thinker_options.feature_cache_bytes or min(int(free * FEATURE_SHARE), MAX_FEATURE_BYTES)
        if not options.keeps_prompts:
            feature_bytes = 0
        reasons["feature_cache_bytes"] = str(feature_bytes)
        batch_rows = options.max_batch_tokens or BATCH_ROWS[kind]
        decoders = thinker_options.decoders or DECODERS
        return cls(cache, batch_rows, medium_rows, pass_patches, pass_frames, feature_bytes, decoders, reasons)


def _medium_rows(max_rows: int, room: int) -> int:
    """Number of tokens that one medium may have: `max_rows`, or if a pass has memory for fewer tokens (`room`), a power of two, as for a
    context that does not fit."""
    return max_rows if room >= max_rows else max(power_of_two(room), MIN_MEDIUM_ROWS)


@dataclass(frozen=True, slots=True)
class ThinkerParts:
    """The parts of a Thinker that have weights. products: how the encoders' products are computed, and why, in words."""

    decoder: PackedDecoder
    vision: VisionEncoder
    audio: AudioEncoder
    products: str


Sized = TypeVar("Sized", bound=ThinkerSizes)
"""The config of a family."""


@dataclass(frozen=True, slots=True)
class ThinkerWeights(Generic[Sized]):
    """The weights of a family's Thinker. others: beginnings of the names of weights that belong to other models. read_config: reads the
    family's config. shapes: name without `prefix` -> shape of those weights of the encoders that are not in `_common_shapes`; they are
    compared with the config before anything is built. parts: the parts of the decoder. plan: Transformers' plan by which ranks divide it.
    vision, audio: classes of the encoders, built from their config and weights. prefix: beginning of the names of all weights. unused:
    names without `prefix` of weights that a checkpoint may have and the published code does not use either."""

    others: tuple[str, ...]
    read_config: Callable[[Path], Sized]
    shapes: Callable[[Sized], Mapping[str, tuple[int, ...]]]
    parts: Callable[[Sized], DecoderParts]
    plan: Plan
    vision: Callable[[Any, Need, LinearMaker], VisionEncoder]
    audio: Callable[[Any, Need, LinearMaker], AudioEncoder]
    prefix: str = "thinker."
    unused: tuple[str, ...] = ()

    def read_parts(self, folder: Path, config: Sized, dtype: torch.dtype, device: torch.device, group: Group = ONE_RANK) -> ThinkerParts:
        """The parts of one rank: its part of the decoder, and the whole encoders. Raises BadCheckpoint for a weight that is missing or that
        no part reads, ValueError for a misshapen weight."""
        with Weights(folder, self.others, RENAMED, computed=dtype) as weights:
            self._check(weights, config, group)
            decoder = self._decoder(weights, config, dtype, device, group)
            for name in self.unused:
                weights.read(self.prefix + name)  # Otherwise `check_read` would refuse it.
            eyes, ears = (weights_below(weights, f"{self.prefix}{part}.", dtype, device) for part in ("visual", "audio_tower"))

            def build(linear: LinearMaker) -> tuple[VisionEncoder, AudioEncoder]:
                return self.vision(config.vision, eyes, linear), self.audio(config.audio, ears, linear)

            (vision, audio), products = _build_encoders(build, dtype, device)
            weights.check_read()
        return ThinkerParts(decoder, vision, audio, products)

    def read_decoder(self, folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
        """One rank's part of the decoder, for a `rank.RankReader`."""
        dtype = choose_dtype(options)
        with Weights(folder, self.others, RENAMED, computed=dtype) as weights:
            return self._decoder(weights, self.read_config(folder), dtype, torch.device(options.device), group)

    def _check(self, weights: Weights, config: Sized, group: Group) -> None:
        """Raises BadCheckpoint if the config's sizes of encoders and experts, with which they are built next, do not fit the weights."""
        for name, shape in {**_common_shapes(config), **self.shapes(config)}.items():
            weights.check_shape(self.prefix + name, shape)
        if config.experts is not None:
            for layer in range(config.text.layers):
                check_experts(weights, f"{self.prefix}model.layers.{layer}.mlp", config.experts, config.text.hidden_size, group)

    def _decoder(self, weights: Weights, config: Sized, dtype: torch.dtype, device: torch.device, group: Group) -> PackedDecoder:
        """The decoder, or a rank's part of it."""
        head, prefix = self.prefix + LM_HEAD, f"{self.prefix}model."
        weight = decoder_weights(weights, dtype, device, prefix=prefix, head=head, tied=config.tied, biased=config.biased)
        if group.size == 1:
            return PackedDecoder(config.text, weight, self.parts(config))
        part = part_of_text(config, group.size)
        return PackedDecoder(part, weights_of_part(weight, {**self.plan, **HEAD_PLAN}, group), self.parts(config), group)


def _common_shapes(config: ThinkerSizes) -> dict[str, tuple[int, ...]]:
    """The shapes of weights that the encoders of all families have, by their names without the Thinker's prefix."""
    eyes, ears = config.vision, config.audio
    return {
        "visual.patch_embed.proj.weight": (eyes.hidden_size, eyes.channels, eyes.frames, eyes.patch_size, eyes.patch_size),
        f"visual.blocks.{eyes.layers - 1}.norm1.weight": (eyes.hidden_size,),
        "visual.merger.mlp.2.weight": (eyes.output_size, eyes.hidden_size * eyes.unit),
        "audio_tower.layers.0.fc1.weight": (ears.ffn_size, ears.hidden_size),
        f"audio_tower.layers.{ears.layers - 1}.fc1.bias": (ears.ffn_size,),
    }


def part_of_text(config: ThinkerSizes, ranks: int) -> DecoderConfig:
    """The sizes of the decoder that one of so many ranks has. Raises LoadError for a decoder that cannot be divided so."""
    return config_of_part(config.text, ranks, None if config.experts is None else config.experts.divided_sizes)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A checkpoint's settings for preparing media."""

    pictures: PictureSettings
    spectrograms: Spectrograms

    @classmethod
    def of(cls, folder: Path, config: ThinkerSizes) -> Self:
        """Read the preparation from the folder of a checkpoint. Raises BadCheckpoint."""
        audio = config.audio
        return cls(read_pictures(folder, config.vision), Spectrograms(folder, audio.mel_bins, adds_silence=audio.adds_silence))


@dataclass(frozen=True, slots=True)
class Ready:
    """The running parts of a Thinker, and its config. encoders: the thread of the reader's queues. context: tokens that a conversation and
    its answer may have together. team: the other ranks of the decoder; None: there are none."""

    config: ThinkerSizes
    engine: Engine
    reader: MediaReader
    encoders: Worker
    info: ModelInfo
    context: int
    team: Team | None

    @classmethod
    def of(
        cls,
        folder: Path,
        options: LoadOptions,
        config: Sized,
        weights: ThinkerWeights[Sized],
        thinker_options: ThinkerOptions,
        *,
        code: str,
        produces: Callable[[str], tuple[PortSpec, ...]],
        team: Team | None = None,
    ) -> Self:
        """Start all parts. thinker_options: the user's options. code: see `Started.revision`. produces: returns the output ports, from the
        name of the type of computing. team: the other ranks; this waits until they have loaded. Raises LoadError, or ValueError for
        ill-shaped weights."""
        dtype, device = choose_dtype(options), torch.device(options.device)
        torch.set_num_threads(options.threads)
        preparation = Preparation.of(folder, config)
        parts = weights.read_parts(folder, config, dtype, device, ONE_RANK if team is None else team.group)
        if team is not None:
            team.connect(device)
        # The ranks on a CPU share its memory.
        sharing_ranks = options.tensor_parallel_size if parts.decoder.spec.device.type == "cpu" else 1
        row_bytes = sharing_ranks * page_bytes(parts.decoder.spec) // PAGE_ROWS
        cache = CacheSize.choose(options, row_bytes=row_bytes, context=config.text.context, user_context=thinker_options.context)
        sizes = Sizes.choose(config, thinker_options, options, cache)
        limits, kv_bytes = limits_of(options, sizes.batch_rows), cache.kv_bytes // sharing_ranks
        started = Started.of(parts.decoder, TokenHead, folder, options, limits=limits, kv_bytes=kv_bytes, team=team)
        together, encoded = compute_on_thread(partial(encoded_rows, parts, preparation.pictures.colours), options.threads)
        info = ModelInfo(
            name=name_of(folder),
            revision=started.revision(code, results=encoded, settings=f"{cache.context} {sizes.medium_rows} {thinker_options.film_fps:g}"),
            accepts=MEDIA_PORTS,
            produces=produces(started.dtype),
            max_sessions=options.sessions,
            inputs=("text", "image", "audio", "video"),
            constraints=FORMS,
            settings={
                **started.settings,
                **sizes.reasons,
                "products of the encoders": parts.products,
                "encoders": "several media in one pass" if together else "one piece of a medium in a pass",
            },
        )
        encoders = Worker("encoders", options.threads)
        rate_hz, film_fps = preparation.spectrograms.sample_rate_hz, thinker_options.film_fps
        asks = preprocessing_of(config, preparation.pictures, rate_hz, sizes.medium_rows, cache.context, film_fps)
        reader = _reader(asks, config, parts, preparation, sizes, encoders, info.revision, together=together)
        return cls(config, started.engine, reader, encoders, info, cache.context, team)


def _reader(
    asks: MediaPreprocessing,
    config: ThinkerSizes,
    parts: ThinkerParts,
    preparation: Preparation,
    sizes: Sizes,
    encoders: Worker,
    revision: str,
    *,
    together: bool,
) -> MediaReader:
    """The reader of media. asks: how they are prepared. revision: of the model, part of the digest of everything that rows depend on."""
    pictures, spectrograms = preparation.pictures, preparation.spectrograms
    return MediaReader(
        MediaDecoder(processes=sizes.decoders),
        asks,
        encoding_of_pictures(encoders, parts.vision, pictures.colours, most_patches=sizes.pass_patches, together=together),
        encoding_of_sounds(encoders, parts.audio, spectrograms, most_frames=sizes.pass_frames, together=together),
        partial(rows_of, config=config),
        LruCache(sizes.feature_bytes),
        revision.encode(),
    )


# The encoders --------------------------------------------------------------------------------------------------------------------------


def _build_encoders(
    build: Callable[[LinearMaker], tuple[VisionEncoder, AudioEncoder]], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[VisionEncoder, AudioEncoder], str]:
    """Build the encoders. Returns them, and a text on how their products of matrices are computed."""
    if device.type == "cpu":
        return build_exact(build, dtype, device)
    # A GPU encodes each medium by itself, so its bits are the same every time, whatever library multiplies; and large products suit it.
    return build(make_whole), WHOLE_PRODUCT.name


def weights_below(weights: Weights, prefix: str, dtype: torch.dtype, device: torch.device) -> Need:
    """A function that returns the weight `prefix + name` in this dtype on this device. It raises BadCheckpoint if there is none."""

    def need(name: str) -> torch.Tensor:
        tensor = weights.read(prefix + name)
        if tensor is None:
            raise BadCheckpoint(f"{weights.directory} lacks the weight {prefix}{name}")
        return tensor.to(device, dtype)

    return need


def encoded_rows(parts: ThinkerParts, colours: Normalization) -> tuple[bool, list[torch.Tensor]]:
    """Encode random pictures and sounds, with sizes that give whole and partial windows and chunks. Returns (whether their rows have the
    same bits together in a pass as alone, the rows)."""
    random = np.random.default_rng(0)
    eyes, ears = parts.vision.config, parts.audio.config
    side, chunk = eyes.patch_size * eyes.merge, ears.chunk
    sizes = ((2, 3), (5, 9), (8, 4))
    pictures = [random.integers(0, 256, (eyes.frames, rows * side, columns * side, 3), np.uint8) for rows, columns in sizes]
    frame_counts = (chunk // 3, 2 * chunk, chunk + 7)
    sounds = [torch.from_numpy(random.standard_normal((frames, ears.mel_bins), np.float32)) for frames in frame_counts]
    with torch.inference_mode():
        single_rows = [*_encode_each(picture_pass(parts.vision, colours), pictures), *_encode_each(sound_pass(parts.audio), sounds)]
        joint_rows = [*picture_pass(parts.vision, colours)(pictures, _do_nothing), *sound_pass(parts.audio)(sounds, _do_nothing)]
    return all(map(torch.equal, single_rows, joint_rows)), single_rows


def _encode_each(encode: Pass[Slice], slices: Sequence[Slice]) -> list[torch.Tensor]:
    return [encode([one], _do_nothing)[0] for one in slices]


def _do_nothing() -> None:
    """Does nothing; it is the call between layers of these passes."""
