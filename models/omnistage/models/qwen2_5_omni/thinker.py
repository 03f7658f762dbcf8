"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker. `load_thinker`
builds it from the files of a checkpoint in the published layout. Its prompt is laid out as `get_rope_index` of Transformers'
`Qwen2_5OmniThinker` does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import Qwen2_5OmniTextConfig

from omnistage.engine.decoder import DecoderParts, PackedDecoder, last_and_embedding
from omnistage.engine.devices import Group
from omnistage.engine.parts import contiguous_axes, rotary
from omnistage.models.encoders.encoder import MediumExtent
from omnistage.models.encoders.prompt import PromptRows
from omnistage.models.encoders.starting import Ready, ThinkerWeights, part_of_text
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.encoders import AudioEncoder, VisionEncoder
from omnistage.models.qwen2_5_omni.family import THINKER
from omnistage.models.ranks.team import Team, load_in_team
from omnistage.models.speech.talker import AXES, thinker_ports
from omnistage.models.text.chat import ChatTokenizer

END = "<|im_end|>"


class Qwen2_5PromptRows(PromptRows):
    """The rows of one prompt of Qwen2.5-Omni."""

    _config: ThinkerConfig

    def film_with_sound(self, extent: MediumExtent) -> None:
        """Add the rows of a film and its sound. The rows of each `seconds_per_chunk` seconds stand together, rows of pictures first. The
        marks around the sound have the positions of the marks around the film."""
        config, begin = self._config, self.next
        self.add(np.array([config.ids.audio_start]), np.full((3, 1), begin - 1))
        (picture_ids, picture_positions), (sound_ids, sound_positions) = self.make_picture_run(extent), self.make_sound_run(extent.sound)
        step = int(config.position_ids_per_second * config.seconds_per_chunk)
        pieces = list[NDArray[np.int64]]()  # indices into the rows of pictures, followed by the rows of sound
        picture_chunks, sound_chunks = (_chunks(positions[0] - begin, step) for positions in (picture_positions, sound_positions))
        for index in range(max(len(picture_chunks), len(sound_chunks))):
            if index < len(picture_chunks):
                pieces.append(np.arange(*picture_chunks[index]))
            if index < len(sound_chunks):
                pieces.append(np.arange(*sound_chunks[index]) + len(picture_ids))
        order = np.concatenate(pieces)
        positions = np.concatenate((picture_positions, sound_positions), 1)
        self.run(np.concatenate((picture_ids, sound_ids))[order], positions[:, order], order)
        # Later positions follow the positions of the last piece, even if the other medium has larger ones, because the model was trained
        # so.
        self.next = int(positions[:, pieces[-1]].max()) + 1
        self.add(np.array([config.ids.audio_end]), np.full((3, 1), self.next))
        self.next -= 1  # The mark after the film has the position of the mark after the sound.


def _chunks(times: NDArray[np.int64], step: int) -> list[tuple[int, int]]:
    """Cut rows into chunks by their times. times: of each row, [rows]. Returns for each chunk the index of its first row, and the index
    after its last row. The n-th chunk ends before the first row with a time of n * step or later."""
    chunks, start = list[tuple[int, int]](), 0
    for index in range(len(times)):
        if times[index] >= (len(chunks) + 1) * step:
            chunks.append((start, index))
            start = index
    chunks.append((start, len(times)))
    return chunks


class Qwen2_5Thinker(MediaThinker):
    """The Thinker of Qwen2.5-Omni; implements `ThinkerModel`. Build it with `load_thinker`."""

    config: ThinkerConfig
    prompt_rows = Qwen2_5PromptRows


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "4"
"""Part of the revision; raise it whenever this family's code could give other tokens for equal input. The engine has its own number."""


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """The tokenizer of a checkpoint. Raises BadCheckpoint."""
    return ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)


def load_thinker(folder: Path, options: LoadOptions) -> Qwen2_5Thinker:
    """Load a Thinker, and start its engine and encoders. Raises LoadError, or ValueError for misshapen weights."""
    config = read_thinker_config(folder)
    part_of_text(config, options.tensor_parallel_size)  # Raises an error before other ranks are started in vain.
    return load_in_team(read_decoder, folder, options, partial(_load_rank, folder, config))


def _load_rank(folder: Path, config: ThinkerConfig, options: LoadOptions, team: Team | None) -> Qwen2_5Thinker:
    """The Thinker of this rank. team: the other ranks; None: there are none."""
    tokenizer, thinker_options = tokenizer_of(folder, config), THINKER.from_settings(options.family)
    produces = partial(thinker_ports, config.text.hidden_size, place=AXES)
    ready = Ready.of(folder, options, config, WEIGHTS, thinker_options, code=CODE_REVISION, produces=produces, team=team)
    return Qwen2_5Thinker(ready, tokenizer)


# The weights ---------------------------------------------------------------------------------------------------------------------------


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """Read a rank's part of the decoder; implements `rank.RankReader`."""
    return WEIGHTS.read_decoder(folder, options, group)


def _decoder_parts(config: ThinkerConfig) -> DecoderParts:
    return DecoderParts(rope=rotary(config.rope.theta, contiguous_axes(config.rope.sections)), tap=last_and_embedding)


def _shapes(config: ThinkerConfig) -> dict[str, tuple[int, ...]]:
    """See ThinkerWeights.shapes."""
    eyes, ears = config.vision, config.audio
    merged = eyes.hidden_size * eyes.unit
    return {
        "visual.blocks.0.mlp.gate_proj.weight": (eyes.ffn_size, eyes.hidden_size),
        "visual.merger.mlp.0.weight": (merged, merged),
        "audio_tower.conv1.weight": (ears.hidden_size, ears.mel_bins, 3),
        "audio_tower.proj.weight": (ears.output_size, ears.hidden_size),
    }


WEIGHTS = ThinkerWeights(
    others=("talker.", "token2wav."),
    read_config=read_thinker_config,
    shapes=_shapes,
    parts=_decoder_parts,
    plan=Qwen2_5OmniTextConfig.base_model_tp_plan,
    vision=VisionEncoder,
    audio=AudioEncoder,
    unused=("audio_tower.audio_bos_eos_token.weight",),
)
