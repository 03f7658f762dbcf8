"""The config of a Qwen2.5-Omni checkpoint's Thinker and Talker, from its config.json.

Two spellings are read: `rope_theta` with `rope_scaling`, as the published checkpoints have it, and `rope_parameters` of Transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.engine.parts import DecoderConfig
from omnistage.models.checkpoint.decoder import BIASED, RopeConfig, decoder_sizes, rope_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.encoders.encoder import AudioSizes, VisionSizes
from omnistage.models.encoders.prompt import FRAMES_HZ, MAX_SOUND_POSITIONS, ThinkerSizes, audio_sizes, thinker_sizes, vision_sizes
from omnistage.models.qwen2_5_omni.family import FAMILY, MODEL_TYPE
from omnistage.models.registry import check_said
from omnistage.models.speech.talker import AXES

PIECE_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class VisionConfig(VisionSizes):
    """VisionSizes with further values. window_size: pixels of a window's side. full_layers: numbers of the layers whose attention sees the
    whole frame; the other layers see windows."""

    film_square = 28

    window_size: int
    full_layers: frozenset[int]

    @property
    def patch_bytes(self) -> int:
        """See VisionSizes."""
        return 4 * (3 * self.patch_values + 12 * self.hidden_size + 4 * self.ffn_size)


class AudioConfig(AudioSizes):
    """See AudioSizes. Attention sees a chunk."""

    __slots__ = ()
    least_ms, adds_silence = 40, True

    @property
    def frame_bytes(self) -> int:
        """See AudioSizes; two frames become one after the convolutions."""
        return 4 * (4 * self.mel_bins + 4 * self.hidden_size + (12 * self.hidden_size + 4 * self.ffn_size) // 2)


@dataclass(frozen=True, slots=True)
class ThinkerConfig(ThinkerSizes):
    """ThinkerSizes with a further value. seconds_per_chunk: seconds of a film whose rows and sound rows stand together in the prompt."""

    vision: VisionConfig
    audio: AudioConfig
    seconds_per_chunk: float


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Items of the Talker that are no codes. `eos` and `pad` end a speech."""

    bos: int
    eos: int
    pad: int
    mask: int


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    """The config of a Talker. decoder: has one item id more than the checkpoint, the last id, which stands for no item. rope: of its
    positions. codec: special items. silent: items that are neither codes nor an end, from which Code2Wav could make no sound. row_size:
    width of the rows that come from the Thinker, and of the embeddings of items. text_end, text_pad: token ids of the Thinker for the rows
    after an answer. block: number of codes that Code2Wav attends to together. speaker_size, mel_bins: widths of a voice's vector and
    example."""

    decoder: DecoderConfig
    rope: RopeConfig
    codec: CodecIds
    silent: frozenset[int]
    row_size: int
    text_end: int
    text_pad: int
    block: int
    speaker_size: int
    mel_bins: int

    @property
    def blank_item(self) -> int:
        """The item that stands for no item."""
        return self.decoder.vocab_size - 1


def read_talker_config(directory: Path) -> TalkerConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    check_said(root_config, FAMILY, "talker")
    config, dit = root_config.section("talker_config"), root_config.section("token2wav_config").section("dit_config")
    check_plain(root_config, config)
    decoder, row_size = decoder_sizes(config), config.size("embedding_size")
    bos, eos, pad, mask = (config.value(f"tts_codec_{name}_token_id", int) for name in ("start", "end", "pad", "mask"))
    if row_size != root_config.section("thinker_config").section("text_config").value("hidden_size", int):
        raise BadCheckpoint(f"{config.place}: 'embedding_size' is {row_size}, which is not that of the rows of the Thinker")
    for item in (bos, eos, pad, mask):
        if not 0 <= item < decoder.vocab_size:
            raise BadCheckpoint(f"{config.place}: there is no item {item}, 'vocab_size' is {decoder.vocab_size}")
    return TalkerConfig(
        decoder=replace(decoder, vocab_size=decoder.vocab_size + 1, embedding_width=row_size, given_width=row_size),
        rope=rope_of(config, axes=AXES),
        codec=CodecIds(bos, eos, pad, mask),
        # The table of Code2Wav has one row more than `num_embeds`.
        silent=frozenset({bos, mask, *range(dit.size("num_embeds") + 1, decoder.vocab_size)}) - {eos, pad},
        row_size=row_size,
        text_end=config.value("tts_text_end_token_id", int),
        text_pad=config.value("tts_text_pad_token_id", int),
        block=max(dit.size("block_size") // dit.size("repeats"), 1),
        speaker_size=dit.size("enc_emb_dim"),
        mel_bins=dit.size("mel_dim"),
    )


def read_thinker_config(directory: Path) -> ThinkerConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    config = root_config.section("thinker_config")
    check_plain(root_config, config)
    return ThinkerConfig(
        **thinker_sizes(config, decoder_sizes(config.section("text_config"))),
        experts=None,
        biased=BIASED,
        vision=_vision(config.section("vision_config")),
        audio=_audio(config.section("audio_config")),
        seconds_per_chunk=config.value("seconds_per_chunk", float, 2.0),
    )


def _vision(config: Config) -> VisionConfig:
    """Read a vision_config. Raises BadCheckpoint."""
    full_layers = frozenset(config.values("fullatt_block_indexes", int))
    return VisionConfig(**vision_sizes(config), window_size=config.size("window_size"), full_layers=full_layers)


def _audio(config: Config) -> AudioConfig:
    """Read an audio_config. Each frame that attention sees is made from two frames of the spectrogram. Raises BadCheckpoint."""
    chunk = 2 * config.size("n_window", MAX_SOUND_POSITIONS)
    return AudioConfig(**audio_sizes(config), chunk=chunk, piece=PIECE_CHUNKS * chunk, rows_hz=FRAMES_HZ / 4)
