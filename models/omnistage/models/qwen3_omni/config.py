"""The config of a Qwen3-Omni checkpoint's Thinker, from its config.json, and the numbers that form the place of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from omnistage.engine.parts import ExpertSizes
from omnistage.models.checkpoint.decoder import attention_biases, check_activation, decoder_sizes, expert_sizes
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.encoders.encoder import AudioSizes, VisionSizes
from omnistage.models.encoders.prompt import FRAMES_HZ, MAX_SOUND_POSITIONS, ThinkerSizes, audio_sizes, thinker_sizes, vision_sizes
from omnistage.models.qwen3_omni.family import FAMILY, MODEL_TYPE
from omnistage.models.registry import is_said
from omnistage.models.speech.talker import AXES

SECTIONS = (24, 20, 20)
"""For each axis, the number of pairs of components of a head, if a config does not state them."""

CHUNK_ROWS = 13
"""Number of rows that the sound encoder makes from a whole chunk. The published code has this number, whatever the size of a chunk."""


@dataclass(frozen=True, slots=True)
class VisionConfig(VisionSizes):
    """VisionSizes with further values. positions: number of rows of the table of positions, which form a square. deepstack: numbers of the
    layers after which rows of output_size are made for layers of the decoder too."""

    film_square = 32

    positions: int
    deepstack: tuple[int, ...]

    @property
    def grid(self) -> int:
        """Number of rows, and of columns, of the square of positions."""
        return isqrt(self.positions)

    @property
    def row_size(self) -> int:
        """Width of an output row: the row for the decoder's input, and a part for each layer of `deepstack`."""
        return (1 + len(self.deepstack)) * self.output_size

    @property
    def patch_bytes(self) -> int:
        """See VisionSizes."""
        return 4 * (3 * self.patch_values + 12 * self.hidden_size + 2 * self.ffn_size + self.row_size // self.unit)


@dataclass(frozen=True, slots=True)
class AudioConfig(AudioSizes):
    """AudioSizes with further values. A piece is one window of attention. channels: of the convolutions. row_size: width of an output row,
    padded with zeros to the width of rows of pictures."""

    least_ms, adds_silence = 13, False
    """The extractor mirrors 200 samples at the ends of a sound, so it must have more than 12 ms."""

    channels: int
    row_size: int

    @property
    def frame_bytes(self) -> int:
        """See AudioSizes. Most of it is the input of the second convolution: for every fourth frame, nine numbers of each channel and of a
        quarter of the bins."""
        convolution_inputs = 9 * self.channels * self.mel_bins // 16
        return 4 * (self.mel_bins + convolution_inputs + (12 * self.hidden_size + 2 * self.ffn_size + self.row_size) // 8)


@dataclass(frozen=True, slots=True)
class SpeechSource:
    """Facts of the Thinker that decide which rows the Talker gets. layer: for media, the Talker gets the hidden rows with this index in
    `hidden_states` of Transformers. turn: the id with which a turn begins. user: the second id of a user's turn."""

    layer: int
    turn: int
    user: int


@dataclass(frozen=True, slots=True)
class ThinkerConfig(ThinkerSizes):
    """ThinkerSizes with a further value. speech: None: the checkpoint has no Talker."""

    experts: ExpertSizes
    vision: VisionConfig
    audio: AudioConfig
    speech: SpeechSource | None


def read_thinker_config(directory: Path) -> ThinkerConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    config = root_config.section("thinker_config")
    check_plain(root_config, config)
    words, vision = config.section("text_config"), _vision(config.section("vision_config"))
    text = replace(decoder_sizes(words, ffn_size="moe_intermediate_size"), given_width=vision.row_size)
    audio = _audio(config.section("audio_config"), vision.row_size)
    for name, size in (("vision_config: 'out_hidden_size'", vision.output_size), ("audio_config: 'output_dim'", audio.output_size)):
        if size != text.hidden_size:
            raise BadCheckpoint(f"{config.place}: {name} is {size}, and rows of the Thinker have {text.hidden_size}")
    if len(vision.deepstack) > text.layers:
        raise BadCheckpoint(f"{config.place}: {len(vision.deepstack)} 'deepstack_visual_indexes' are more than the layers of the text")
    return ThinkerConfig(
        **thinker_sizes(config, text, SECTIONS),
        experts=expert_sizes(words, normalized=True),
        biased=attention_biases(words),
        vision=vision,
        audio=audio,
        speech=_speech(root_config, text.layers),
    )


def _speech(root_config: Config, layers: int) -> SpeechSource | None:
    """The facts for the Talker; None: the checkpoint has no Talker. layers: number of layers of the Thinker's decoder. Raises
    BadCheckpoint."""
    if not is_said(root_config, FAMILY, "talker"):
        return None
    talker = root_config.section("talker_config")
    layer = talker.value("accept_hidden_layer", int, 18)
    if not 0 <= layer <= layers:
        raise BadCheckpoint(f"{talker.place}: 'accept_hidden_layer' is {layer}, and the Thinker has {layers} layers")
    return SpeechSource(layer, root_config.value("im_start_token_id", int), root_config.value("user_token_id", int))


def _vision(config: Config) -> VisionConfig:
    """Read a vision_config. Raises BadCheckpoint."""
    check_activation(config, "hidden_act", "gelu_pytorch_tanh")
    layers, deepstack = config.size("depth"), config.values("deepstack_visual_indexes", int)
    if not all(0 <= layer < layers for layer in deepstack) or len(set(deepstack)) < len(deepstack):
        statement = f"{config.place}: 'deepstack_visual_indexes' is {list(deepstack)}"
        raise BadCheckpoint(f"{statement}: these are layers from 0 to {layers - 1}, each one once")
    vision = VisionConfig(**vision_sizes(config), positions=config.size("num_position_embeddings"), deepstack=deepstack)
    if vision.hidden_size % (4 * vision.heads):
        raise BadCheckpoint(f"{config.place}: 'hidden_size' {vision.hidden_size} is not {vision.heads} heads of a multiple of 4 numbers")
    return vision


def _audio(config: Config, row_size: int) -> AudioConfig:
    """Read an audio_config. row_size: see AudioConfig. Raises BadCheckpoint."""
    check_activation(config, "activation_function", "gelu")
    chunk = 2 * config.size("n_window", MAX_SOUND_POSITIONS)
    if convolved_length(chunk) != CHUNK_ROWS:
        statement = f"{config.place}: 'n_window' is {chunk // 2}, which makes chunks of {convolved_length(chunk)} rows"
        raise BadCheckpoint(f"{statement}: only chunks of {CHUNK_ROWS} are supported, as 50 makes them")
    if (window := config.size("n_window_infer")) < chunk:
        raise BadCheckpoint(f"{config.place}: 'n_window_infer' is {window}: it must be twice 'n_window' or more, {chunk}")
    audio = AudioConfig(
        **audio_sizes(config),
        chunk=chunk,
        piece=window // chunk * chunk,
        rows_hz=CHUNK_ROWS * FRAMES_HZ / chunk,
        channels=config.size("downsample_hidden_size"),
        row_size=row_size,
    )
    if audio.hidden_size % (2 * audio.heads) or audio.hidden_size < 4:
        raise BadCheckpoint(f"{config.place}: 'd_model' {audio.hidden_size} is not {audio.heads} heads of an even size")
    if audio.positions < CHUNK_ROWS:
        raise BadCheckpoint(f"{config.place}: 'max_source_positions' is {audio.positions}, and a chunk has {CHUNK_ROWS} rows")
    return audio


def convolved_length(count: int) -> int:
    """Number of frames or bins that three convolutions leave of `count`; each convolution keeps every second."""
    for _ in range(3):
        count = (count - 1) // 2 + 1
    return count


PLACE = AXES + 1
"""How many numbers a place has: one for each axis, and the kind of its row as the last number."""

TEXT_ROW, MEDIUM_ROW = 0, 1
"""The kinds of a conversation's rows: the embedding of a token, or a hidden row of a picture, a film or sound."""
