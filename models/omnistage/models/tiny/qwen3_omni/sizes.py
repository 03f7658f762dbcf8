"""The sizes of `make-tiny qwen3-omni`, and the values that each has as published for Qwen/Qwen3-Omni-30B-A3B-Instruct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEL_BINS = 128

RESERVED = 1024
"""How many items the Talker has after its codes."""

SPECIAL = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
"""Items by their names in the config, counted from the first item that is no code."""

SPEAKERS = {"chelsie": 253, "ethan": 254, "aiden": 255}
"""Items by voice, counted as above."""


@dataclass(frozen=True, slots=True)
class TextSize:
    """The decoder of the Thinker. rope_sections: pairs of components of a head that turn by time, height and width; together half of
    head_size. chosen: how many of the experts a row goes to. expert: width of an expert."""

    layers: int
    hidden: int  # Width of a row.
    heads: int
    kv_heads: int  # Heads of keys and values.
    head_size: int
    rope_sections: tuple[int, int, int]
    experts: int
    chosen: int
    expert: int


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The picture encoder. deepstack: layers whose rows are added in the decoder too. grid: rows and columns of its table of positions."""

    layers: int
    hidden: int  # Width of a row.
    ffn: int  # Width inside an MLP.
    heads: int
    deepstack: tuple[int, ...]
    grid: int


@dataclass(frozen=True, slots=True)
class AudioSize:
    """The sound encoder. channels: of its convolutions. window: mel frames that attention sees together, a multiple of 100."""

    layers: int
    hidden: int  # Width of a row.
    ffn: int  # Width inside an MLP.
    heads: int
    channels: int
    window: int


@dataclass(frozen=True, slots=True)
class ThinkerSize:
    """The Thinker: its decoder, and its encoders of pictures and sound."""

    text: TextSize
    vision: VisionSize
    audio: AudioSize


@dataclass(frozen=True, slots=True)
class TalkerSize:
    """The Talker. codes: how many ids a codebook has. groups: codes of a frame. between: width inside the two projections. sections: as
    rope_sections above. expert, shared: widths of an expert, and of the expert for all rows. predictor_*: sizes of the code predictor."""

    layers: int = 2
    hidden: int = 96  # Width of a row.
    heads: int = 6
    kv_heads: int = 2  # Heads of keys and values.
    head_size: int = 32
    sections: tuple[int, int, int] = (6, 5, 5)
    between: int = 76
    experts: int = 11
    chosen: int = 3  # Experts to which a row goes.
    expert: int = 40
    shared: int = 56
    codes: int = 160
    groups: int = 16
    predictor_layers: int = 2
    predictor_ffn: int = 136
    predictor_heads: int = 4
    predictor_kv_heads: int = 2
    predictor_head_size: int = 40


@dataclass(frozen=True, slots=True)
class Size:
    """A whole model. hidden_layer: layer of the Thinker whose rows the Talker gets for media, as `hidden_states` of Transformers counts."""

    thinker: ThinkerSize
    hidden_layer: int
    talker: TalkerSize


SIZES: Mapping[str, Size] = {
    "tiny": Size(
        ThinkerSize(
            TextSize(layers=4, hidden=160, heads=6, kv_heads=2, head_size=32, rope_sections=(6, 5, 5), experts=10, chosen=3, expert=80),
            VisionSize(layers=4, hidden=80, ffn=112, heads=5, deepstack=(0, 2), grid=7),
            AudioSize(layers=2, hidden=96, ffn=160, heads=4, channels=24, window=300),
        ),
        3,
        TalkerSize(),
    ),
    "small": Size(
        ThinkerSize(
            TextSize(layers=6, hidden=256, heads=10, kv_heads=2, head_size=32, rope_sections=(6, 5, 5), experts=24, chosen=4, expert=192),
            VisionSize(layers=6, hidden=144, ffn=320, heads=9, deepstack=(1, 3, 4), grid=24),
            AudioSize(layers=3, hidden=160, ffn=448, heads=5, channels=48, window=800),
        ),
        4,
        TalkerSize(layers=4, hidden=192, between=144, experts=20, expert=80, shared=112, codes=2048, predictor_layers=3, predictor_ffn=272),
    ),
}
