"""The config of a Qwen2.5-Omni checkpoint's Thinker and Talker, from its config.json.

Two spellings are read: `rope_theta` with `rope_scaling`, as the published checkpoints have it, and `rope_parameters` of Transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.engine.parts import DecoderConfig
from omnistage.models.checkpoint.decoder import RopeConfig, decoder_sizes, rope_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.encoders import prompt as encoders
from omnistage.models.encoders.prompt import FRAMES_HZ, MAX_SOUND_POSITIONS, MediaIds, audio_sizes, vision_sizes
from omnistage.models.registry import check_said
from omnistage.models.speech.talker import AXES

MODEL_TYPE = "qwen2_5_omni"

PIECE_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class VisionConfig(encoders.VisionConfig):
    """The common VisionConfig with further values. window_size: pixels of a window's side. full_layers: numbers of the layers whose
    attention sees the whole frame; the other layers see windows."""

    window_size: int
    full_layers: frozenset[int]

    @property
    def film_square(self) -> int:
        """See Patching."""
        return 28

    @property
    def patch_bytes(self) -> int:
        """See VisionSizes."""
        return 4 * (3 * self.patch_values + 12 * self.hidden_size + 4 * self.ffn_size)


@dataclass(frozen=True, slots=True)
class AudioConfig(encoders.AudioConfig):
    """The common AudioConfig with a further value. window: number of frames that attention sees; each of these is made from two frames of
    the spectrogram."""

    window: int

    @property
    def chunk(self) -> int:
        """Number of frames of the spectrogram that convolutions see together."""
        return 2 * self.window

    @property
    def piece(self) -> int:
        """Number of frames of a piece: of all chunks that are encoded at once."""
        return PIECE_CHUNKS * self.chunk

    @property
    def rows_hz(self) -> float:
        """See AudioSizes."""
        return FRAMES_HZ / 4

    @property
    def least_ms(self) -> int:
        """See AudioSizes."""
        return 40

    @property
    def adds_silence(self) -> bool:
        """See AudioSizes."""
        return True

    @property
    def frame_bytes(self) -> int:
        """See AudioSizes; two frames become one after the convolutions."""
        return 4 * (4 * self.mel_bins + 4 * self.hidden_size + (12 * self.hidden_size + 4 * self.ffn_size) // 2)


@dataclass(frozen=True, slots=True)
class ThinkerConfig:
    """The config of a Thinker. text: the language model. rope: of its positions. ids: token ids of media. position_ids_per_second: number
    of positions that a second of sound or film takes. seconds_per_chunk: seconds of a film whose rows and sound rows stand together in the
    prompt. tied: whether the logits use the embedding if there is no head."""

    text: DecoderConfig
    rope: RopeConfig
    vision: VisionConfig
    audio: AudioConfig
    ids: MediaIds
    position_ids_per_second: int
    seconds_per_chunk: float
    tied: bool


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
    check_said(root_config, "qwen2_5_omni", "talker")
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
    text = decoder_sizes(config.section("text_config"))
    return ThinkerConfig(
        text=text,
        rope=rope_of(config.section("text_config"), axes=AXES),
        vision=_vision(config.section("vision_config")),
        audio=_audio(config.section("audio_config")),
        ids=MediaIds(
            image=_read_either(config, "image_token_index", "image_token_id"),
            video=_read_either(config, "video_token_index", "video_token_id"),
            audio=_read_either(config, "audio_token_index", "audio_token_id"),
            audio_start=config.value("audio_start_token_id", int),
            audio_end=config.value("audio_end_token_id", int),
        ).check(text.vocab_size, config.place),
        position_ids_per_second=config.size("position_id_per_seconds") if config.has("position_id_per_seconds") else 25,
        seconds_per_chunk=config.value("seconds_per_chunk", float, 2.0),
        tied=config.value("tie_word_embeddings", bool, False),
    )


def _vision(config: Config) -> VisionConfig:
    """Read a vision_config. Raises BadCheckpoint."""
    return VisionConfig(
        **vision_sizes(config),
        channels=next((config.size(name) for name in ("in_channels", "in_chans") if config.has(name)), 3),
        window_size=config.size("window_size"),
        full_layers=frozenset(config.values("fullatt_block_indexes", int)),
    )


def _audio(config: Config) -> AudioConfig:
    return AudioConfig(**audio_sizes(config), window=config.size("n_window", MAX_SOUND_POSITIONS))


def _read_either(config: Config, name: str, alternative: str) -> int:
    return config.value(name if config.has(name) else alternative, int)
