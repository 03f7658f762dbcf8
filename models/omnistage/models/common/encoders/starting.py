"""Starts a Thinker with encoders: reads its weights, and makes its engine and its reader of media."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.devices import ALONE, Group
from omnistage.engine.engine import Engine
from omnistage.engine.head import TokenHead
from omnistage.engine.linear import WHOLE, LinearMaker, build_exact, whole
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.engine.parts import DecoderConfig
from omnistage.models.common.cache_size import CacheSize
from omnistage.models.common.checkpoint import BadCheckpoint, name_of
from omnistage.models.common.encoders.config import RENAMED
from omnistage.models.common.encoders.encoder import AudioEncoder, MediaSizes, Need, VisionEncoder
from omnistage.models.common.encoders.media import (
    encoding_of_pictures,
    encoding_of_sounds,
    picture_pass,
    preprocessing_of,
    rows_of,
    sound_pass,
)
from omnistage.models.common.encoders.options import ThinkerOptions
from omnistage.models.common.encoders.patches import Normalization
from omnistage.models.common.encoders.pictures import PictureSettings, read_pictures
from omnistage.models.common.encoders.queue import Pass, Slice
from omnistage.models.common.encoders.reader import MediaPreprocessing, MediaReader
from omnistage.models.common.encoders.sizes import Sizes
from omnistage.models.common.encoders.spectrograms import Spectrograms
from omnistage.models.common.engine_model import Started, choose_dtype, limits_of
from omnistage.models.common.grammar import FORMS
from omnistage.models.common.lru import LruCache
from omnistage.models.common.revision import compute_on_thread
from omnistage.models.common.spool import MEDIA_PORTS
from omnistage.models.common.team import Team
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.interface import ModelInfo, PortSpec
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class ThinkerParts:
    """The parts of a Thinker that have weights. products: how the encoders' products are computed, and why, in words."""

    decoder: PackedDecoder
    vision: VisionEncoder
    audio: AudioEncoder
    products: str


class ThinkerSizes(MediaSizes, Protocol):
    """The sizes in the config of a Thinker. text: of the decoder."""

    @property
    def text(self) -> DecoderConfig: ...


Sized = TypeVar("Sized", bound=ThinkerSizes)
"""The config of a family."""


@dataclass(frozen=True, slots=True)
class ThinkerWeights(Generic[Sized]):
    """How a family reads its weights. others: beginnings of the names of weights that belong to other models. check: called before anything
    is built; raises BadCheckpoint if the sizes in the config do not fit the weights. decoder, encoders: build a rank's part of the decoder,
    and the whole encoders."""

    others: tuple[str, ...]
    read_config: Callable[[Path], Sized]
    check: Callable[[Weights, Sized, Group], None]
    decoder: Callable[[Weights, Sized, torch.dtype, torch.device, Group], PackedDecoder]
    encoders: Callable[[Weights, Sized, torch.dtype, torch.device, LinearMaker], tuple[VisionEncoder, AudioEncoder]]

    def read_parts(self, folder: Path, config: Sized, dtype: torch.dtype, device: torch.device, group: Group = ALONE) -> ThinkerParts:
        """The parts of one rank: its part of the decoder, and the whole encoders. Raises BadCheckpoint for a weight that is missing or that
        no part reads, ValueError for a misshapen weight."""
        with Weights(folder, self.others, RENAMED, computed=dtype) as weights:
            self.check(weights, config, group)
            decoder = self.decoder(weights, config, dtype, device, group)
            (vision, audio), products = _build_encoders(partial(self.encoders, weights, config, dtype, device), dtype, device)
            weights.check_read()
        return ThinkerParts(decoder, vision, audio, products)

    def read_decoder(self, folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
        """One rank's part of the decoder, for a `rank.RankReader`."""
        dtype = choose_dtype(options)
        with Weights(folder, self.others, RENAMED, computed=dtype) as weights:
            return self.decoder(weights, self.read_config(folder), dtype, torch.device(options.device), group)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A checkpoint's settings for preparing media."""

    pictures: PictureSettings
    spectrograms: Spectrograms

    @classmethod
    def of(cls, folder: Path, config: MediaSizes) -> Self:
        """Read the preparation from the folder of a checkpoint. Raises BadCheckpoint."""
        return cls(
            read_pictures(folder, config.vision), Spectrograms(folder, config.audio.mel_bins, adds_silence=config.audio.adds_silence)
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """The running parts of a Thinker. encoders: the thread of the reader's queues. context: tokens that a conversation and its answer may
    have together. team: the other ranks of the decoder; None: there are none."""

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
        parts = weights.read_parts(folder, config, dtype, device, ALONE if team is None else team.group)
        if team is not None:
            team.connect(device)
        # The ranks on a CPU share its memory.
        sharing = options.tensor_parallel_size if parts.decoder.spec.device.type == "cpu" else 1
        row_bytes = sharing * page_bytes(parts.decoder.spec) // PAGE_ROWS
        cache = CacheSize.choose(options, row_bytes=row_bytes, context=config.text.context, user_context=thinker_options.context)
        sizes = Sizes.choose(config, thinker_options, options, cache)
        limits, kv_bytes = limits_of(options, sizes.batch_rows), cache.kv_bytes // sharing
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
                **sizes.why,
                "products of the encoders": parts.products,
                "encoders": "several media in one pass" if together else "one piece of a medium in a pass",
            },
        )
        encoders = Worker("encoders", options.threads)
        asks = preprocessing_of(
            config,
            preparation.pictures,
            preparation.spectrograms.sample_rate_hz,
            sizes.medium_rows,
            cache.context,
            thinker_options.film_fps,
        )
        reader = _reader(asks, config, parts, preparation, sizes, encoders, info.revision, together=together)
        return cls(started.engine, reader, encoders, info, cache.context, team)


def _reader(
    asks: MediaPreprocessing,
    config: MediaSizes,
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
    """Build the encoders. Returns them, and a text on how their products are computed."""
    if device.type == "cpu":
        return build_exact(build, dtype, device)
    # A medium that is alone in its pass has the same bits every time, so no backend need be tried; and large products suit a GPU.
    return build(whole), WHOLE.name


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
    sounds = [
        torch.from_numpy(random.standard_normal((frames, ears.mel_bins), np.float32)) for frames in (chunk // 3, 2 * chunk, chunk + 7)
    ]
    with torch.inference_mode():
        single_rows = [*_encode_each(picture_pass(parts.vision, colours), pictures), *_encode_each(sound_pass(parts.audio), sounds)]
        joint_rows = [*picture_pass(parts.vision, colours)(pictures, _nothing), *sound_pass(parts.audio)(sounds, _nothing)]
    return all(map(torch.equal, single_rows, joint_rows)), single_rows


def _encode_each(encode: Pass[Slice], slices: Sequence[Slice]) -> list[torch.Tensor]:
    return [encode([one], _nothing)[0] for one in slices]


def _nothing() -> None:
    """Does nothing; it is the call between layers of these passes."""
