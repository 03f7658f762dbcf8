"""The part of free memory that a Thinker takes in addition to keys and values, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import structlog

from omnistage.models.common.cache_size import CacheSize, power_of_two
from omnistage.models.common.encoders.encoder import MediaSizes
from omnistage.models.common.encoders.options import ThinkerOptions
from omnistage.models.humans import bytes_told
from omnistage.models.options import LoadOptions

log = structlog.get_logger(__name__)

FEATURE_SHARE = 0.05
PASS_SHARE = 0.1
"""Part of the free memory that one pass of an encoder may take."""

MEDIUM_ROWS = {"cpu": 2048, "cuda": 16384}
"""Largest number of tokens of one picture or film. Attention takes time by the square of the number of patches, so a CPU gets fewer."""

LEAST_MEDIUM_ROWS = 64
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
    bytes of kept features. decoders: number of processes that decode. why: name of each setting -> its reason, for the user."""

    cache: CacheSize
    batch_rows: int
    medium_rows: int
    pass_patches: int
    pass_frames: int
    feature_bytes: int
    decoders: int
    why: dict[str, str]

    @classmethod
    def choose(cls, config: MediaSizes, thinker_options: ThinkerOptions, options: LoadOptions, cache: CacheSize) -> Self:
        """Choose the sizes. thinker_options: sizes that the user asked for. cache: the size of keys and values, chosen before."""
        kind, free, reasons = options.device.partition(":")[0], cache.free, dict(cache.why)
        patch, frame, room = config.vision.patch_bytes, config.audio.frame_bytes, int(free * PASS_SHARE)
        medium_rows = min(
            thinker_options.medium_rows or _medium_rows(MEDIUM_ROWS[kind], room // patch // config.vision.unit), cache.context
        )
        # A pass must have room for at least one piece: a whole picture, or a piece of sound.
        pass_patches = max(min(PASS_PATCHES[kind], room // patch), medium_rows * config.vision.unit)
        pass_frames = max(min(PASS_FRAMES[kind], room // frame), config.audio.piece)
        memory = bytes_told(max(pass_patches * patch, pass_frames * frame))
        reasons["encoder_memory"] = f"{memory}, for {pass_patches} patches of pictures or {pass_frames} frames of sound in one pass"
        reasons["medium_rows"] = f"{medium_rows} tokens of one picture or film"
        if not thinker_options.medium_rows and medium_rows < min(MEDIUM_ROWS[kind], cache.context):
            # Replicas that differ in it do not go on with each other's answers, and a picture has fewer tokens than the published one has.
            log.warning("medium_rows.small", medium_rows=medium_rows, usual=MEDIUM_ROWS[kind], free=bytes_told(free))
        feature_bytes = (
            (thinker_options.feature_cache_bytes or min(int(free * FEATURE_SHARE), MAX_FEATURE_BYTES)) if options.keeps_prompts else 0
        )
        reasons["feature_cache_bytes"] = str(feature_bytes)
        batch_rows = options.max_batch_tokens or BATCH_ROWS[kind]
        decoders = thinker_options.decoders or DECODERS
        return cls(cache, batch_rows, medium_rows, pass_patches, pass_frames, feature_bytes, decoders, reasons)


def _medium_rows(max_rows: int, room: int) -> int:
    """Number of tokens that one medium may have: `max_rows`, or if a pass has memory for fewer tokens (`room`), a power of two, as for a
    context that does not fit."""
    return max_rows if room >= max_rows else max(power_of_two(room), LEAST_MEDIUM_ROWS)
