"""The Thinker of Qwen2.5-Omni (Xu et al. 2025): reads text, pictures, sound and films; writes text, and rows for a Talker. `load_thinker`
builds it from the files of a checkpoint in the published layout. Its prompt is laid out as `get_rope_index` of Transformers'
`Qwen2_5OmniThinker` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5OmniTextConfig

from omnistage.engine.decoder import LM_HEAD, DecoderParts, PackedDecoder, last_and_embedding
from omnistage.engine.devices import Group
from omnistage.engine.linear import LinearMaker
from omnistage.engine.parts import contiguous_axes, rotary
from omnistage.models.checkpoint.decoder import BIASED, HEAD_PLAN, config_of_part, weights_of_part
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.encoders.encoder import MediumExtent, PromptLayout
from omnistage.models.encoders.prompt import PromptRows
from omnistage.models.encoders.starting import Ready, ThinkerWeights, weights_below
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.encoders import AudioEncoder, VisionEncoder
from omnistage.models.qwen2_5_omni.family import ThinkerOptions
from omnistage.models.ranks.team import Team, load_in_team
from omnistage.models.speech.talker import AXES, thinker_ports
from omnistage.models.text.chat import ChatTokenizer
from omnistage.models.text.engine_model import decoder_weights

END = "<|im_end|>"


class Qwen2_5Thinker(MediaThinker):
    """The Thinker of Qwen2.5-Omni; implements `ThinkerModel`. Build it with `load_thinker`."""

    def __init__(self, config: ThinkerConfig, ready: Ready, tokenizer: ChatTokenizer) -> None:
        """See MediaThinker."""
        super().__init__(ready, tokenizer)
        self.config = config

    def lay_out(self, prompt_ids: Sequence[int], extents: Sequence[MediumExtent]) -> PromptLayout:
        """See MediaThinker.lay_out."""
        return lay_out(prompt_ids, extents, self.config)


def tokenizer_of(directory: Path, config: ThinkerConfig) -> ChatTokenizer:
    """The tokenizer of a checkpoint. Raises BadCheckpoint."""
    return ChatTokenizer(directory, config.text.vocab_size, END, config.ids.kinds)


def lay_out(ids: Sequence[int], extents: Sequence[MediumExtent], config: ThinkerConfig) -> PromptLayout:
    """See PromptRows.lay_out."""
    return _PromptRows(config).lay_out(ids, extents)


class _PromptRows(PromptRows):
    """The rows of one prompt of Qwen2.5-Omni."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__(config)
        self._config = config

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


# Loading -----------------------------------------------------------------------------------------------------------------------------


CODE_REVISION = "4"
"""Part of the revision; raise it whenever this family's code could give other tokens for equal input. The engine has its own number."""

_PREFIX = "thinker."


def load_thinker(folder: Path, options: LoadOptions) -> Qwen2_5Thinker:
    """Load a Thinker, and start its engine and encoders. Raises LoadError, or ValueError for misshapen weights."""
    config = read_thinker_config(folder)
    config_of_part(config.text, options.tensor_parallel_size)  # Raises an error before other ranks are started in vain.
    return load_in_team(read_decoder, folder, options, partial(_load_rank, folder, config))


def _load_rank(folder: Path, config: ThinkerConfig, options: LoadOptions, team: Team | None) -> Qwen2_5Thinker:
    """The Thinker of this rank. team: the other ranks; None: there are none."""
    tokenizer, thinker_options = tokenizer_of(folder, config), ThinkerOptions.from_settings(options.family)
    produces = partial(thinker_ports, config.text.hidden_size, place=AXES)
    ready = Ready.of(folder, options, config, WEIGHTS, thinker_options, code=CODE_REVISION, produces=produces, team=team)
    return Qwen2_5Thinker(config, ready, tokenizer)


# The weights ---------------------------------------------------------------------------------------------------------------------------


def read_decoder(folder: Path, options: LoadOptions, group: Group) -> PackedDecoder:
    """Read a rank's part of the decoder; implements `rank.RankReader`."""
    return WEIGHTS.read_decoder(folder, options, group)


def _decoder(weights: Weights, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, group: Group) -> PackedDecoder:
    """The decoder, or a rank's part of it."""
    weight = decoder_weights(weights, dtype, device, prefix=f"{_PREFIX}model.", head=_PREFIX + LM_HEAD, tied=config.tied, biased=BIASED)
    parts = DecoderParts(rope=rotary(config.rope.theta, contiguous_axes(config.rope.sections)), tap=last_and_embedding)
    if group.size == 1:
        return PackedDecoder(config.text, weight, parts)
    plan = {**Qwen2_5OmniTextConfig.base_model_tp_plan, **HEAD_PLAN}
    return PackedDecoder(config_of_part(config.text, group.size), weights_of_part(weight, plan, group), parts, group)


def _check_encoders(weights: Weights, config: ThinkerConfig, group: Group) -> None:
    """Raises BadCheckpoint if the config's sizes of the encoders, with which they are built next, do not fit the weights."""
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
    """Build the encoders of pictures and of sound."""
    # Read only so that `check_read` does not refuse it: the published code has this weight and does not use it either.
    weights.read(f"{_PREFIX}audio_tower.audio_bos_eos_token.weight")

    eyes, ears = (weights_below(weights, f"{_PREFIX}{part}.", dtype, device) for part in ("visual", "audio_tower"))
    return VisionEncoder(config.vision, eyes, linear), AudioEncoder(config.audio, ears, linear)


WEIGHTS = ThinkerWeights(
    others=("talker.", "token2wav."), read_config=read_thinker_config, check=_check_encoders, decoder=_decoder, encoders=_encoders
)
