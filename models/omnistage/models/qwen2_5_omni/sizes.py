"""What a Thinker takes of the memory that is free, and why: measured after its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omnistage.engine.pages import PAGE_ROWS, pages_for
from omnistage.models.errors import LoadError
from omnistage.models.humans import bytes_told
from omnistage.models.options import MEMORY_SHARE, LoadOptions
from omnistage.models.qwen2_5_omni.config import AudioConfig, ThinkerConfig, VisionConfig
from omnistage.models.qwen2_5_omni.media import SOUND_CHUNKS
from omnistage.models.qwen2_5_omni.options import ThinkerOptions

KV_SHARE = {"cpu": 0.4, "cuda": 0.8}
"""Part of the free memory that keys and values may take. On a CPU others compute too."""

FEATURE_SHARE = 0.05
PASS_SHARE = 0.1
"""Part of the free memory that one pass of an encoder may take."""

USUAL_ROWS = 4096
"""Of a conversation with its answer. A cache for so many of each session is enough."""

MEDIUM_ROWS = {"cpu": 2048, "cuda": 16384}
"""Tokens of one picture or film: attention over the patches of one picture costs their number squared, which a CPU has no time for."""

LEAST_MEDIUM_ROWS = 64
PASS_PATCHES = {"cpu": 8192, "cuda": 65536}
PASS_FRAMES = {"cpu": 8192, "cuda": 65536}
"""Frames of the spectrogram of a sound, a hundred a second."""

MAX_FEATURE_BYTES = 2 << 30
BATCH_ROWS = {"cpu": 512, "cuda": 2048}
LEAST_CONTEXT = 1024
DECODERS = 2
"""Processes that decode media: films leave one to pictures and sounds."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """context: tokens of a conversation with its answer. kv_bytes: of keys and values. batch_rows: of a step. medium_rows: tokens of one
    picture or film at most. pass_patches, pass_frames: of a pass of the encoder of pictures and of sound. feature_bytes: of features that
    are kept. decoders: processes. why: in words, by name of the setting."""

    context: int
    kv_bytes: int
    batch_rows: int
    medium_rows: int
    pass_patches: int
    pass_frames: int
    feature_bytes: int
    decoders: int
    why: dict[str, str]

    @classmethod
    def chosen(cls, config: ThinkerConfig, options: LoadOptions, *, sessions: int, row_bytes: int, free: int) -> Self:
        """row_bytes: keys and values of one row. free: bytes that are free. Raises LoadError where what somebody asked for cannot be."""
        wanted, kind = ThinkerOptions.from_settings(options.family), options.device.partition(":")[0]
        shared = f", with {options.memory_share:g} of the memory for this server" if options.given(MEMORY_SHARE) else ""
        why = {"free_memory": f"{bytes_told(free)} after the weights{shared}"}
        context, kv_bytes = _cache(config, wanted, options, sessions, row_bytes, int(free * KV_SHARE[kind]))
        why["kv_cache_bytes"] = f"{kv_bytes}, for {kv_bytes // row_bytes} tokens of {sessions} sessions"
        why["context"] = f"{context} of the {config.text.context} that the model was made for"
        patch, frame, room = _patch_bytes(config.vision), _frame_bytes(config.audio), int(free * PASS_SHARE)
        medium_rows = min(wanted.medium_rows or _medium_rows(MEDIUM_ROWS[kind], room // patch // config.vision.unit), context)
        # A picture is a piece, and so are some chunks of sound: a pass takes one of them at least.
        pass_patches = max(min(PASS_PATCHES[kind], room // patch), medium_rows * config.vision.unit)
        pass_frames = max(min(PASS_FRAMES[kind], room // frame), SOUND_CHUNKS * config.audio.chunk)
        memory = bytes_told(max(pass_patches * patch, pass_frames * frame))
        why["encoder_memory"] = f"{memory}, for {pass_patches} patches of pictures or {pass_frames} frames of sound in one pass"
        why["medium_rows"] = f"{medium_rows} tokens of one picture or film"
        feature_bytes = (wanted.feature_cache_bytes or min(int(free * FEATURE_SHARE), MAX_FEATURE_BYTES)) if options.keeps_prompts else 0
        why["feature_cache_bytes"] = str(feature_bytes)
        batch_rows = options.max_batch_tokens or BATCH_ROWS[kind]
        decoders = wanted.decoders or DECODERS
        return cls(context, kv_bytes, batch_rows, medium_rows, pass_patches, pass_frames, feature_bytes, decoders, why)


def _cache(
    config: ThinkerConfig, wanted: ThinkerOptions, options: LoadOptions, sessions: int, row_bytes: int, most: int
) -> tuple[int, int]:
    """The context and the bytes of its cache, which holds one whole context at least. most: bytes that there is room for.

    A context that there is no room for becomes a power of two: it decides when an answer ends, so replicas whose free memory differs a
    little have to come to the same one."""
    whole = min(wanted.context or config.text.context, config.text.context)
    least = pages_for(whole) * PAGE_ROWS * row_bytes
    if given := options.kv_cache_bytes:
        if given < least and wanted.context:
            raise LoadError(f"kv_cache_bytes {given}: one context of {whole} tokens takes {least}; give more, or a smaller context")
        room = given
    else:
        room = min(max(least, sessions * min(USUAL_ROWS, whole) * row_bytes), most)
    if room >= least:
        return whole, room
    rows = room // row_bytes // PAGE_ROWS * PAGE_ROWS
    if rows < LEAST_CONTEXT:
        more = "free some memory, or give it a larger memory_share" if options.given(MEMORY_SHARE) else "free some memory"
        raise LoadError(
            f"kv_cache_bytes {room}: room for {rows} tokens of one conversation, {min(whole, LEAST_CONTEXT)} are the least; "
            f"{'give more' if given else more}"
        )
    return _power_of_two(rows), room


def _medium_rows(most: int, room: int) -> int:
    """Tokens of one medium. room: that a pass of the encoder has memory for; a power of two for the reason of a context."""
    return most if room >= most else max(_power_of_two(room), LEAST_MEDIUM_ROWS)


def _power_of_two(most: int) -> int:
    """The largest that is not above `most`; 0: there is none."""
    return 1 << most.bit_length() >> 1


def _patch_bytes(config: VisionConfig) -> int:
    """Of a patch in a pass, roughly: its values, and what a layer has of it at once, in float32."""
    return 4 * (3 * config.patch_values + 12 * config.hidden_size + 4 * config.ffn_size)


def _frame_bytes(config: AudioConfig) -> int:
    """Of a frame of a spectrogram in a pass, as _patch_bytes: two become one behind the convolutions."""
    return 4 * (4 * config.mel_bins + 4 * config.hidden_size + (12 * config.hidden_size + 4 * config.ffn_size) // 2)
